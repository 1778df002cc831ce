"""Why mutants survive, as a person has judged: ``reviewed.yaml``."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from omegaconf import OmegaConf

from mutation.mutant import Mutant

REVIEWED = Path(__file__).parent / "reviewed.yaml"


@dataclass(frozen=True)
class Review:
    """A judgement on one mutant.

    Attributes:
        file: the end of its path.
        was, now, nth: as in ``Mutant``.
        equivalent: no input can tell the mutant from the original; otherwise the kit has a gap, and ``why`` says which.
        why: the reason.
    """

    file: str
    was: str
    now: str
    nth: int
    equivalent: bool
    why: str

    def covers(self, mutant: Mutant) -> bool:
        """Whether this is about that mutant, wherever its line is now."""
        same = (self.was, self.now, self.nth) == (mutant.was, mutant.now, mutant.nth)
        return same and f"/{mutant.file}".endswith(f"/{self.file}")


def read_reviews(path: Path = REVIEWED) -> list[Review]:
    """The reviews of a file.

    Raises:
        ValueError: an entry lacks a key or has one too many.
    """
    made = []
    for number, entry in enumerate(cast("list[dict[str, Any]]", OmegaConf.to_container(OmegaConf.load(path))), 1):
        verdicts = entry.keys() & {"equivalent", "survives"}
        if entry.keys() - verdicts - {"nth"} != {"file", "was", "now"} or len(verdicts) != 1:
            raise ValueError(
                f"{path.name}: entry {number} has {sorted(entry)}; it needs file, was, now, and either equivalent or "
                "survives with the reason; it may have nth"
            )
        (verdict,) = verdicts
        made.append(Review(entry["file"], entry["was"], entry["now"], entry.get("nth", 0), verdict == "equivalent",
                           entry[verdict]))  # fmt: skip
    return made


def review_of(mutant: Mutant, reviews: Sequence[Review]) -> Review | None:
    """The review of a mutant, if there is one."""
    return next((each for each in reviews if each.covers(mutant)), None)
