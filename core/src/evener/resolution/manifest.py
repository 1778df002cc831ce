"""The run's manifest: for every call site and bucket the provider that was chosen, and why others were not. What is
shown of it is a ``ManifestReport``, see ``engine.facts``."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from evener.contracts.declared import LinearWeight
from evener.contracts.ops import Bucket, Variant
from evener.contracts.quant import QuantFormat, WeightPart, plain
from evener.resolution.buckets import merge_buckets

REFERENCE = "reference"
EXPANDED = "expanded"


@dataclass(frozen=True)
class Choice:
    """The provider of one call site at one bucket.

    Attributes:
        provider: "package/kernel", "reference" or "expanded".
        refused: (provider, reason) of those that come before it and may not serve.
        capturable: whether the call may be part of a captured graph.
        why: the reason of the choice, if it is not priority.
        variant: the kernel's variant that was measured to be fastest; empty without a tuning file.
    """

    op: str
    path: str
    bucket: Bucket | None
    provider: str
    version: str
    refused: tuple[tuple[str, str], ...] = ()
    capturable: bool = True
    why: str = ""
    variant: Variant = field(default_factory=dict, hash=False)


@dataclass
class Dequantized:
    """Quantized parts that no packing holds as they are stored: their number, their bytes in the file (``stored``) and
    in memory (``held``), and the reason."""

    reason: str
    parts: int = 0
    stored: int = 0
    held: int = 0


@dataclass
class Manifest:
    """Everything that resolution decided. ``packings``: the layout of each weight, by name. ``dequantized``: by storage
    format and compute dtype. ``rounded``: for each weight whose activations may be rounded, by name, its format and the
    buckets at which they are."""

    choices: list[Choice] = field(default_factory=list)
    packings: dict[str, str] = field(default_factory=dict)
    dequantized: dict[tuple[str, str], Dequantized] = field(default_factory=dict)
    rounded: dict[str, tuple[QuantFormat, list[Bucket]]] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)

    def note_rounding(self, weight: LinearWeight, bucket: Bucket, rounds: bool) -> None:
        """Note whether activations are rounded before products with ``weight``, whose format allows it."""
        self.rounded.setdefault(weight.name, (weight.parts[0].format, []))[1].extend([bucket] if rounds else [])

    def rounding_lines(self) -> list[str]:
        """One line for each format of weights with which activations may be rounded."""
        return sorted({
            f"weights {form.elements}, activations "
            + (f"{form.activation} at {' and '.join(map(str, merge_buckets(at)))} tokens" if at else "as they are")
            for form, at in self.rounded.values()
        })  # fmt: skip

    def note_dequantized(self, parts: Sequence[WeightPart], dtype: str, reason: str, matrices: int = 1) -> None:
        """Count the quantized parts of a weight, or of each matrix of a stack, as dequantized to ``dtype``."""
        for part in parts:
            if not part.format.plain:
                found = self.dequantized.setdefault((part.format.storage, dtype), Dequantized(reason))
                found.parts += matrices
                found.stored += matrices * part.format.nbytes(part.rows, part.columns)
                found.held += matrices * plain(dtype).nbytes(part.rows, part.columns)

    def dequantized_lines(self) -> list[str]:
        """One line for each format that is dequantized at load, with the memory that this costs."""
        return [
            f"{found.parts} {'tensors are' if found.parts > 1 else 'tensor is'} dequantized from {storage} to {dtype}, "
            f"{found.held - found.stored:,} bytes more ({found.reason})"
            for (storage, dtype), found in sorted(self.dequantized.items())
        ]

    def fallbacks(self) -> list[Choice]:
        """Primitives that fell back to the reference, because no kernel serves them."""
        return [c for c in self.choices if c.provider == REFERENCE]

    def fallback_lines(self) -> list[str]:
        """``op (at a..b tokens)`` for each op that fell back: the buckets from its first to its last."""
        spans: dict[str, list[Bucket]] = {}
        for choice in self.fallbacks():
            spans.setdefault(choice.op, []).extend([choice.bucket] if choice.bucket else [])
        return [
            f"{op} (at {min(b.low for b in buckets)}..{max(b.high for b in buckets)} tokens)" if buckets else op
            for op, buckets in sorted(spans.items())
        ]
