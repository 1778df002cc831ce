"""The run's manifest: for every call site and bucket, who computes it, and why better ones lost."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from evener.contracts.ops import Bucket

REFERENCE = "reference"
EXPANDED = "expanded"


@dataclass(frozen=True)
class Choice:
    """What one call site got at one bucket. ``provider`` is "package/kernel", "reference" or "expanded"."""

    op: str
    path: str
    bucket: Bucket | None
    provider: str
    version: str
    refused: tuple[tuple[str, str], ...] = ()
    capturable: bool = True

    @property
    def fallback(self) -> bool:
        """A primitive that nobody but the reference serves."""
        return self.provider == REFERENCE


@dataclass
class Manifest:
    """Everything that resolution decided."""

    choices: list[Choice] = field(default_factory=list)
    packings: dict[str, str] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)

    def fallbacks(self) -> list[Choice]:
        """The choices that fell back to the reference."""
        return [c for c in self.choices if c.fallback]

    def fallback_lines(self) -> list[str]:
        """``op (at a..b tokens)`` for each op that fell back: the buckets from its first to its last."""
        spans: dict[str, list[Bucket]] = {}
        for choice in self.fallbacks():
            spans.setdefault(choice.op, []).extend([choice.bucket] if choice.bucket else [])
        return [
            f"{op} (at {min(b.low for b in buckets)}..{max(b.high for b in buckets)} tokens)" if buckets else op
            for op, buckets in sorted(spans.items())
        ]

    def rows(self) -> Iterator[dict[str, Any]]:
        """One row for each op, provider and run of buckets: how many sites, and why others lost."""
        sites: Counter[tuple[Any, ...]] = Counter()
        buckets: dict[tuple[Any, ...], list[Bucket]] = {}
        for c in self.choices:
            key = (c.op, c.provider, c.version, c.refused)
            sites[key] += 1
            if c.bucket is not None and c.bucket not in buckets.setdefault(key, []):
                buckets[key].append(c.bucket)
        for key, count in sites.items():
            op, provider, version, refused = key
            span = buckets.get(key, [])
            yield {
                "op": op,
                "provider": provider,
                "version": version,
                "buckets": [str(b) for b in sorted(span)],
                "sites": count // max(1, len(span)),
                "refused": [{"provider": name, "reason": reason} for name, reason in refused],
            }

    def to_json(self) -> dict[str, Any]:
        """Plain data for ``/version`` and ``evener explain``."""
        layouts = Counter(self.packings.values())
        return {
            "ops": list(self.rows()),
            "packings": dict(layouts),
            "fallbacks": sorted({c.op for c in self.fallbacks()}),
            "notes": list(self.notes),
        }
