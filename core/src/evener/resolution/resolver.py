"""The resolver: state first, then packings, then ops from the largest composite down; every call site gets plain
callables, and nothing is chosen after that."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from evener.contracts.declared import CallSite, LinearWeight, StateSlot
from evener.contracts.interfaces import required_interface
from evener.contracts.ops import Bucket, OpCall, OpFunction, OpSchema, Use, Variant
from evener.contracts.quant import WeightPart, plain
from evener.contracts.quantized.state import unscaled
from evener.contracts.state import StateProvider
from evener.errors import ResolveError, UnknownNameError
from evener.ops.composites import linear_static
from evener.ops.parts import communicators, load_reference
from evener.plugins.catalog import Provided
from evener.plugins.hook_check import check_supports
from evener.resolution.attribution import Attribution, attributed_errors
from evener.resolution.buckets import bucket_index
from evener.resolution.candidates import Candidates, kernel_refusal, op_call, reference_provider, refusal
from evener.resolution.footprint import StepFootprint
from evener.resolution.manifest import REFERENCE, Choice, Manifest
from evener.tuning_files.measurements import Measurement

if TYPE_CHECKING:
    import torch


class Resolver:
    """Resolves one model. Call ``states``, then ``packings``, then ``sites``.

    Attributes:
        available: what there is to choose from.
        manifest: what was decided, and why.
        attribution: which package made each callable.
        tables: callables for any number of rows (``Use`` with ``any_rows``), by op, path and static parameters.
        footprint: memory of a step, measured while ops are resolved.
        packings_by_layout: every available packing.

    Raises:
        UnknownNameError, ResolveError: options name what is not here; see ``Candidates.check``.
    """

    def __init__(self, available: Candidates) -> None:
        available.check()
        self.available, self.packings_by_layout = available, available.packings_by_layout
        self.manifest, self.attribution = Manifest(), Attribution(available.states)
        self.footprint = StepFootprint(available.sizes)
        self.tables: dict[Any, OpFunction] = {}

    def states(self, slots: Sequence[StateSlot]) -> None:
        """Give every slot its provider; equal spec and attention get the same.

        Raises:
            ResolveError: no provider serves a slot, or the one that was asked for cannot.
        """
        known: dict[Any, StateProvider] = {}
        for slot in slots:
            key = (slot.spec, slot.attention)
            if key not in known:
                known[key], choice = _choose_state(self.available, slot)
                self.manifest.choices.append(choice)
            slot.provider = known[key]

    def packings(self, weights: Sequence[LinearWeight]) -> None:
        """Give every linear weight a layout that some kernel accepts in each bucket: the best kernel's first choice.
        Parts of a weight that no packing holds as they are stored become plain ones, to be dequantized.

        Raises:
            ResolveError: no packing can hold a weight.
        """
        chosen: dict[Any, tuple[str, str]] = {}
        for weight in weights:
            key = (weight.op, tuple((p.rows, p.columns, p.format) for p in weight.parts), weight.dtype, weight.out)
            weight.layout, why = chosen[key] = chosen.get(key) or _layout(self.available, weight)
            self.manifest.packings[weight.name] = weight.layout
            if why:
                # No note for an embedding, which is not multiplied: most devices gain nothing from a quantized one.
                noted = () if weight.op == "embedding" else weight.parts
                self.manifest.note_dequantized(noted, weight.dtype, why, weight.experts or 1)
                weight.parts = plain_parts(weight)

    def sites(self, sites: Sequence[CallSite]) -> None:
        """Fill every site's table.

        Raises:
            ResolveError: ``max_fallback`` is "none" and a primitive fell back to the reference.
        """
        for site in sites:
            site.table = tuple(self.resolve(site.op, site.path, site.static, b) for b in self.available.buckets)
        fallbacks = self.manifest.fallback_lines()
        if fallbacks and self.available.max_fallback == "none":
            raise ResolveError(f"max_fallback=none, but only the reference serves {', '.join(fallbacks)}; install a "
                               "kernel package that serves them (or announce them in yours), or set --max-fallback "
                               "any")  # fmt: skip

    def resolve(
        self, op: str, path: str, static: Mapping[str, Any], bucket: Bucket, known: Mapping[str, int] | None = None
    ) -> OpFunction:
        """The callable of one op at one bucket: the best kernel that supports it, else its reference or expansion.

        Args:
            path: the call site's, for the manifest and errors.
            known: the ``sizes`` that ``Use`` was given.

        Raises:
            UnknownNameError: no installed package has such an op.
        """
        if op == "linear" and static["weight"].adapters is not None:
            return static["weight"].adapters.linear(static, self._use(path, bucket))  # type: ignore[no-any-return]
        if op.startswith("state."):
            return getattr(static["state"].provider, op.removeprefix("state."))  # type: ignore[no-any-return]
        schema = self.available.schemas.get(op)
        if schema is None:
            where = f"It is called at {path}; install the package that defines it."
            raise UnknownNameError("op", op, self.available.schemas, where)
        with self.footprint.inside(schema, static, bucket, known):
            if op == "routed_experts" and static["placement"] is not None:
                return static["placement"].resolve(op, path, static, bucket)  # type: ignore[no-any-return]
            call = op_call(self.available, schema, static, bucket)
            candidate, variant = self._choose(schema, path, call)
            if candidate is not None:
                return self.build(candidate, replace(call, variant=variant) if variant else call)
            if not schema.composite:
                self.footprint.add_reference_scratch(schema, static)
            return self.reference(schema, path, static, bucket)

    def _choose(self, schema: OpSchema, path: str, call: OpCall) -> tuple[Provided[Any] | None, Variant]:
        """The best candidate that may serve, and its variant; None is the reference, which always may. Notes the choice
        in the manifest."""
        refused: dict[tuple[str, str], None] = {}
        for candidate, variant, why in self._ranking(schema, call):
            provider = candidate.label if candidate else reference_provider(schema)
            asked = replace(call, variant=variant) if variant else call
            reason = refusal(self.available, candidate, asked) if candidate else None
            if reason is not None:
                refused[provider, reason] = None
                continue
            version, impl = (candidate.version, candidate.value) if candidate else (self.available.version, schema)
            capturable = impl.capturable and all(each.capabilities.capturable for each in communicators(call.static))
            self.manifest.choices.append(
                Choice(schema.name, path, call.bucket, provider, version, tuple(refused), capturable, why, variant)
            )
            break
        return candidate, variant

    def _ranking(self, schema: OpSchema, call: OpCall) -> Iterator[tuple[Provided[Any] | None, Variant, str]]:
        """Candidates, best first, each with its variant and why it stands there: tuning files, then priorities, then
        the reference (None)."""
        available, op, candidates = self.available, schema.name, self.available.of_op(schema.name)
        file, measured = available.tuned.find(call) or ("", ())
        by_label: dict[str, Provided[Any] | None] = {candidate.label: candidate for candidate in candidates}
        if not (op in available.forced or available.reference_ops or available.max_fallback == "none"):
            by_label[reference_provider(schema)] = None
        # A kernel before all measured ones is newer than the file, which says nothing of it.
        first = next((i for i, c in enumerate(candidates) if any(c.label == m.provider for m in measured)), 0)
        yield from ((candidate, {}, "") for candidate in candidates[:first])
        for index, each in enumerate(measured):
            if each.provider in by_label:
                yield by_label[each.provider], each.variant, _tuning_reason(file, each, measured[index + 1 :])
        yield from ((candidate, {}, "") for candidate in (*candidates, None))

    def build(self, candidate: Provided[Any], call: OpCall) -> OpFunction:
        """The callable that ``candidate`` makes for ``call``.

        Raises:
            PluginError: the kernel raised something.
        """
        with attributed_errors(candidate):
            self.footprint.add_workspace(candidate.value.workspace(call), f"{candidate.label} at {call.bucket} tokens")
            built: OpFunction = candidate.value.build(call)
            for name, weight in call.static.items():
                if isinstance(weight, LinearWeight) and any(part.format.activation for part in weight.parts):
                    self.manifest.note_rounding(weight, call.bucket, candidate.value.rounds(call, name))
        self.attribution.register(candidate, built)
        return built

    def reference(self, schema: OpSchema, path: str, static: Mapping[str, Any], bucket: Bucket) -> OpFunction:
        """The op's reference, made of whatever serves its parts."""
        return load_reference(schema)(static, self._use(path, bucket))  # type: ignore[no-any-return]

    def _use(self, path: str, bucket: Bucket) -> Use:
        def use(
            op: str, /, *, any_rows: bool = False, sizes: Mapping[str, int] | None = None, **inner: Any
        ) -> OpFunction:
            return self._any_rows(op, path, inner) if any_rows else self.resolve(op, path, inner, bucket, sizes)

        return use

    def _any_rows(self, op: str, path: str, static: Mapping[str, Any]) -> OpFunction:
        key = (op, path, tuple(sorted(static.items())))
        if key not in self.tables:
            table = [self.resolve(op, path, static, bucket) for bucket in self.available.buckets]
            self.tables[key] = dispatch_by_rows(table, self.available.buckets[-1].high)
        return self.tables[key]


def dispatch_by_rows(table: Sequence[OpFunction], largest: int) -> OpFunction:
    """One callable over a table of buckets up to ``largest`` rows, for any number of rows of the first input."""

    def run(x: torch.Tensor, *rest: Any) -> Any:
        import torch

        if x.shape[0] <= largest:
            return table[bucket_index(max(1, x.shape[0]))](x, *rest)
        return torch.cat([run(piece, *rest) for piece in x.split(largest)])

    return run


def _tuning_reason(file: str, best: Measurement, others: Sequence[Measurement]) -> str:
    """For the manifest: how the fastest compares with the best of another provider, or of its own if it is alone."""
    second = next((m for m in others if m.provider != best.provider), others[0] if others else None)
    return f"chosen by tuning file {file}: {best.us:.1f} µs" + (f", beats {second}" if second else "")


def _choose_state(available: Candidates, slot: StateSlot) -> tuple[StateProvider, Choice]:
    """The provider of a group of layers whose state has the same form, and why."""
    refused: list[tuple[str, str]] = []
    asked: list[str] = []
    wanted = available.forced.get("attention", REFERENCE)
    # A provider that was asked for comes first. If it does not serve this kind of state, the option is not about that.
    for candidate in sorted(available.states, key=lambda c: (wanted not in c.names, -c.value.priority, c.value.name)):
        if asked and wanted not in candidate.names:
            break
        provider: StateProvider = candidate.value
        reason = available.excluded_by("attention", candidate) if wanted == REFERENCE else None
        if reason is None and slot.spec.kind not in provider.kinds:
            reason = f"does not serve state of kind {slot.spec.kind!r}"
        reason = reason or unscaled(provider, slot.spec)
        reason = reason or check_supports(provider, provider.supports(slot.spec, slot.attention, available.device))
        if reason is None and not isinstance(provider, needed := required_interface(slot.spec, slot.attention)):
            reason = f"is no {needed.__name__}"
        if reason is None:
            return provider, Choice("attention", slot.name, None, candidate.label, candidate.version, tuple(refused))
        if wanted in candidate.names and slot.spec.kind in provider.kinds:
            asked.append(f"{candidate.label}: {reason}")
        refused.append((candidate.label, reason))
    if asked:
        raise ResolveError(f"{slot.name}: ops.attention={wanted} was asked for; {'; '.join(asked)}; "
                           "or leave that option out for the best that fits")  # fmt: skip
    if slot.spec.kind not in available.reference_state.kinds:
        detail = "; ".join(f"{name}: {reason}" for name, reason in refused)
        raise ResolveError(
            f"{slot.name}: no installed package serves state of kind {slot.spec.kind!r}{detail and f' ({detail})'}; "
            "install a kernel package that does"
        )
    return available.reference_state, Choice("attention", slot.name, None, REFERENCE, available.version, tuple(refused))


def plain_parts(weight: LinearWeight) -> tuple[WeightPart, ...]:
    """Its parts as they are once dequantized."""
    return tuple(p if p.format.plain else replace(p, format=plain(weight.dtype)) for p in weight.parts)


def _layout(available: Candidates, weight: LinearWeight) -> tuple[str, str]:
    """The layout and, if the parts must be dequantized for it, why no packing holds them as they are stored."""
    refused: list[str] = []
    candidates = [c for c in available.of_op(weight.op) if available.excluded_by(weight.op, c) is None]
    layouts: list[str] = [packing.layout for c in candidates for packing in c.value.packings]
    reference = available.reference_packing.layout
    for parts in dict.fromkeys([weight.parts, plain_parts(weight)]):
        attempt = replace(weight, parts=parts)
        why = "; ".join(refused)
        for layout in dict.fromkeys([*layouts, reference]):
            packing = available.packings_by_layout[layout]
            reason = check_supports(packing, packing.supports(parts, weight.dtype))
            if reason is None and layout != reference:
                reason = _unserved(available, attempt, layout, candidates)
            if reason is None:
                return layout, why if parts != weight.parts else ""
            refused.append(f"{layout}: {reason}")
    raise ResolveError(f"no packing can hold {weight.name} for compute in {weight.dtype} ({'; '.join(refused)}); "
                       "set another dtype, or install a kernel package with a packing for it")  # fmt: skip


def _unserved(
    available: Candidates, weight: LinearWeight, layout: str, candidates: Sequence[Provided[Any]]
) -> str | None:
    """Why no kernel reads ``weight`` in ``layout`` at some bucket; None if one does at each."""
    schema, static = available.schemas[weight.op], linear_static(weight)
    for bucket in available.buckets:
        call = OpCall(weight.op, static, bucket, available.device, {"weight": layout})
        if not any(kernel_refusal(schema, c.value, call) is None for c in candidates):
            return f"no kernel reads it at {bucket} tokens"
    return None
