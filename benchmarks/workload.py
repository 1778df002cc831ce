"""The work for every engine: the same token ids, greedy, end tokens ignored."""

from __future__ import annotations

import json
import random
from dataclasses import dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class Job:
    """Prompts as token ids, and how many new tokens each wants."""

    name: str
    prompts: list[list[int]]
    counts: list[int]

    @property
    def useful(self) -> int:
        """Number of requested tokens."""
        return sum(self.counts)

    def to_json(self) -> dict[str, Any]:
        """As data for another process; ``Job(**value)`` makes the job again."""
        return {"name": self.name, "prompts": self.prompts, "counts": self.counts}


def _ids(rng: random.Random, length: int, vocab: int) -> list[int]:
    return [rng.randrange(100, vocab) for _ in range(length)]


def mixed(path: Path, vocab: int, seed: int) -> Job:
    """The requests of a workload file."""
    rng = random.Random(seed)
    pairs = json.loads(path.read_text())["requests"]
    return Job("mixed", [_ids(rng, length, vocab) for length, _ in pairs], [count for _, count in pairs])


def fixed(batch: int, prompt: int, new: int, vocab: int, seed: int) -> Job:
    """``batch`` requests of equal lengths."""
    rng = random.Random(seed)
    return Job(f"{batch}x{prompt}+{new}", [_ids(rng, prompt, vocab) for _ in range(batch)], [new] * batch)
