"""The outcome of one case, and a check, which gives outcomes. Torch-free."""

from __future__ import annotations

import inspect
import os
import sys
import traceback
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from types import FrameType
from typing import Literal

Outcome = Literal["passed", "failed", "unknown", "not applicable"]

#: Areas that every backend must pass; the others only if it registers something for them.
REQUIRED = ("device", "primitives", "attention", "model")
#: In the order in which they run.
AREAS = (*REQUIRED[:3], "composites", "formats", "graphs", "collectives", "memory", "model")

#: Top-level modules through which calls reach a backend's code, or leave it.
_NOT_BACKEND_MODULES = {
    "evener", "evener_conformance", "evener_convert", "evener_formats", "evener_generation", "evener_models", "torch",
    "numpy", "pluggy",
} | sys.stdlib_module_names  # fmt: skip


@dataclass(frozen=True)
class CaseResult:
    """The outcome of one case.

    Attributes:
        area: one of ``AREAS``.
        subject: the op, the kind of state, … that was checked.
        provider: the kernel or state provider that was checked.
        dtype: compute dtype; "" if there is none.
        case: sizes and whatever else is needed to find it again with the run's seed.
        detail: the reason, or everything that is wrong; for an exception also the line of the backend that led to it.
        place: ``file:line`` of the backend's class that failed.
    """

    area: str
    subject: str
    provider: str
    dtype: str
    case: str
    outcome: Outcome
    detail: str = ""
    place: str = ""

    def __str__(self) -> str:
        of = f" (of {self.place})" if self.place else ""
        return f"{self.provider} {self.subject}[{self.dtype}] {self.case}: {self.outcome} {self.detail}".rstrip() + of


@dataclass(frozen=True)
class Check:
    """All cases of one provider of one subject, or of one ``variant`` of it; ``run`` computes them."""

    area: str
    subject: str
    provider: str
    run: Callable[[], Iterable[CaseResult]]
    variant: str = ""

    @property
    def name(self) -> str:
        """``area/subject[provider]``, and the variant."""
        provider = f"[{self.provider}]" if self.provider else ""
        return f"{self.area}/{self.subject}{provider}" + (f" {self.variant}" if self.variant else "")

    @property
    def names(self) -> frozenset[str]:
        """Names by which a user may select it."""
        return frozenset({self.area, self.subject, self.provider, self.provider.rpartition("/")[2]} - {""})

    def result(self, case: str, outcome: Outcome, detail: str = "", dtype: str = "") -> CaseResult:
        """A result of this check."""
        return CaseResult(self.area, self.subject, self.provider, dtype, case, outcome, detail)


def most_common(reasons: Iterable[str]) -> str:
    """The reason that was given most often; of several, the first."""
    return Counter(reasons).most_common(1)[0][0]


def format_backend_exception(error: Exception) -> str:
    """Text for a backend's exception, with the deepest line in its own code. ``EVENER_DEBUG=1`` raises it
    instead."""
    if os.environ.get("EVENER_DEBUG", "0") not in ("", "0"):
        raise error
    text = " ".join(str(error).split())
    return f"raised {type(error).__name__}: {text[:400]} ({_where(error)}; EVENER_DEBUG=1 shows all)"


def _where(error: BaseException) -> str:
    """The package that the kit or the engine called first is the backend; what it called (torch, a library) is not."""
    frames = [(f.f_globals.get("__name__", ""), f.f_code.co_filename, line) for f, line in _frames(error)]
    strange = [name.partition(".")[0] for name, _, _ in frames if name.partition(".")[0] not in _NOT_BACKEND_MODULES]
    *_, deepest = frames
    if not strange:
        return f"at {_at(deepest)}, outside the backend's own code"
    *_, own = (frame for frame in frames if frame[0].partition(".")[0] == strange[0])
    return f"at {_at(own)}" + (f", which led to {_at(deepest)}" if own != deepest else "")


def _frames(error: BaseException) -> Iterator[tuple[FrameType, int]]:
    """Frames from the outermost to the innermost, including those of the exceptions that caused this one."""
    yield from traceback.walk_tb(error.__traceback__)
    if error.__cause__ is not None:
        yield from _frames(error.__cause__)


def _at(frame: tuple[str, str, int]) -> str:
    return f"{frame[1]}:{frame[2]}"


def source_location(value: object) -> str:
    """``file:line`` of a backend's class or function; empty if it is one of ours."""
    made = value if inspect.isfunction(value) else type(value)
    if made.__module__.partition(".")[0] in _NOT_BACKEND_MODULES:
        return ""
    try:
        return f"{inspect.getsourcefile(made)}:{inspect.findsource(made)[1] + 1}"
    except (OSError, TypeError):  # made without a source file
        return f"{made.__module__}.{made.__qualname__}"
