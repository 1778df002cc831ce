"""The resolver: state units first, then packings, then ops from the largest composite down; everything freezes to plain
callables."""

from __future__ import annotations

import importlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, get_args

from evener.contracts.communicator import Communicator
from evener.contracts.device import DeviceCapabilities
from evener.contracts.ops import Bucket, Kernel, OpCall, OpFunction, OpSchema, Variant
from evener.contracts.quant import Packing, WeightPart, plain
from evener.contracts.state import GraphReach, StateProvider
from evener.errors import ResolveError, UnknownNameError
from evener.layers.declared import CallSite, LinearWeight, StateSlot
from evener.ops.composites import linear_static
from evener.plugins.delivered import judged
from evener.resolution.blame import Makers, blamed
from evener.resolution.buckets import bucket_index
from evener.resolution.footprint import Sizes, activations, scratch, stream
from evener.resolution.manifest import EXPANDED, REFERENCE, Choice, Manifest
from evener.resolution.tuning import Measured, Tuned, label

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class Offer:
    """A kernel or state provider and the package that it came from."""

    value: Any
    package: str
    version: str

    @property
    def label(self) -> str:
        """``package/name``, as the manifest shows it."""
        return f"{self.package}/{self.value.name}"

    @property
    def names(self) -> tuple[str, ...]:
        """What a user may call it."""
        return self.value.name, self.package, self.label


@dataclass(frozen=True, kw_only=True)
class Market:
    """Everything that resolution may choose from.

    Attributes:
        schemas: by op name, built-in and added.
        kernels, states: what the chosen packages offer.
        reference_state: serves groups that nobody else does.
        reference_packing: what the reference ``linear`` reads.
        device: capabilities of the device.
        buckets: token buckets, ascending.
        reference_ops, reference_attention: use the reference wherever ``forced`` does not say otherwise; the option
            that asked for it.
        forced: ``{op: provider}``; an op name or "attention"; a provider is a kernel, a package or "reference".
        max_fallback: "none" refuses primitives that only the reference serves.
        version: core's own, for the manifest.
        sizes: of the largest step.
        tuned: what was measured offline; the fastest that may serve goes before priorities.
    """

    schemas: Mapping[str, OpSchema]
    kernels: Sequence[Offer]
    states: Sequence[Offer]
    reference_state: StateProvider
    reference_packing: Packing
    device: DeviceCapabilities
    buckets: Sequence[Bucket]
    reference_ops: str = ""
    reference_attention: str = ""
    forced: Mapping[str, str] = field(default_factory=dict)
    max_fallback: str = "any"
    version: str = ""
    sizes: Sizes = field(default_factory=lambda: Sizes(1, 1))
    tuned: Tuned = field(default_factory=Tuned)


class Resolver:
    """Resolves one model. Call ``states``, then ``packings``, then ``sites``.

    Attributes:
        manifest: what was decided, and why; makers: who made what is called.
        workspace: bytes of the largest scratch that a chosen kernel holds; call sites run one after another.
        largest: which kernel that is, and at how many tokens.
        packings_by_layout: every packing on offer.
    """

    def __init__(self, market: Market) -> None:
        self.market = market
        self.manifest, self.makers, self.largest = Manifest(), Makers(market.states), ""
        self.workspace = self._held = self._peak = self._stream = 0
        self._sizes: Sizes | None = None
        self._by_op: dict[str, list[Offer]] = {}
        self._tables: dict[Any, OpFunction] = {}
        for offer in market.kernels:
            self._by_op.setdefault(offer.value.op, []).append(offer)
        for offers in self._by_op.values():
            offers.sort(key=lambda o: (-o.value.priority, o.value.name))
        # A package may have a packing of the reference's layout: the same content at a place of its own.
        self.packings_by_layout = {market.reference_packing.layout: market.reference_packing}
        self.packings_by_layout.update({p.layout: p for o in market.kernels for p in o.value.packings})
        self._check_forced()
        reaches = get_args(GraphReach)
        for offer in market.states:
            if offer.value.graph not in reaches:
                who = f"state provider {offer.label} {offer.version}"
                raise ResolveError(f"{who}: graph={offer.value.graph!r} is none of {', '.join(reaches)}")

    @property
    def activations(self) -> int:
        """Bytes of the model's stream, and of the tensors around and inside the largest call site."""
        return self._peak + self._stream

    def _check_forced(self) -> None:
        for op, wanted in self.market.forced.items():
            if op != "attention" and op not in self.market.schemas:
                raise UnknownNameError("op", op, [*self.market.schemas, "attention"], "Set ops.<op>=<provider>.")
            offers = self.market.states if op == "attention" else self.offers(op)
            known = {REFERENCE} | {n for o in offers for n in o.names}
            if wanted not in known:
                raise UnknownNameError(
                    f"provider of {op}", wanted, known, f"Set ops.{op}=reference to use the reference."
                )

    def offers(self, op: str) -> Sequence[Offer]:
        """Kernels for an op, best first."""
        return self._by_op.get(op, [])

    def _forbidden(self, op: str, offer: Offer) -> str | None:
        """The option that keeps a provider from an op; None if it may serve."""
        wanted = self.market.forced.get(op)
        if wanted is not None:
            return None if wanted in offer.names else f"ops.{op}={wanted}"
        return (self.market.reference_attention if op == "attention" else self.market.reference_ops) or None

    def _overruled(self, schema: OpSchema, static: Mapping[str, Any], offer: Offer) -> str | None:
        """The option about an op inside a composite that keeps others' kernels from the whole of it."""
        forced = self.market.forced
        if not forced or not schema.composite or schema.name in forced:
            return None
        inside = sorted(op for op in self._inside(schema, static) if forced.get(op) not in (None, offer.package))
        return f"ops.{inside[0]}={forced[inside[0]]} is about a part of it" if inside else None

    def _inside(self, schema: OpSchema, static: Mapping[str, Any]) -> set[str]:
        """Every op that a composite is made of."""
        found: set[str] = set()

        def use(op: str, /, **inner: Any) -> OpFunction:
            inner_schema = self.market.schemas.get(op)
            if inner_schema is not None:
                found.add(op)
                found.update(self._inside(inner_schema, inner) if inner_schema.composite else ())
            return lambda *_: None

        load_reference(schema)(static, use)
        return found

    def states(self, slots: Sequence[StateSlot]) -> None:
        """Give every slot its provider; equal spec and attention get the same."""
        known: dict[Any, StateProvider] = {}
        for slot in slots:
            key = (slot.spec, slot.attention)
            if key not in known:
                known[key] = self._state_provider(slot)
            slot.provider = known[key]

    def _state_provider(self, slot: StateSlot) -> StateProvider:
        refused: list[tuple[str, str]] = []
        wanted = self.market.forced.get("attention", REFERENCE)
        for offer in sorted(self.market.states, key=lambda o: (wanted not in o.names, -o.value.priority, o.value.name)):
            provider: StateProvider = offer.value
            # Who was named comes first. If it serves another kind of state, the word is not about this one.
            reason = self._forbidden("attention", offer) if wanted == REFERENCE else None
            if reason is None and slot.spec.kind not in provider.kinds:
                reason = f"does not serve state of kind {slot.spec.kind!r}"
            reason = reason or judged(provider, provider.supports(slot.spec, slot.attention, self.market.device))
            if reason is None:
                self._record(slot, offer.label, offer.version, refused)
                return provider
            if wanted in offer.names and slot.spec.kind in provider.kinds:
                raise ResolveError(f"{slot.name}: ops.attention={wanted} was asked for; {offer.label}: {reason}; or "
                                   "set infer.attn_type=auto for the best that fits")  # fmt: skip
            refused.append((offer.label, reason))
        reference = self.market.reference_state
        if slot.spec.kind not in reference.kinds:
            detail = "; ".join(f"{name}: {reason}" for name, reason in refused)
            raise ResolveError(
                f"{slot.name}: no installed package serves state of kind {slot.spec.kind!r}"
                + (f" ({detail})" if detail else "")
            )
        self._record(slot, REFERENCE, self.market.version, refused)
        return reference

    def _record(self, slot: StateSlot, provider: str, version: str, refused: Sequence[tuple[str, str]]) -> None:
        self.manifest.choices.append(Choice("attention", slot.name, None, provider, version, tuple(refused)))

    def packings(self, weights: Sequence[LinearWeight]) -> None:
        """Give every linear weight a layout that some kernel accepts in each bucket; the best kernel's first choice
        wins. Parts of a weight that nobody packs as stored become plain ones, to be dequantized; a note says so."""
        chosen: dict[Any, tuple[str, str]] = {}
        for weight in weights:
            key = (weight.op, tuple((p.rows, p.columns, p.format) for p in weight.parts), weight.dtype, weight.out)
            if key not in chosen:
                chosen[key] = self._layout(weight)
            layout, why = chosen[key]
            weight.layout = self.manifest.packings[weight.name] = layout
            if why:
                self.manifest.note_dequantized(weight.parts, weight.dtype, why, max(1, weight.experts))
                weight.parts = plain_parts(weight)

    def _layout(self, weight: LinearWeight) -> tuple[str, str]:
        """The layout and, if the parts must be dequantized for it, why nobody packs them as they are stored."""
        refused: list[str] = []
        offers = [o for o in self.offers(weight.op) if self._forbidden(weight.op, o) is None]
        layouts: list[str] = [p.layout for o in offers for p in o.value.packings]
        for parts in dict.fromkeys([weight.parts, plain_parts(weight)]):
            candidate = replace(weight, parts=parts)
            why = "; ".join(refused)
            for layout in dict.fromkeys([*layouts, self.market.reference_packing.layout]):
                packing = self.packings_by_layout[layout]
                reason = judged(packing, packing.supports(parts, weight.dtype))
                if reason is None and layout != self.market.reference_packing.layout:
                    reason = self._unserved(candidate, layout, offers)
                if reason is None:
                    return layout, why if parts != weight.parts else ""
                refused.append(f"{layout}: {reason}")
        raise ResolveError(f"no packing can hold {weight.name} for compute in {weight.dtype} ({'; '.join(refused)})")

    def _unserved(self, weight: LinearWeight, layout: str, offers: Sequence[Offer]) -> str | None:
        static = linear_static(weight)
        for bucket in self.market.buckets:
            call = OpCall(weight.op, static, bucket, self.market.device, {"weight": layout})
            if not any(self._refusal(o.value, call) is None for o in offers):
                return f"no kernel reads it at {bucket} tokens"
        return None

    def sites(self, sites: Sequence[CallSite]) -> None:
        """Fill every site's table.

        Raises:
            ResolveError: ``max_fallback`` is "none" and a primitive fell back to the reference.
        """
        for site in sites:
            site.table = tuple(self.resolve(site.op, site.path, site.static, bucket) for bucket in self.market.buckets)
        fallbacks = self.manifest.fallback_lines()
        if fallbacks and self.market.max_fallback == "none":
            raise ResolveError(
                f"max_fallback=none, but only the reference serves {', '.join(fallbacks)}; "
                "install a kernel package that serves them (or announce them in yours), or set --max-fallback any"
            )

    def resolve(
        self, op: str, path: str, static: Mapping[str, Any], bucket: Bucket, known: Mapping[str, int] | None = None
    ) -> OpFunction:
        """The callable of one op at one bucket: the best kernel that supports it, else its reference or expansion.
        ``known``: the ``sizes`` that ``Use`` was given."""
        if op.startswith("state."):
            return getattr(static["state"].provider, op.removeprefix("state."))  # type: ignore[no-any-return]
        schema = self.market.schemas.get(op)
        if schema is None:
            raise UnknownNameError("op", op, self.market.schemas, f"It is called at {path}.")
        largest = self.market.sizes
        sizes = self._sizes or Sizes(min(bucket.high, largest.tokens), min(bucket.high, largest.outputs))
        sizes = sizes.at(known)
        before = self._held, self._sizes
        self._held += activations(schema, static, sizes)
        self._sizes = sizes.inside(schema)
        self._peak = max(self._peak, self._held)
        if before[1] is None:
            self._stream = max(self._stream, stream(schema, static, sizes))
        try:
            return self._choose(schema, path, static, bucket, sizes)
        finally:
            self._held, self._sizes = before

    def _choose(
        self, schema: OpSchema, path: str, static: Mapping[str, Any], bucket: Bucket, sizes: Sizes
    ) -> OpFunction:
        call, refused = self.call(schema, static, bucket), []
        for offer, variant, why in self._ranking(schema, call):
            provider = offer.label if offer else own_provider(schema)
            reason = None if offer is None else self.refusal(schema, offer, replace(call, variant=variant))
            if reason is not None:
                refused.append((provider, reason))
                continue
            maker = offer.value if offer else schema
            version, fixed = offer.version if offer else self.market.version, maker.capturable and _capturable(static)
            self.manifest.choices.append(
                Choice(schema.name, path, bucket, provider, version, tuple(dict.fromkeys(refused)), fixed, why, variant)
            )
            break
        if offer is not None:
            return self.build(offer, replace(call, variant=variant))
        if not schema.composite:
            self._peak = max(self._peak, self._held + scratch(schema, static, sizes))
        return self.reference(schema, path, static, bucket)

    def _ranking(self, schema: OpSchema, call: OpCall) -> Iterator[tuple[Offer | None, Variant, str]]:
        """Who may serve, best first, in which variant, and on whose word; None is the reference, which may always."""
        market, op, offers = self.market, schema.name, self.offers(schema.name)
        file, measured = market.tuned.find(call) or ("", ())
        by_label: dict[str, Offer | None] = {offer.label: offer for offer in offers}
        if not (op in market.forced or market.reference_ops or market.max_fallback == "none"):
            by_label[own_provider(schema)] = None
        for index, each in enumerate(measured):
            if each.provider in by_label:
                yield by_label[each.provider], each.variant, _beaten(file, each, measured[index + 1 :])
        yield from ((offer, {}, "") for offer in offers)
        yield None, {}, ""

    def refusal(self, schema: OpSchema, offer: Offer, call: OpCall) -> str | None:
        """Why ``offer`` may not serve ``call``; None if it may."""
        reason = self._forbidden(schema.name, offer) or self._overruled(schema, call.static, offer)
        with blamed(offer):
            reason = reason or self._refusal(offer.value, call)
        if reason is None and call.variant and call.variant not in offer.value.variants(call):
            return f"has no variant {label('', call.variant)} any more"
        return reason

    def build(self, offer: Offer, call: OpCall) -> OpFunction:
        """What ``offer`` makes for ``call``."""
        with blamed(offer):
            if (nbytes := offer.value.workspace(call)) > self.workspace:
                self.workspace, self.largest = nbytes, f"{offer.label} at {call.bucket} tokens"
            built: OpFunction = offer.value.build(call)
        self.makers.note(offer, built)
        return built

    def reference(self, schema: OpSchema, path: str, static: Mapping[str, Any], bucket: Bucket) -> OpFunction:
        """The op's reference, made of whatever serves its parts."""

        def use(
            op: str, /, *, any_rows: bool = False, sizes: Mapping[str, int] | None = None, **inner: Any
        ) -> OpFunction:
            return self._any_rows(op, path, inner) if any_rows else self.resolve(op, path, inner, bucket, sizes)

        return load_reference(schema)(static, use)  # type: ignore[no-any-return]

    def _any_rows(self, op: str, path: str, static: Mapping[str, Any]) -> OpFunction:
        key = (op, path, tuple(sorted(static.items())))
        if key not in self._tables:
            table = [self.resolve(op, path, static, bucket) for bucket in self.market.buckets]
            self._tables[key] = by_rows(table, self.market.buckets[-1].high)
        return self._tables[key]

    def call(self, schema: OpSchema, static: Mapping[str, Any], bucket: Bucket) -> OpCall:
        """What a kernel judges."""
        layouts = {name: w.layout for name, w in walk(static) if isinstance(w, LinearWeight) and name in schema.weights}
        slots = (value for _, value in walk(static) if isinstance(value, StateSlot))
        slot = next(slots, None) if schema.state else None
        layout = slot.provider.layout if slot is not None and slot.provider is not None else None
        return OpCall(schema.name, static, bucket, self.market.device, layouts, layout)

    def _refusal(self, kernel: Kernel, call: OpCall) -> str | None:
        if not kernel.across_ranks and next(_communicators(call.static), None) is not None:
            return "is written for one rank; it may serve what is between the sums over ranks"
        if kernel.state_layout is not None and kernel.state_layout != call.state_layout:
            return f"is written for state layout {kernel.state_layout!r}, but {call.state_layout!r} was chosen"
        accepted = {p.layout for p in kernel.packings}
        for name, layout in call.layouts.items():
            if accepted and layout not in accepted:
                return f"does not read {name} in layout {layout!r}"
        usual = self.market.schemas[call.op].usual
        for name, value in walk(call.static):
            if name not in kernel.unusual and value != usual.get(name, value):
                return f"does not know {name}={value}"
        return judged(kernel, kernel.supports(call))


def by_rows(table: Sequence[OpFunction], largest: int) -> OpFunction:
    """One callable over a table of buckets up to ``largest`` rows, for any number of rows of the first input."""

    def run(x: torch.Tensor, *rest: Any) -> Any:
        import torch

        if x.shape[0] <= largest:
            return table[bucket_index(max(1, x.shape[0]))](x, *rest)
        return torch.cat([run(piece, *rest) for piece in x.split(largest)])

    return run


def own_provider(schema: OpSchema) -> str:
    """What the manifest calls the reference of an op."""
    return EXPANDED if schema.composite else REFERENCE


def _beaten(file: str, best: Measured, others: Sequence[Measured]) -> str:
    """The word of a tuning file: against the best of another provider, or of its own where it is alone."""
    second = next((m for m in others if m.provider != best.provider), others[0] if others else None)
    return f"chosen by tuning file {file}: {best.us:.1f} µs" + (f", beats {second}" if second else "")


def load_reference(schema: OpSchema) -> Any:
    """The function that ``schema.reference`` names."""
    module, _, name = schema.reference.partition(":")
    return getattr(importlib.import_module(module), name)


def plain_parts(weight: LinearWeight) -> tuple[WeightPart, ...]:
    """Its parts as they are once dequantized."""
    return tuple(p if p.format.plain else replace(p, format=plain(weight.dtype)) for p in weight.parts)


def walk(static: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """Static parameters, and those inside of them."""
    for name, value in static.items():
        if isinstance(value, Mapping):
            yield from walk(value)
        else:
            yield name, value


def _communicators(static: Mapping[str, Any]) -> Iterator[Communicator]:
    return (value for _, value in walk(static) if isinstance(value, Communicator))


def _capturable(static: Mapping[str, Any]) -> bool:
    """Whether what ranks do together at a call site may be part of a graph."""
    return all(communicator.capabilities.capturable for communicator in _communicators(static))
