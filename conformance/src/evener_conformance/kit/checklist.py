"""The list of checks: everything that a backend registers, and what every backend must have."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from evener.contracts.ops import Kernel, OpCall, OpFunction, OpSchema
from evener.contracts.quant import Packing
from evener.contracts.state import StateProvider
from evener.errors import ConfigError
from evener.ops.parts import load_reference
from evener.ops.reference.linear import PLAIN
from evener.ops.reference.state import ReferenceState
from evener.plugins.catalog import Provided
from evener.plugins.discover import installed_catalog
from evener_conformance.kit.cases import has_cases
from evener_conformance.kit.collectives import collective_results
from evener_conformance.kit.compare import join_problems
from evener_conformance.kit.composites import check_composite
from evener_conformance.kit.device import device_results
from evener_conformance.kit.fallback_monitor import FallbackMonitor
from evener_conformance.kit.formats import OPS, packing_results, scheme_results
from evener_conformance.kit.graphs import graph_results
from evener_conformance.kit.memory import composite_memory, kernel_memory, memory_not_measurable, provider_memory
from evener_conformance.kit.model import model_results
from evener_conformance.kit.ops import FEW_ROW_COUNTS, MANY_ROW_COUNTS, check_kernel, expansion, forbid_nested_ops
from evener_conformance.kit.outcome import (
    AREAS,
    CaseResult,
    Check,
    format_backend_exception,
    most_common,
    source_location,
)
from evener_conformance.kit.result import NUMBERS
from evener_conformance.kit.shapes import SHAPES
from evener_conformance.kit.state import check_provider
from evener_conformance.kit.subject import PretendDevice, Subject
from evener_conformance.kit.views import view_results


@dataclass(frozen=True)
class CheckRequest:
    """What a run checks.

    Attributes:
        seed: seed of all random inputs.
        ops: names of ops, areas, kernels or providers; all if empty.
        dtypes: compute dtypes; those that the device claims if empty.
        thorough: many sizes instead of a few.
    """

    seed: int
    ops: tuple[str, ...] = ()
    dtypes: tuple[str, ...] = ()
    thorough: bool = False


class ReferenceKernel(Kernel):
    """An op's reference as a kernel: it runs where the device has no kernel of its own."""

    name = "reference"
    packings = (PLAIN,)

    def __init__(self, schema: OpSchema) -> None:
        self.op, self._schema = schema.name, schema

    def supports(self, call: OpCall) -> str | None:
        return None

    def build(self, call: OpCall) -> OpFunction:
        return load_reference(self._schema)(call.static, forbid_nested_ops)  # type: ignore[no-any-return]


@dataclass
class Checklist:
    """All checks of one subject.

    Raises:
        ConfigError: there is nothing to check for an op or a compute dtype that was asked for.
    """

    subject: Subject
    request: CheckRequest
    checks: list[Check] = field(default_factory=list)

    def __post_init__(self) -> None:
        able, wanted = self.subject.dtypes, self.request.dtypes
        for dtype in sorted(set(wanted) - set(able)):
            claimed = f"{self.subject.device.name} claims {', '.join(able) or 'no compute dtype'}"
            raise ConfigError(f"--dtype {dtype}: {claimed} (DeviceCapabilities.dtypes, emulated); name one of these")
        self.dtypes: tuple[str, ...] = wanted or able
        self._all_checks = every = [
            *self._device(), *self._primitives(), *self._attention(), *self._composites(), *self._formats(),
            *self._optional_contracts(), *self._memory(), *self._model(),
        ]  # fmt: skip
        names = {name for check in every for name in check.names}
        for op in self.request.ops:
            if op not in names:
                raise ConfigError(f"--op {op}: {self._explain_no_match(op, names)}. {_list_choices(every)}")
        asked = set(self.request.ops)
        self.checks = [c for c in every if not asked or asked & c.names]

    def checks_in(self, mode: str) -> list[Check]:
        """The checks that a mode needs; "perf" takes some of them, to time their kernels.

        Raises:
            ConfigError: there are none.
        """
        areas = _AREAS_BY_MODE.get(mode, AREAS)
        # To time the reference against itself makes no sense.
        found = [c for c in self.checks if c.area in areas and (mode != "perf" or "/" in c.provider)]
        if found:
            return found
        what = "times kernels of primitive ops" if mode == "perf" else f"checks {', '.join(areas)}"
        asked = "".join(f" --op {op}" for op in self.request.ops)
        who = f"{asked} names none" if asked else f" {self.subject.name!r} has none"
        able = [c for c in self._all_checks if c.area in areas and (mode != "perf" or "/" in c.provider)]
        raise ConfigError(f"--mode {mode} {what}, and{who}. {_list_choices(able)}")

    def _explain_no_match(self, op: str, names: set[str]) -> str:
        """Why no check matches a name."""
        backend, schema = repr(self.subject.name), self.subject.schemas.get(op)
        if op == "graphs" and "graph" in self.subject.loaded.selection.backend.descriptor.contracts:
            why = "its hook evener_graph_capture returned nothing for this device"
            if not self.subject.device.capabilities.graphs:
                why += ", whose capabilities do not name graphs"
            return f"there is nothing to check: {why}"
        if op in AREAS:
            return f"there is nothing to check, as {backend} {_WHY_NO_CHECKS[op]}"
        if schema is not None:
            why = f"it is a composite, and {backend} has no kernel for it"
            return f"there is nothing to check: {why}; its parts are checked one by one"
        close = difflib.get_close_matches(op, names, n=1)
        meant = f" (did you mean {close[0]!r}?)" if close else ""
        return f"no area, op, kernel or provider of {backend} has this name{meant}"

    def _add(
        self, area: str, subject: str, provider: str, run: Callable[[Check], Iterable[CaseResult]], of: object = None,
        variant: str = "",
    ) -> Check:  # fmt: skip
        """A check whose exceptions become failures; ``of`` is the backend's object, whose place the failures name."""

        def go() -> Iterator[CaseResult]:
            try:
                for result in run(check):
                    place = source_location(of) if result.outcome == "failed" else ""
                    yield replace(result, area=area, provider=provider, place=place)
            except Exception as error:  # the backend's exception is the failure
                yield replace(check.result("all", "failed", format_backend_exception(error)), place=source_location(of))

        check = Check(area, subject, provider, go, variant)
        return check

    def _device(self) -> Iterator[Check]:
        subject = self.subject
        run = partial(device_results, device=subject.device, pretended=isinstance(subject.device, PretendDevice))
        yield self._add("device", subject.device.name, "", run, subject.device)

    def _primitives(self) -> Iterator[Check]:
        subject = self.subject
        served = {p.value.op for p in subject.kernels}
        for schema in subject.schemas.values():
            if schema.composite:
                continue
            for provided in subject.kernels:
                if provided.value.op == schema.name:
                    label = f"{provided.package}/{provided.value.name}"
                    run = partial(self._kernel, provided.value, schema)
                    yield self._add("primitives", schema.name, label, run, provided.value)
            if schema.name not in served:
                # An op without a kernel runs on the reference, which needs the torch ops that it is made of.
                yield self._add("primitives", schema.name, "reference", partial(self._reference, schema))
        for op in sorted(served - set(subject.schemas)):
            yield self._add("primitives", op, "", _op_without_schema)

    def _kernel(self, kernel: Kernel, schema: OpSchema, check: Check) -> Iterator[CaseResult]:
        watch, request = FallbackMonitor(self.subject.device), self.request
        found = check_kernel(
            kernel,
            schema,
            self.subject.device,
            self.dtypes,
            request.seed,
            watch=watch,
            sizes=MANY_ROW_COUNTS if request.thorough else FEW_ROW_COUNTS,
        )
        yield from found
        if kernel.op in OPS and kernel.packings and all(r.outcome == "not applicable" for r in found):
            # A packing that accepts nothing fails in that area.
            reason = most_common(r.detail for r in found)
            why = f"it accepts no plain weights ({reason}); `--op formats` checks what its packings accept"
            yield check.result("all", "not applicable", why)
            return
        yield from _fail_if_all_refused(check, found)
        yield self._fallback(check, watch)

    def _reference(self, schema: OpSchema, check: Check) -> Iterator[CaseResult]:
        if self.subject.device.capabilities.host_memory and schema.name not in self.subject.own_ops:
            yield check.result("all", "not applicable", "no kernel: the reference runs, with nothing to compare")
            return
        yield from self._kernel(ReferenceKernel(schema), schema, check)

    def _fallback(self, check: Check, watch: FallbackMonitor) -> CaseResult:
        case = "runs on the device, not on the host"
        if watch.not_applicable:
            return check.result(case, "not applicable", watch.not_applicable)
        if watch.seen:
            return check.result(case, "failed", "; ".join(watch.lines()))
        return check.result(case, "unknown", watch.undetectable) if watch.undetectable else check.result(case, "passed")

    def _attention(self) -> Iterator[Check]:
        subject = self.subject
        for provided in subject.states:
            label = f"{provided.package}/{provided.value.name}"
            run = partial(self._states, provided.value)
            yield self._add("attention", provided.value.layout, label, run, provided.value)
        kinds = {kind for p in subject.states for kind in p.value.kinds}
        if not subject.states or not subject.device.capabilities.host_memory:
            yield self._add("attention", "reference", "reference", partial(self._reference_states, kinds))

    def _states(self, provider: StateProvider, check: Check) -> Iterator[CaseResult]:
        watch = FallbackMonitor(self.subject.device)
        done, reasons = 0, list[str]()
        for dtype in self.dtypes:
            for shape in (*SHAPES, None):
                report = check_provider(
                    provider, self.subject.device, dtype, [shape] if shape else [], self.request.seed,
                    thorough=self.request.thorough, watch=watch, recurrent=shape is None,
                )  # fmt: skip
                done += len(report.checked)
                # A case counts once, however many problems it has.
                wrong: dict[str, list[str]] = {}
                for problem in report.problems:
                    mine = [case for case in report.checked if problem.startswith(case)]
                    wrong.setdefault(mine[0] if mine else str(shape or "recurrent"), []).append(problem)
                for case in dict.fromkeys((*report.checked, *wrong)):
                    found = wrong.get(case, [])
                    yield check.result(case, "failed" if found else "passed", _distinct_problems(found, case), dtype)
                for line in report.refused:
                    case, _, reason = line.rpartition(": ")
                    reasons.append(reason)
                    yield check.result(case, "not applicable", reason, dtype)
        absent = [reason for reason in reasons if "not installed" in reason]
        if absent and not done:
            yield check.result("all", "not applicable", absent[0])
        elif not done:
            why = f": {most_common(reasons)}" if reasons else ""
            yield check.result("all", "failed", f"it refused every shape, so it could not be checked{why}")
        yield self._fallback(check, watch)

    def _reference_states(self, served: set[str], check: Check) -> Iterator[CaseResult]:
        """Kinds of state that have no provider but the reference."""
        provider = ReferenceState()
        provider.kinds = ReferenceState.kinds - served
        if not provider.kinds:
            yield check.result("all", "not applicable", "every kind of state has a provider of its own")
            return
        yield from self._states(provider, check)

    def _composites(self) -> Iterator[Check]:
        subject = self.subject
        for provided in subject.kernels:
            schema = subject.schemas.get(provided.value.op)
            if schema is not None and schema.composite:
                label = f"{provided.package}/{provided.value.name}"
                yield self._add("composites", schema.name, label, partial(self._composite, provided), provided.value)

    def _composite(self, provided: Provided[Kernel], check: Check) -> Iterator[CaseResult]:
        watch = FallbackMonitor(self.subject.device)
        found = self._composites_of(provided, provided.value, *self.dtypes, watch=watch)
        yield from found
        yield from _fail_if_all_refused(check, found)
        yield self._fallback(check, watch)

    def _composites_of(
        self, provided: Provided[Kernel], kernel: Kernel, *dtypes: str, watch: FallbackMonitor | None = None
    ) -> list[CaseResult]:
        """Check ``kernel`` (``provided``, or a wrapper of it) over its op's cases, or through layers that call it."""
        subject = self.subject
        schema, seed = subject.schemas[kernel.op], self.request.seed
        if has_cases(schema):
            sizes, use = MANY_ROW_COUNTS if self.request.thorough else FEW_ROW_COUNTS, expansion(subject.schemas)
            return check_kernel(kernel, schema, subject.device, dtypes, seed, sizes=sizes, watch=watch, use=use)
        own = provided.package, kernel.state_layout  # state that it was written for may be another package's
        states = [p.value for p in subject.states if p.package == own[0] or p.value.layout == own[1]]
        linears = [p.value for p in subject.kernels if p.value.op in ("linear", "grouped_linear")]
        return check_composite(
            kernel, list(subject.schemas.values()), subject.device, states, linears, dtypes, seed=seed, watch=watch
        )

    def _formats(self) -> Iterator[Check]:
        subject = self.subject
        for provided in subject.kernels:
            if provided.value.op in OPS and provided.value.packings:
                label = f"{provided.package}/{provided.value.name}"
                # One by one: a packing of many formats takes minutes where kernels are compiled.
                for packing in provided.value.packings:
                    for dtype in self.dtypes:
                        run, variant = partial(self._packing, provided.value, packing, dtype), f"in {packing.layout}"
                        yield self._add(
                            "formats", provided.value.op, label, run, provided.value, f"{variant} for {dtype}"
                        )
        for scheme in subject.schemes:
            yield self._add("formats", scheme.value.name, scheme.package, partial(
                scheme_results, scheme=scheme.value, seed=self.request.seed), scheme.value)  # fmt: skip
        for name, view in installed_catalog().lazy_imports("checkpoint view").items():
            run = partial(view_results, load=view.load, seed=self.request.seed)
            yield self._add("formats", name, view.package, run)

    def _packing(self, kernel: Kernel, packing: Packing, dtype: str, check: Check) -> Iterator[CaseResult]:
        subject, request, watch = self.subject, self.request, FallbackMonitor(self.subject.device)
        yield from packing_results(
            check, kernel, packing, subject.schemas[kernel.op], subject.device, self.dtypes, request.seed,
            [p.value for p in subject.schemes], request.thorough, watch, only=dtype,
        )  # fmt: skip
        yield self._fallback(check, watch)

    def _optional_contracts(self) -> Iterator[Check]:
        """Areas that are checked only if the backend registers something for them."""
        subject, seed = self.subject, self.request.seed
        if subject.graphs is not None:
            yield self._add("graphs", subject.graphs.package, "", partial(
                graph_results, subject=subject, dtypes=self.dtypes, seed=seed), subject.graphs.value)  # fmt: skip
        if subject.communicator is not None:
            yield self._add("collectives", subject.communicator.package, "", partial(
                collective_results, subject=subject, seed=seed), subject.communicator.value)  # fmt: skip

    def _memory(self) -> Iterator[Check]:
        """Device memory of the backend's kernels and providers, if its device counts it."""
        subject, seed = self.subject, self.request.seed
        device = subject.device
        if device.peak_memory(lambda: None) is None:
            yield self._add("memory", device.name, "", memory_not_measurable, device)
            return
        for provided in subject.kernels:
            kernel, schema = provided.value, subject.schemas.get(provided.value.op)
            if schema is None:
                continue
            common: dict[str, Any] = {"kernel": kernel, "schema": schema, "device": device, "dtypes": self.dtypes}
            run = (
                partial(composite_memory, run=partial(
                    self._composites_of, provided, watch=FallbackMonitor(device, guards=False)), **common)
                if schema.composite
                else partial(kernel_memory, seed=seed, **common)
            )  # fmt: skip
            yield self._add("memory", schema.name, f"{provided.package}/{kernel.name}", run, kernel)
        for state in subject.states:
            label = f"{state.package}/{state.value.name}"
            yield self._add("memory", state.value.layout, label, partial(
                provider_memory, provider=state.value, device=device, dtypes=self.dtypes, seed=seed,
            ), state.value)  # fmt: skip

    def _model(self) -> Iterator[Check]:
        yield self._add("model", "tiny model", "", lambda c: model_results(
            c, self.subject, self.dtypes, self.request.seed))  # fmt: skip


#: Areas of the modes other than "test", which checks everything.
_AREAS_BY_MODE = {"perf": ("primitives",), "support": ("primitives", "composites", "attention")}
#: Why an optional area has no checks.
_WHY_NO_CHECKS = {
    "composites": "has no kernel for a composite op (an op that is made of others)",
    "formats": "has no `linear` kernel with packings, and no package brings a quantization scheme or a view",
    "graphs": "captures nothing (it announces no contract `graph` and has no hook evener_graph_capture)",
    "collectives": "has no hook evener_communicator",
}


def _list_choices(checks: Sequence[Check]) -> str:
    """The names that ``--op`` takes."""
    kinds = {
        "areas": [c.area for c in checks],
        "ops and state layouts": [c.subject for c in checks if c.area in ("primitives", "composites", "attention")],
        "kernels and providers": [c.provider for c in checks if "/" in c.provider],
    }
    lists = [f"{what}: {', '.join(dict.fromkeys(names))}" for what, names in kinds.items() if names]
    return "Leave out --op for everything, or name one of these.\n  " + "\n  ".join(lists)


def _distinct_problems(problems: Sequence[str], case: str) -> str:
    """The problems of one case as one text; of problems that differ only in numbers, the first."""
    kinds: dict[str, str] = {}
    for problem in (each.removeprefix(case).lstrip(":, ") for each in problems):
        kinds.setdefault(NUMBERS.sub("#", problem), problem)
    more = f"; {len(problems)} in all" if len(problems) > len(kinds) else ""
    return join_problems([*kinds.values()]) + more


def _op_without_schema(check: Check) -> Iterator[CaseResult]:
    yield check.result("all", "failed", f"there are kernels for op {check.subject!r}, which no package defines")


def _fail_if_all_refused(check: Check, found: Sequence[CaseResult]) -> Iterator[CaseResult]:
    """A failure if nothing was computed: a kernel that the kit cannot check must not pass."""
    if any(r.outcome != "not applicable" for r in found):
        return
    reasons = [r.detail for r in found] or ["there are no cases for it"]
    # One case is enough: a library that is absent is absent for every case, though others are refused for their sizes.
    absent = [reason for reason in reasons if "not installed" in reason]
    if absent:
        yield check.result("all", "not applicable", absent[0])
        return
    yield check.result("all", "failed", f"it refused every case, so it could not be checked: {most_common(reasons)}")
