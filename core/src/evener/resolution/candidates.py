"""``Candidates``: what one run may choose from, which kernel may serve a call, and why another may not."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, get_args

from evener.contracts.declared import LinearWeight, StateSlot
from evener.contracts.device import DeviceCapabilities
from evener.contracts.ops import Bucket, Kernel, OpCall, OpSchema
from evener.contracts.quant import Packing
from evener.contracts.state import GraphSupport, StateProvider
from evener.errors import ResolveError, UnknownNameError
from evener.ops.parts import adapted, communicators, inner_ops, walk_static
from evener.plugins.catalog import Provided
from evener.plugins.hook_check import check_supports
from evener.resolution.attribution import attributed_errors
from evener.resolution.footprint import Sizes
from evener.resolution.manifest import EXPANDED, REFERENCE
from evener.tuning_files.measurements import TuningTable, label


@dataclass(frozen=True, kw_only=True)
class Candidates:
    """Everything that resolution may choose from.

    Attributes:
        schemas: by op name, built-in and added.
        kernels, states: what the chosen packages provide.
        reference_state: serves state that no package's provider serves.
        reference_packing: what the reference ``linear`` reads.
        device: capabilities of the device.
        buckets: token buckets, ascending.
        reference_ops, reference_attention: the option that asks for the reference, empty if none does; ``forced``
            overrides it.
        forced: ``{op: provider}``; an op name or "attention"; a provider is a kernel, a package or "reference".
        max_fallback: "none" refuses primitives that only the reference serves.
        version: core's own, for the manifest.
        sizes: of the largest step.
        tuned: what was measured offline; the fastest that may serve goes before priorities.
    """

    schemas: Mapping[str, OpSchema]
    kernels: Sequence[Provided[Any]]
    states: Sequence[Provided[Any]]
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
    tuned: TuningTable = field(default_factory=TuningTable)

    def check(self) -> None:
        """Check that ``forced`` names what there is, and what state providers say of graphs.

        Raises:
            UnknownNameError: ``forced`` names an op or a provider that is not here.
            ResolveError: a state provider's ``graph`` is none of the known values.
        """
        for op, wanted in self.forced.items():
            if op != "attention" and op not in self.schemas:
                raise UnknownNameError("op", op, [*self.schemas, "attention"], "Set ops.<op>=<provider>.")
            known = {REFERENCE} | {name for candidate in self.of_op(op) for name in candidate.names}
            if wanted not in known:
                how = f"Set ops.{op}=reference to use the reference."
                raise UnknownNameError(f"provider of {op}", wanted, known, how)
        for candidate in self.states:
            if candidate.value.graph not in get_args(GraphSupport):
                raise ResolveError(
                    f"state provider {candidate.label} {candidate.version}: graph={candidate.value.graph!r} is none of "
                    f"{', '.join(get_args(GraphSupport))}; correct it in its class"
                )

    def of_op(self, op: str) -> Sequence[Provided[Any]]:
        """Kernels of an op, highest priority first; of "attention" the state providers, in no order."""
        return self.states if op == "attention" else self._by_op.get(op, ())

    def excluded_by(self, op: str, candidate: Provided[Any]) -> str | None:
        """The option that keeps a provider from an op; None if it may serve."""
        wanted = self.forced.get(op)
        if wanted is not None:
            return None if wanted in candidate.names else f"ops.{op}={wanted}"
        return (self.reference_attention if op == "attention" else self.reference_ops) or None

    @cached_property
    def packings_by_layout(self) -> Mapping[str, Packing]:
        """Every available packing. A package may have one for the reference's layout too, which puts the same content
        elsewhere; it replaces the reference's."""
        found = {self.reference_packing.layout: self.reference_packing}
        return found | {packing.layout: packing for each in self.kernels for packing in each.value.packings}

    @cached_property
    def _by_op(self) -> Mapping[str, Sequence[Provided[Any]]]:
        found: dict[str, list[Provided[Any]]] = {}
        for each in sorted(self.kernels, key=lambda each: (-each.value.priority, each.value.name)):
            found.setdefault(each.value.op, []).append(each)
        return found


def op_call(available: Candidates, schema: OpSchema, static: Mapping[str, Any], bucket: Bucket) -> OpCall:
    """The call that kernels are asked about: with the weights' layouts and the layout of the state."""
    inside = tuple(walk_static(static)) if schema.weights or schema.state else ()
    layouts = {name: w.layout for name, w in inside if isinstance(w, LinearWeight) and name in schema.weights}
    slot = next((v for _, v in inside if isinstance(v, StateSlot)), None) if schema.state else None
    layout = slot.provider.layout if slot is not None and slot.provider is not None else None
    return OpCall(schema.name, static, bucket, available.device, layouts, layout)


def refusal(available: Candidates, candidate: Provided[Any], call: OpCall) -> str | None:
    """Why ``candidate`` may not serve ``call``: an option, or the kernel's own reason; None if it may.

    Raises:
        PluginError: the kernel raised something, or gave no valid answer.
    """
    reason = available.excluded_by(call.op, candidate) or _forced_part(available, candidate, call)
    with attributed_errors(candidate):
        reason = reason or kernel_refusal(available.schemas[call.op], candidate.value, call)
    if reason is None and call.variant and call.variant not in candidate.value.variants(call):
        return f"has no variant {label('', call.variant)} any more"
    return reason


def kernel_refusal(schema: OpSchema, kernel: Kernel, call: OpCall) -> str | None:
    """Why ``kernel`` itself cannot serve ``call``, whatever the options say; None if it can."""
    if not kernel.across_ranks and communicators(call.static):
        return "is written for one rank; it may serve what is between the sums over ranks"
    if kernel.state_layout is not None and kernel.state_layout != call.state_layout:
        return f"is written for state layout {kernel.state_layout!r}, but {call.state_layout!r} was chosen"
    if adapted(call.static):
        return "does not add adapters (infer.max_loras, infer.lora_modules)"
    accepted = {packing.layout for packing in kernel.packings}
    for name, layout in call.layouts.items():
        if accepted and layout not in accepted:
            return f"does not read {name} in layout {layout!r}"
    for name, value in walk_static(call.static) if schema.defaults else ():
        if name not in kernel.non_default and value != schema.defaults.get(name, value):
            return f"does not know {name}={value}"
    return check_supports(kernel, kernel.supports(call))


def _forced_part(available: Candidates, candidate: Provided[Any], call: OpCall) -> str | None:
    """The option about an op inside a composite that keeps kernels of other packages from serving the whole composite;
    None if there is none."""
    forced, schema = available.forced, available.schemas[call.op]
    if not forced or not schema.composite or call.op in forced:
        return None
    inside = inner_ops(schema, call.static, available.schemas)
    others = sorted(op for op in inside if forced.get(op) not in (None, candidate.package))
    return f"ops.{others[0]}={forced[others[0]]} is about a part of it" if others else None


def reference_provider(schema: OpSchema) -> str:
    """What the manifest calls the reference of an op: a composite is expanded into its parts."""
    return EXPANDED if schema.composite else REFERENCE
