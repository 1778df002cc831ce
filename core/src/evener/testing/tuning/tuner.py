"""The tuner: for every op that a model calls, parts before what is made of them, all that could serve it is compared
with the reference and timed."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import torch

from evener.contracts.ops import OpFunction, Variant
from evener.engine.assembly import Assembly
from evener.layers.declared import LinearWeight, StateSlot
from evener.resolution.resolver import Resolver, own_provider, walk
from evener.resolution.tuning import Entry, Measured, Tuned, label, signature
from evener.testing.tuning.record import Recorded
from evener.testing.tuning.timing import Clock, Copies

#: How far a result may be from the reference in the same type, as a share of its length. The conformance kit judges
#: rounding; this finds what is wrong.
_CLOSE = {"float32": 1e-3, "float16": 2e-2, "bfloat16": 5e-2}
#: Calls that are compared.
_COMPARED = 8
#: What serves anyway stays unless another takes less than this share of its time: so far medians differ by chance.
_CLEARLY = 0.98


@dataclass(frozen=True)
class Outcome:
    """What came of one call: what was measured, fastest first, who is fastest but for tuning, and who was dropped and
    why. None may be left."""

    entry: Entry
    anyway: Measured | None
    dropped: Sequence[tuple[str, str]]

    def lines(self) -> Iterator[str]:
        """For a person: one on the choice, and one for each candidate that was dropped."""
        best = self.entry.measured[0] if self.anyway else "nobody is right"
        gain = "" if best == self.anyway or not self.anyway else f" instead of {self.anyway}"
        yield f"{self.entry.op} at {self.entry.tokens} tokens: {best}{gain}"
        yield from (f"  dropped: {name} {reason}" for name, reason in self.dropped)


@dataclass(frozen=True)
class _Candidate:
    provider: str
    variant: Variant
    run: OpFunction
    capturable: bool

    def __str__(self) -> str:
        return label(self.provider, self.variant)


class Tuner:
    """Tunes what was recorded of one model.

    Args:
        a: the model, resolved without tuning files; its weights are loaded.
    """

    def __init__(self, a: Assembly) -> None:
        self._a, market = a, a.resolver.market
        self._device, self._plain = a.device, market.reference_packing.layout
        self._tuned = Tuned()
        self._resolver = Resolver(replace(market, tuned=self._tuned, max_fallback="any"))
        self._reference = Resolver(replace(market, kernels=(), forced={}))

    def tune(self, recorded: Recorded) -> Outcome | None:
        """Time one op; None where there is nothing to choose from, or where running it twice changes its state."""
        r, dropped = recorded, list[tuple[str, str]]()
        if any(isinstance(v, StateSlot) and v.spec.per == "request" for _, v in walk(r.call.static)):
            return None
        candidates = list(self._candidates(r))
        offer = self._a.loaded.graph_capture(self._device) if self._device.capabilities.graphs else None
        if offer is not None:  # one that cannot be captured would make every step run eagerly
            dropped = [(str(c), "cannot be captured") for c in candidates if not c.capturable]
            candidates = [c for c in candidates if c.capturable]
        if len(candidates) < 2:
            return None
        entry = Entry(r.schema.name, str(r.call.bucket), signature(r.call), [])
        copies, close = Copies(r), _CLOSE.get(r.call.static.get("dtype", "float32"), 1e-3)
        clock = Clock(self._device, None if offer is None else offer.value)
        with torch.inference_mode():
            want, right, runs = self._results(self._right(r, candidates[0]), copies), [], []
            for candidate in candidates:
                try:
                    reason = _differences(want, self._results(candidate.run, copies), close, r.schema.composite)
                    runs += [] if reason else [clock.prepared(candidate.run, copies)]
                    self._device.synchronize()
                except Exception as error:  # offline, and reported: a variant may ask for more than the device has
                    reason = f"raised {type(error).__name__}: {' '.join(str(error).split())[:200]}"
                right += [] if reason else [candidate]
                dropped += [(str(candidate), reason)] if reason else []
            if not right:
                return Outcome(entry, None, dropped)
            seconds = clock.times(runs, copies)
        found = [Measured(c.provider, round(s * 1e6, 3), dict(c.variant)) for c, s in zip(right, seconds, strict=True)]
        entry.measured.extend(sorted(found, key=lambda m: m.us))
        if entry.measured[0].us > _CLEARLY * found[0].us:
            entry.measured.remove(found[0])
            entry.measured.insert(0, found[0])
        self._tuned.add("", [entry])
        return Outcome(entry, found[0], dropped)

    def _candidates(self, r: Recorded) -> Iterator[_Candidate]:
        """Everybody who may serve, by priority, in every variant; what the reference is made of was tuned before."""
        resolver, call = self._resolver, r.call
        for offer in resolver.offers(r.schema.name):
            if resolver.refusal(r.schema, offer, call) is None:
                for variant in ({}, *offer.value.variants(call)):
                    run = resolver.build(offer, replace(call, variant=variant))
                    yield _Candidate(offer.label, variant, run, offer.value.capturable)
        if r.schema.composite or self._readable(r):
            known = len(resolver.manifest.choices)
            run = resolver.reference(r.schema, r.path, call.static, call.bucket)
            fixed = r.schema.capturable and all(c.capturable for c in resolver.manifest.choices[known:])
            yield _Candidate(own_provider(r.schema), {}, run, fixed)

    def _readable(self, r: Recorded) -> bool:
        """Whether the reference reads the weights as they are packed."""
        return all(w.layout == self._plain for _, w in walk(r.call.static) if isinstance(w, LinearWeight))

    def _right(self, r: Recorded, anyway: _Candidate) -> OpFunction:
        """What others are compared with: the reference all the way down, or where weights are packed for somebody else
        what serves without tuning."""
        if not self._readable(r):
            return anyway.run
        return self._reference.reference(r.schema, r.path, r.call.static, r.call.bucket)

    def _results(self, run: OpFunction, copies: Copies) -> list[list[torch.Tensor]]:
        copies.restore()
        made = (run(*inputs) for inputs in copies.inputs[:_COMPARED])
        return [[t.clone() for t in (m if isinstance(m, tuple) else (m,)) if t is not None] for m in made]


def _differences(
    want: Sequence[Sequence[torch.Tensor]], got: Sequence[Sequence[torch.Tensor]], close: float, composite: bool
) -> str | None:
    """What is wrong with the results of some calls; None if they are those of the reference. Integers must be equal."""
    rows, off = 0, list[float]()
    for w, g in ((w, g) for ws, gs in zip(want, got, strict=True) for w, g in zip(ws, gs, strict=True)):
        if w.shape != g.shape or w.dtype != g.dtype:
            return f"gives {g.dtype} {list(g.shape)} where the reference gives {w.dtype} {list(w.shape)}"
        if not w.is_floating_point() and not torch.equal(w, g):
            return "differs from the reference"
        far = _distances(w, g)
        rows, off = rows + len(far), off + far[~(far <= close)].tolist()
    # Rounding may change which experts a row gets: in few of them.
    allowed = min(rows // 4, max(1, rows // 16)) if composite else 0
    return f"is off by {max(off):.2g} of the reference in {len(off)} of {rows} rows" if len(off) > allowed else None


def _distances(want: torch.Tensor, got: torch.Tensor) -> torch.Tensor:
    """How far each row is off, as a share of its length."""
    rows = want.shape[0] if want.dim() else 1
    w, g = (t.double().reshape(rows, -1) for t in (want, got))
    lengths: torch.Tensor = torch.linalg.vector_norm(w, dim=1)
    far: torch.Tensor = torch.linalg.vector_norm(w - g, dim=1)
    return far / lengths.clamp(min=1e-9 + 1e-3 * float(lengths.mean()))
