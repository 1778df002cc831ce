"""The probe contract: is a backend's hardware present, and can it be used?

The module that ``Descriptor.probe`` names must not import torch when it is imported. It has these functions::

    def marks() -> Marks: ...        # required; cheap: device nodes, torch/version.py read as text
    def probe() -> ProbeResult: ...  # runs in a child process with a time limit; may import torch and the SDK
    def result_from_marks(marks) -> ProbeResult: ...   # instead of probe(), if marks are enough to decide (the CPU)

``probe`` runs in a child process, so the parent never opens a device context. Its working directory is a temporary
folder, its output is shown only in error messages, and processes that it leaves behind are killed. A result with a
score above 0 is cached by boot, ``Marks``, and the versions of the package and of torch; a failure is never cached.

If the marks fit but the probe raises, crashes or exceeds its time limit, start-up stops with an error, so that nobody
runs on another device without noticing. For hardware that is present but not for this backend, return a score of 0 with
reasons.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Marks:
    """Signs of the hardware that are cheap to find.

    Attributes:
        fit: True if the probe should run.
        reasons: the findings and what is missing; shown by ``evener doctor``.
        pci_ids: (optional) PCI devices that this backend serves, as ``vendor:device`` in lower-case hex, ``*`` for any
            (``1abc:*``). Start-up warns about accelerators that no backend names. Name them also if ``fit`` is false.
        cache_key: (optional) what the probe's result depends on besides boot and package versions: the driver's
            version, ``*_VISIBLE_DEVICES``.
    """

    fit: bool
    reasons: tuple[str, ...] = ()
    pci_ids: tuple[str, ...] = ()
    cache_key: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class ProbedDevice:
    """One device that the probe found: ``index`` in the backend's namespace, ``name``, ``memory`` in bytes."""

    index: int
    name: str
    memory: int = 0


@dataclass(frozen=True)
class ProbeResult:
    """What the probe found.

    Attributes:
        score: 0 if it cannot run here; otherwise the backend with the highest score is chosen. The CPU backend has 10,
            accelerators 100.
        devices: the usable devices.
        reasons: why, in words; shown by ``evener doctor``.
    """

    score: int
    devices: tuple[ProbedDevice, ...] = ()
    reasons: tuple[str, ...] = ()
