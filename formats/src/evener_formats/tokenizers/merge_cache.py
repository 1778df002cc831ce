"""Merges that follow from a large vocabulary, kept in the user's cache folder: computing them takes about a second.

A file is named after a hash of the vocabulary that its merges were made from, so it is never out of date, and ends in a
hash of its own bytes, so a damaged one is not used. There are at most ``MOST_FILES``, of a few MB each; the one that
was used least recently goes first. Torch-free.
"""

from __future__ import annotations

import hashlib
import logging
import os
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from evener.folders.cache import cache_folder, is_trusted, make_private

log = logging.getLogger("evener.tokenizers")

#: Vocabularies with fewer pieces are quickly converted again.
LEAST_PIECES = 1 << 16
MOST_FILES = 16
#: The most merges that are kept: a piece of n letters has at most n - 1.
_MOST_MERGES = 1 << 24
_DIGEST = hashlib.sha256().digest_size


@dataclass(frozen=True)
class MergeCache:
    """The place of one vocabulary's merges; ``count`` is the number of its pieces."""

    path: Path
    count: int

    @classmethod
    def of(cls, texts: Sequence[str], scores: Sequence[float], types: Sequence[int]) -> MergeCache | None:
        """The place for a vocabulary; None for one of fewer than ``LEAST_PIECES`` pieces."""
        if len(texts) < LEAST_PIECES:
            return None
        digest = hashlib.sha256(b"merges 3")
        # With their lengths: a piece may hold any character.
        digest.update(np.fromiter(map(len, texts), dtype="<i8", count=len(texts)).tobytes())
        digest.update("".join(texts).encode("utf-8", "surrogatepass"))
        digest.update(np.asarray(scores, dtype="<f8").tobytes() + np.asarray(types, dtype="<i8").tobytes())
        return cls(cache_folder("tokenizers") / f"{digest.hexdigest()[:40]}.merges", len(texts))

    def read(self) -> np.ndarray | None:
        """The merges, int32 [merges, 2]; None if they are not there, or not as they were written."""
        try:
            if not is_trusted(self.path) or self.path.stat().st_size > 8 * _MOST_MERGES + _DIGEST:
                return None
            data = self.path.read_bytes()
            os.utime(self.path)  # used now
        except OSError:
            return None
        body = data[:-_DIGEST]
        if len(body) % 8 or hashlib.sha256(body).digest() != data[-_DIGEST:]:
            log.info("%s is damaged and is made again", self.path)
            return None
        pairs = np.frombuffer(body, dtype="<i4").reshape(-1, 2)
        return pairs if not pairs.size or 0 <= pairs.min() <= pairs.max() < self.count else None

    def write(self, pairs: np.ndarray) -> None:
        """Keep merges. Where that is impossible the log says why, and the next start computes them again."""
        if len(pairs) > _MOST_MERGES:
            log.info("the %d merges of a vocabulary are not kept: more than %d", len(pairs), _MOST_MERGES)
            return
        body, folder = np.ascontiguousarray(pairs, dtype="<i4").tobytes(), self.path.parent
        try:
            make_private(folder)
            with tempfile.NamedTemporaryFile(dir=folder, suffix=".partial", delete=False) as file:
                try:
                    file.write(body + hashlib.sha256(body).digest())
                    file.flush()
                except OSError:  # a full disk: without this, every start would leave another part of a file
                    os.unlink(file.name)
                    raise
            os.replace(file.name, self.path)
            kept = sorted(folder.glob("*.merges"), key=lambda each: each.stat().st_mtime, reverse=True)
            for old in kept[MOST_FILES:]:
                old.unlink(missing_ok=True)
        except OSError as error:
            log.info("the merges of a vocabulary are not kept in %s: %s", folder, error)
