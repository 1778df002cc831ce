"""The manifest as it is shown: call sites and buckets with the same choice are one row."""

from __future__ import annotations

from collections import Counter

import msgspec

from evener.contracts.ops import Bucket
from evener.resolution.buckets import merge_buckets
from evener.resolution.manifest import Manifest
from evener.tuning_files.measurements import label


class Refusal(msgspec.Struct, frozen=True):
    """A provider that ranks above the chosen one, and why it was refused."""

    provider: str
    reason: str


class OpChoice(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One provider that was chosen for an op.

    Attributes:
        provider: as in ``Choice``, with the variant that it runs in.
        buckets: the buckets that it serves, such as "3..4"; ``tokens``: the same in as few ranges as possible.
        sites: how many call sites it serves.
        why: the reason of the choice, if it is not priority.
    """

    op: str
    provider: str
    version: str
    buckets: list[str]
    tokens: list[str]
    sites: int
    refused: list[Refusal]
    why: str = ""


class ManifestReport(msgspec.Struct, frozen=True, kw_only=True):
    """Who computes each op, and why.

    Attributes:
        ops: one row for each op and provider.
        packings: layouts, each with the number of weights in it.
        dequantized: one line for each format that is dequantized at load, with the bytes that this costs.
        activations: one line for each format of weights with which activations may be rounded.
        fallbacks: primitives that no kernel serves.
        notes: what else was decided, such as why steps are not captured.
    """

    ops: list[OpChoice] = []
    packings: dict[str, int] = {}
    dequantized: list[str] = []
    activations: list[str] = []
    fallbacks: list[str] = []
    notes: list[str] = []

    @classmethod
    def of(cls, manifest: Manifest) -> ManifestReport:
        """What a run has decided so far."""
        return cls(
            ops=_rows(manifest), packings=dict(Counter(manifest.packings.values())),
            dequantized=manifest.dequantized_lines(), activations=manifest.rounding_lines(),
            fallbacks=sorted({c.op for c in manifest.fallbacks()}), notes=list(manifest.notes),
        )  # fmt: skip


def _rows(manifest: Manifest) -> list[OpChoice]:
    alike: dict[tuple[str, str, str, tuple[tuple[str, str], ...], str], list[Bucket | None]] = {}
    for c in manifest.choices:
        alike.setdefault((c.op, label(c.provider, c.variant), c.version, c.refused, c.why), []).append(c.bucket)
    rows = []
    for (op, provider, version, refused, why), served in alike.items():
        span = sorted({bucket for bucket in served if bucket is not None})
        rows.append(OpChoice(
            op=op, provider=provider, version=version, buckets=[str(b) for b in span],
            tokens=[str(b) for b in merge_buckets(span)], sites=len(served) // max(1, len(span)),
            refused=[Refusal(*each) for each in refused], why=why,
        ))  # fmt: skip
    return rows
