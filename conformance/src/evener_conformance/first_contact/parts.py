"""The parts of first contact, in the order in which one depends on another. Torch-free."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from evener_conformance.kit.outcome import AREAS, REQUIRED


@dataclass(frozen=True)
class PlannedPart:
    """One part.

    Attributes:
        name: as in the evidence file and for ``--part``.
        summary: what it does, in a few words.
        needs: parts without which it cannot say anything: if one of these found nothing right, it is not run.
        area: the area of the conformance kit that it runs; "" for other parts.
    """

    name: str
    summary: str
    needs: tuple[str, ...]
    area: str = ""


_SUMMARIES = {
    "device": "memory, streams, events, random numbers",
    "primitives": "each op against its reference",
    "attention": "writing and reading state",
    "composites": "fused kernels against their parts",
    "formats": "quantized weights",
    "graphs": "capture and replay",
    "collectives": "several ranks",
    "memory": "the memory plan against measurements",
    "model": "a tiny model against a second implementation",
}

PARTS: Sequence[PlannedPart] = (
    PlannedPart("packages", "finding the backend, its probe", ()),
    *(PlannedPart(each, _SUMMARIES[each], ("packages",) if each == "device" else ("device",), each) for each in AREAS),
    PlannedPart("engine", "the tiny model in processes of its own", ("model",)),
    PlannedPart("timing", "main ops, a decode step, reading memory", ("device",)),
)

#: Parts that must pass before a run shows a level of evidence.
NEEDED_FOR_A_LEVEL = ("packages", *REQUIRED, "engine")
