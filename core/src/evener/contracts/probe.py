"""The probe: is a backend's hardware here, and may it be used?

The module that ``Descriptor.probe`` names is torch-free when imported and holds::

    def marks() -> Marks: ...        # required; cheap: device nodes, torch/version.py read as text
    def probe() -> ProbeResult: ...  # runs in a child process with a time limit; may import torch and the SDK
    def result_from_marks(marks) -> ProbeResult: ...   # instead of probe(), when marks alone decide (the CPU)

``probe`` never runs in the parent, so the parent never opens a device context. Its working directory is a scratch
folder, what it prints is kept for the error message only, and processes that it leaves behind are killed. A result with
a score above 0 is cached by boot, ``Marks``, and the versions of the package and of torch; a failure never is.

A backend whose marks fit but whose probe raises, crashes or exceeds its time limit stops start-up, so that nobody runs
on the wrong device without knowing. For hardware that is there but not meant for this backend, return a score of 0 with
reasons.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Marks:
    """Cheap signs of the hardware.

    Attributes:
        fit: True if the probe is worth running.
        reasons: what was seen, or what was missing; shown by ``evener doctor``.
        bus: (optional) PCI devices that this backend claims, as ``vendor:device`` in lower-case hex, ``*`` for any
            (``1abc:*``), so that accelerators which nobody claims can be named. Claim them when ``fit`` is false, too.
        cache_key: (optional) whatever the probe's answer depends on beside boot and package versions: the driver's
            version, ``*_VISIBLE_DEVICES``.
    """

    fit: bool
    reasons: tuple[str, ...] = ()
    bus: tuple[str, ...] = ()
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
        score: 0 = cannot run here; otherwise the highest score wins. CPU 10, own accelerators 100.
        devices: what can be used.
        reasons: why, in words; shown by ``evener doctor``.
    """

    score: int
    devices: tuple[ProbedDevice, ...] = ()
    reasons: tuple[str, ...] = ()
