"""A watermark: sampled texts that a holder of the key can recognize later, and that read like any other.

Kuditipudi et al., "Robust Distortion-free Watermarks for Language Models" (2023), with the choice by Gumbel noise: the
noise with which the engine samples depends on a seed, the position and the token (``evener.ops.reference.sampling``),
and here every request gets one of ``SEEDS`` seeds that are made of the key. Each token keeps its probability. Whoever
has the key makes the same noise and sees that a text's tokens have higher noise than chance would give them.

It marks sampled tokens: not answers at temperature 0, and hardly those whose every token is nearly certain.
"""

from __future__ import annotations

import hashlib
import math
import secrets
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from evener.errors import ConfigError
from evener.frontend.frontend import sample_seed

#: The same prompt has at most so many different answers. With more, finding a mark takes longer.
SEEDS = 256
#: Tokens of a text that are looked at: more make no difference.
MOST_TOKENS = 512
_SHORTEST_KEY, _LONGEST_KEY = 8, 4096


class Watermark:
    """The seeds of one key; ``key`` is secret."""

    def __init__(self, key: bytes) -> None:
        secret = hashlib.sha256(key).digest()
        digests = (hashlib.blake2b(str(i).encode(), key=secret, digest_size=4).digest() for i in range(SEEDS))
        self.seeds = [int.from_bytes(digest, "little") >> 1 for digest in digests]

    def seed(self, asked: int | None) -> int:
        """The seed of a request; ``asked``: its own, which chooses among the seeds."""
        if asked is None:
            return secrets.choice(self.seeds)
        digest = hashlib.blake2b(str(asked).encode(), digest_size=8).digest()
        return self.seeds[int.from_bytes(digest, "little") % SEEDS]

    def chance(self, ids: Sequence[int], longest_prompt: int = 4096, samples: int = 1) -> float:
        """The decimal logarithm of an upper bound for the probability that a text without the mark fits the key as
        well: -6 means one in a million texts at most. Takes seconds.

        Args:
            ids: the token ids of the text, from the model's tokenizer; at least a few dozen.
            longest_prompt: tokens that may have stood before the text.
            samples: the largest ``n`` of a request whose answer this may be.
        """
        tokens = _hash32(np.array(ids[:MOST_TOKENS], dtype=np.uint32))
        count, places = len(tokens), longest_prompt + 1
        if count == 0:
            return 0.0
        positions = np.arange(places + count - 1, dtype=np.uint32) * np.uint32(_GOLDEN)
        best = 0.0
        for seed in (sample_seed(seed, index) for seed in self.seeds for index in range(samples)):
            at = _hash32(_hash32(np.array([seed], dtype=np.uint32)) + positions)
            total = np.zeros(places)
            for place, token in enumerate(tokens):
                uniform = ((_hash32(at[place : place + places] ^ token) >> np.uint32(8)) + 0.5) / (1 << 24)
                total -= np.log1p(-uniform)
            best = max(best, float(total.max()))
        if best <= count:
            return 0.0
        # Each term has mean 1 and an exponential distribution by chance: Chernoff's bound of their sum, for the best of
        # all places and seeds.
        bound = count - best + count * math.log(best / count)
        return min(0.0, (bound + math.log(places * SEEDS * samples)) / math.log(10))


def read_key(path: str) -> Watermark:
    """The watermark of the key in a file: its content without white space at both ends.

    Raises:
        ConfigError: the file cannot be read, or its key is too short or too long.
    """
    try:
        with Path(path).expanduser().open("rb") as file:
            key = file.read(_LONGEST_KEY + 1).strip()
    except OSError as error:
        raise ConfigError(f"server.watermark_key_file={path} cannot be read: {error}; give a text file") from error
    if not _SHORTEST_KEY <= len(key) <= _LONGEST_KEY:
        size = f"{len(key)} bytes; it needs {_SHORTEST_KEY} to {_LONGEST_KEY}"
        raise ConfigError(f"server.watermark_key_file={path} has a key of {size}")
    return Watermark(key)


_GOLDEN = 0x9E3779B9


def _hash32(x: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """lowbias32, as the engine's noise has it."""
    x = (x ^ (x >> np.uint32(16))) * np.uint32(0x7FEB352D)
    x = (x ^ (x >> np.uint32(15))) * np.uint32(0x846CA68B)
    hashed: np.ndarray[Any, Any] = x ^ (x >> np.uint32(16))
    return hashed
