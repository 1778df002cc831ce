"""The result of a run: every case, and the versions of everything that took part. Torch-free."""

from __future__ import annotations

import platform
import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from datetime import datetime, timezone
from typing import TYPE_CHECKING, Any

from evener.contracts.descriptor import CORE_CONTRACTS
from evener_conformance.kit.outcome import AREAS, REQUIRED, CaseResult

if TYPE_CHECKING:
    from evener_conformance.kit.subject import Subject

#: Format of the result file; raised when readers have to change.
FORMAT = 1

#: Numbers and lists of numbers; not line numbers and not digits in names. NaN is a reason of its own.
NUMBERS = re.compile(r"(?<![:\w.])[-+]?\d[\d.]*(e[-+]?\d+)?\b(, \d+\b)*")


@dataclass(frozen=True)
class Result:
    """A run's cases and facts."""

    cases: Sequence[CaseResult]
    facts: dict[str, Any]
    whole: bool = True

    @property
    def wrong(self) -> list[CaseResult]:
        """Cases that keep the run from passing: failures, and unknown outcomes in required areas."""
        return [c for c in self.cases if c.outcome == "failed" or (c.outcome == "unknown" and c.area in REQUIRED)]

    @property
    def causes(self) -> list[list[CaseResult]]:
        """``wrong``, grouped: cases of one provider whose reasons differ only in numbers are together."""
        found: dict[tuple[str, ...], list[CaseResult]] = {}
        for c in self.wrong:
            reason = NUMBERS.sub("#", c.detail.removeprefix(c.case))
            found.setdefault((c.area, c.subject, c.provider, c.outcome, reason), []).append(c)
        return list(found.values())

    @property
    def optional_unknowns(self) -> list[CaseResult]:
        """Unknown outcomes in areas that are not required."""
        return [c for c in self.cases if c.outcome == "unknown" and c.area not in REQUIRED]

    @property
    def passed(self) -> bool:
        """Whether nothing is wrong and at least one case passed."""
        return not self.wrong and any(c.outcome == "passed" for c in self.cases)

    def summary(self) -> dict[str, dict[str, int]]:
        """Cases by area and outcome."""
        return {
            area: dict(Counter(c.outcome for c in self.cases if c.area == area))
            for area in AREAS if any(c.area == area for c in self.cases)
        }  # fmt: skip

    def to_json(self) -> dict[str, Any]:
        """The content of the result file."""
        return {
            "format": FORMAT, **self.facts, "passed": self.passed, "whole": self.whole, "summary": self.summary(),
            "cases": [asdict(c) for c in self.cases],
        }  # fmt: skip


def run_facts(subject: Subject, mode: str, seed: int, thorough: bool = False) -> dict[str, Any]:
    """Versions of core, contracts, packages, torch and driver; the device; the level of evidence."""
    from importlib_metadata import version

    selection, device = subject.loaded.selection, subject.device
    able = device.capabilities
    return {
        "mode": mode, "level": subject.level, "pretended": subject.pretended, "simulated": device.simulated,
        "seed": seed, "thorough": thorough, "when": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "backend": {
            "name": subject.name, "distribution": selection.backend.distribution,
            "version": selection.backend.version, "contracts": dict(selection.backend.descriptor.contracts),
            "options": {name: dict(values) for name, values in subject.options.items()},
        },
        "device": {
            "name": device.name, "torch": str(device.torch_device), "variant": able.variant,
            "dtypes": sorted(able.dtypes), "emulated": sorted(able.emulated), "features": sorted(able.features),
        },
        "driver": dict(subject.facts),
        "versions": {
            "evener": version("evener"), "torch": _torch(), "python": platform.python_version(),
            "system": f"{platform.system()} {platform.machine()}", "contracts": {k: list(v) for k, v in
                                                                                 CORE_CONTRACTS.items()},
            "packages": {p.distribution: p.version for p in selection.packages},
        },
    }  # fmt: skip


def _torch() -> str:
    import torch

    return str(torch.__version__)
