"""What came of a run: every case, and versions of whatever took part. Torch-free."""

from __future__ import annotations

import platform
import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from datetime import datetime, timezone
from typing import TYPE_CHECKING, Any

from evener.contracts.descriptor import CORE_CONTRACTS
from evener.testing.conformance.outcome import AREAS, REQUIRED, CaseResult

if TYPE_CHECKING:
    from evener.testing.conformance.subject import Subject

#: Of the result file. Grows when a reader of it would have to change.
FORMAT = 1

#: Numbers and lists of them; not those of lines in a file, nor those in names. NaN is a reason of its own.
NUMBERS = re.compile(r"(?<![:\w.])[-+]?\d[\d.]*(e[-+]?\d+)?\b(, \d+\b)*")


@dataclass(frozen=True)
class Result:
    """A run's cases and facts."""

    cases: Sequence[CaseResult]
    facts: dict[str, Any]
    whole: bool = True

    @property
    def wrong(self) -> list[CaseResult]:
        """What keeps it from passing: every failure, and what nobody could see where that is required."""
        return [c for c in self.cases if c.outcome == "failed" or (c.outcome == "unknown" and c.area in REQUIRED)]

    @property
    def causes(self) -> list[list[CaseResult]]:
        """What is wrong, with cases of one provider together whose reasons differ in no more than their numbers."""
        found: dict[tuple[str, ...], list[CaseResult]] = {}
        for c in self.wrong:
            reason = NUMBERS.sub("#", c.detail.removeprefix(c.case))
            found.setdefault((c.area, c.subject, c.provider, c.outcome, reason), []).append(c)
        return list(found.values())

    @property
    def unseen(self) -> list[CaseResult]:
        """What nobody could see where nothing is required."""
        return [c for c in self.cases if c.outcome == "unknown" and c.area not in REQUIRED]

    @property
    def passed(self) -> bool:
        """Nothing is wrong, and something was seen to be right."""
        return not self.wrong and any(c.outcome == "passed" for c in self.cases)

    def summary(self) -> dict[str, dict[str, int]]:
        """Cases by area and outcome."""
        return {
            area: dict(Counter(c.outcome for c in self.cases if c.area == area))
            for area in AREAS if any(c.area == area for c in self.cases)
        }  # fmt: skip

    def to_json(self) -> dict[str, Any]:
        """The result file."""
        return {
            "format": FORMAT, **self.facts, "passed": self.passed, "whole": self.whole, "summary": self.summary(),
            "cases": [asdict(c) for c in self.cases],
        }  # fmt: skip


def facts_of(subject: Subject, mode: str, seed: int, thorough: bool = False) -> dict[str, Any]:
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
