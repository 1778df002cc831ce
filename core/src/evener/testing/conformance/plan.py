"""What is to be checked: everything that a backend registers, and what every backend is asked for."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from evener.contracts.ops import Kernel, OpCall, OpFunction, OpSchema
from evener.contracts.state import StateProvider
from evener.errors import ConfigError
from evener.ops.reference.linear import PLAIN
from evener.ops.reference.state import ReferenceState
from evener.plugins.hub import Provided
from evener.resolution.resolver import load_reference
from evener.testing.conformance.collectives import collective_results
from evener.testing.conformance.compare import joined
from evener.testing.conformance.composites import check_composite
from evener.testing.conformance.device import device_results
from evener.testing.conformance.formats import OPS, kernel_results, scheme_results
from evener.testing.conformance.graphs import graph_results
from evener.testing.conformance.memory import composite_memory, kernel_memory, not_counted, provider_memory
from evener.testing.conformance.model import model_results
from evener.testing.conformance.ops import FEW, MANY, check_kernel, expansion, no_other_op
from evener.testing.conformance.outcome import AREAS, CaseResult, Check, place_of, raised
from evener.testing.conformance.result import NUMBERS
from evener.testing.conformance.state import SHAPES, check_provider
from evener.testing.conformance.subject import PretendDevice, Subject
from evener.testing.conformance.witness import HostWatch


@dataclass(frozen=True)
class Request:
    """What a run is to do.

    Attributes:
        seed: of all random inputs.
        ops: names of ops, areas, kernels or providers; all if empty.
        dtypes: compute types; those that the device claims if empty.
        thorough: many sizes instead of a few.
    """

    seed: int
    ops: tuple[str, ...] = ()
    dtypes: tuple[str, ...] = ()
    thorough: bool = False


class ReferenceKernel(Kernel):
    """An op's reference as a kernel: what a device computes that has none of its own."""

    name = "reference"
    packings = (PLAIN,)

    def __init__(self, schema: OpSchema) -> None:
        self.op, self._schema = schema.name, schema

    def supports(self, call: OpCall) -> str | None:
        return None

    def build(self, call: OpCall) -> OpFunction:
        return load_reference(self._schema)(call.static, no_other_op)  # type: ignore[no-any-return]


@dataclass
class Plan:
    """All checks of one subject.

    Raises:
        ConfigError: there is nothing to check of an op, or in a compute type, that is asked for.
    """

    subject: Subject
    request: Request
    checks: list[Check] = field(default_factory=list)

    def __post_init__(self) -> None:
        able, wanted = self.subject.dtypes, self.request.dtypes
        for dtype in sorted(set(wanted) - set(able)):
            claimed = f"{self.subject.device.name} claims {', '.join(able) or 'no compute type'}"
            raise ConfigError(f"--dtype {dtype}: {claimed} (DeviceCapabilities.dtypes, emulated); name one of these")
        self.dtypes: tuple[str, ...] = wanted or able
        self._every = every = [
            *self._device(), *self._primitives(), *self._attention(), *self._composites(), *self._formats(),
            *self._registered(), *self._memory(), *self._model(),
        ]  # fmt: skip
        names = {name for check in every for name in check.names}
        for op in self.request.ops:
            if op not in names:
                raise ConfigError(f"--op {op}: {self._nothing(op, names)}. {_choice(every)}")
        asked = set(self.request.ops)
        self.checks = [c for c in every if not asked or asked & c.names]

    def checks_in(self, mode: str) -> list[Check]:
        """Those that a mode asks; "perf" times the kernels of some and runs none.

        Raises:
            ConfigError: there are none.
        """
        areas = _AREAS_OF.get(mode, AREAS)
        # There is no sense in the time of a reference beside itself.
        found = [c for c in self.checks if c.area in areas and (mode != "perf" or "/" in c.provider)]
        if found:
            return found
        what = "times kernels of primitives" if mode == "perf" else f"asks {', '.join(areas)}"
        asked = "".join(f" --op {op}" for op in self.request.ops)
        who = f"{asked} names none" if asked else f" {self.subject.name!r} has none"
        able = [c for c in self._every if c.area in areas and (mode != "perf" or "/" in c.provider)]
        raise ConfigError(f"--mode {mode} {what}, and{who}. {_choice(able)}")

    def _nothing(self, op: str, names: set[str]) -> str:
        """Why nothing answers to a name."""
        backend, schema = repr(self.subject.name), self.subject.schemas.get(op)
        if op == "graphs" and "graph" in self.subject.loaded.selection.backend.descriptor.contracts:
            why = "its hook evener_graph_capture returned nothing for this device"
            if not self.subject.device.capabilities.graphs:
                why += ", whose capabilities name no graphs"
            return f"there is nothing to check: {why}"
        if op in AREAS:
            return f"there is nothing to check, as {backend} {_EMPTY[op]}"
        if schema is not None:
            why = f"it is a composite, and {backend} has no kernel for it"
            return f"there is nothing to check: {why}; its parts are checked one by one"
        close = difflib.get_close_matches(op, names, n=1)
        meant = f" (did you mean {close[0]!r}?)" if close else ""
        return f"no area, op, kernel or provider of {backend} is called so{meant}"

    def _add(
        self, area: str, subject: str, provider: str, run: Callable[[Check], Iterable[CaseResult]], of: object = None
    ) -> Check:
        """A check of ``of`` whose results carry its own name, and whose exceptions are findings."""

        def go() -> Iterator[CaseResult]:
            try:
                for result in run(check):
                    place = place_of(of) if result.outcome == "failed" else ""
                    yield replace(result, area=area, provider=provider, place=place)
            except Exception as error:  # the backend's; it is the finding
                yield replace(check.result("all", "failed", raised(error)), place=place_of(of))

        check = Check(area, subject, provider, go)
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
                # What has no kernel runs on the reference, which asks for whatever torch ops it is made of.
                yield self._add("primitives", schema.name, "reference", partial(self._reference, schema))
        for op in sorted(served - set(subject.schemas)):
            yield self._add("primitives", op, "", _undefined)

    def _kernel(self, kernel: Kernel, schema: OpSchema, check: Check) -> Iterator[CaseResult]:
        watch, request = HostWatch(self.subject.device), self.request
        found = check_kernel(
            kernel,
            schema,
            self.subject.device,
            self.dtypes,
            request.seed,
            watch=watch,
            sizes=MANY if request.thorough else FEW,
        )
        yield from found
        if kernel.op in OPS and kernel.packings and all(r.outcome == "not applicable" for r in found):
            # A packing that takes nothing there fails there.
            why = f"it takes no plain weights ({found[0].detail}); `--op formats` checks what its packings take"
            yield check.result("all", "not applicable", why)
            return
        yield from _covered(check, found)
        yield self._fallback(check, watch)

    def _reference(self, schema: OpSchema, check: Check) -> Iterator[CaseResult]:
        if self.subject.device.capabilities.host_memory and schema.name not in self.subject.own_ops:
            yield check.result("all", "not applicable", "no kernel: the reference runs, which others are compared with")
            return
        yield from self._kernel(ReferenceKernel(schema), schema, check)

    def _fallback(self, check: Check, watch: HostWatch) -> CaseResult:
        case = "runs on the device, not on the host"
        if watch.needless:
            return check.result(case, "not applicable", watch.needless)
        if watch.seen:
            return check.result(case, "failed", "; ".join(watch.lines()))
        return check.result(case, "unknown", watch.blind) if watch.blind else check.result(case, "passed")

    def _attention(self) -> Iterator[Check]:
        subject = self.subject
        for provided in subject.states:
            label = f"{provided.package}/{provided.value.name}"
            run = partial(self._states, provided.value)
            yield self._add("attention", provided.value.layout, label, run, provided.value)
        kinds = {kind for p in subject.states for kind in p.value.kinds}
        if not subject.states or not subject.device.capabilities.host_memory:
            yield self._add("attention", "reference", "reference", partial(self._others, kinds))

    def _states(self, provider: StateProvider, check: Check) -> Iterator[CaseResult]:
        watch = HostWatch(self.subject.device)
        done, reasons = 0, list[str]()
        for dtype in self.dtypes:
            for shape in (*SHAPES, None):
                report = check_provider(
                    provider, self.subject.device, dtype, [shape] if shape else [], self.request.seed,
                    thorough=self.request.thorough, watch=watch, recurrent=shape is None,
                )  # fmt: skip
                done += len(report.checked)
                # A case is one, however many problems it has.
                wrong: dict[str, list[str]] = {}
                for problem in report.problems:
                    mine = [case for case in report.checked if problem.startswith(case)]
                    wrong.setdefault(mine[0] if mine else str(shape or "recurrent"), []).append(problem)
                for case in dict.fromkeys((*report.checked, *wrong)):
                    found = wrong.get(case, [])
                    yield check.result(case, "failed" if found else "passed", _kinds(found, case), dtype)
                for line in report.refused:
                    case, _, reason = line.rpartition(": ")
                    reasons.append(reason)
                    yield check.result(case, "not applicable", reason, dtype)
        absent = [reason for reason in reasons if "not installed" in reason]
        if absent and not done:
            yield check.result("all", "not applicable", absent[0])
        elif not done:
            yield check.result("all", "failed", "it refused every shape, so nobody knows whether it is right")
        yield self._fallback(check, watch)

    def _others(self, served: set[str], check: Check) -> Iterator[CaseResult]:
        """Kinds of state that only the reference serves here."""
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
        watch = HostWatch(self.subject.device)
        found = self._composites_of(provided, provided.value, *self.dtypes, watch=watch)
        yield from found
        yield from _covered(check, found)
        yield self._fallback(check, watch)

    def _composites_of(
        self, provided: Provided[Kernel], kernel: Kernel, *dtypes: str, watch: HostWatch | None = None
    ) -> list[CaseResult]:
        """What uses ``kernel``, which is ``provided`` or stands for it: its op's cases, or layers that call it."""
        subject = self.subject
        schema, seed = subject.schemas[kernel.op], self.request.seed
        if schema.cases:
            sizes, use = MANY if self.request.thorough else FEW, expansion(subject.schemas)
            return check_kernel(kernel, schema, subject.device, dtypes, seed, sizes=sizes, watch=watch, use=use)
        states = [p.value for p in subject.states if p.package == provided.package]
        linears = [p.value for p in subject.kernels if p.value.op in ("linear", "grouped_linear")]
        return check_composite(
            kernel, list(subject.schemas.values()), subject.device, states, linears, dtypes, seed=seed, watch=watch
        )  # fmt: skip

    def _formats(self) -> Iterator[Check]:
        subject = self.subject
        for provided in subject.kernels:
            if provided.value.op in OPS and provided.value.packings:
                label = f"{provided.package}/{provided.value.name}"
                run = partial(self._packings, provided.value)
                yield self._add("formats", provided.value.op, label, run, provided.value)
        for scheme in subject.schemes:
            yield self._add("formats", scheme.value.name, scheme.package, partial(
                scheme_results, scheme=scheme.value, seed=self.request.seed), scheme.value)  # fmt: skip

    def _packings(self, kernel: Kernel, check: Check) -> Iterator[CaseResult]:
        subject, request, watch = self.subject, self.request, HostWatch(self.subject.device)
        yield from kernel_results(
            check, kernel, subject.schemas[kernel.op], subject.device, self.dtypes, request.seed,
            [p.value for p in subject.schemes], request.thorough, watch,
        )  # fmt: skip
        yield self._fallback(check, watch)

    def _registered(self) -> Iterator[Check]:
        """What is asked of those who register it."""
        subject, seed = self.subject, self.request.seed
        if subject.graphs is not None:
            yield self._add("graphs", subject.graphs.package, "", partial(
                graph_results, subject=subject, dtypes=self.dtypes, seed=seed), subject.graphs.value)  # fmt: skip
        if subject.communicator is not None:
            yield self._add("collectives", subject.communicator.package, "", partial(
                collective_results, subject=subject, seed=seed), subject.communicator.value)  # fmt: skip

    def _memory(self) -> Iterator[Check]:
        """What the backend's kernels and providers take, where its device counts."""
        subject, seed = self.subject, self.request.seed
        device = subject.device
        if device.peak_memory(lambda: None) is None:
            yield self._add("memory", device.name, "", not_counted, device)
            return
        for provided in subject.kernels:
            kernel, schema = provided.value, subject.schemas.get(provided.value.op)
            if schema is None:
                continue
            common: dict[str, Any] = {"kernel": kernel, "schema": schema, "device": device, "dtypes": self.dtypes}
            run = (
                partial(composite_memory, run=partial(self._composites_of, provided), **common) if schema.composite
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


#: What modes ask beside "test", which asks everything.
_AREAS_OF = {"perf": ("primitives",), "support": ("primitives", "composites", "attention")}
#: Why an area that is not asked of everybody has no checks.
_EMPTY = {
    "composites": "has no kernel for a composite op (an op that is made of others)",
    "formats": "has no `linear` kernel with packings, and no package brings a quantization scheme",
    "graphs": "captures nothing (it announces no contract `graph` and has no hook evener_graph_capture)",
    "collectives": "has no hook evener_communicator",
}


def _choice(checks: Sequence[Check]) -> str:
    """What may be typed."""
    kinds = {
        "areas": [c.area for c in checks],
        "ops and state layouts": [c.subject for c in checks if c.area in ("primitives", "composites", "attention")],
        "kernels and providers": [c.provider for c in checks if "/" in c.provider],
    }
    lists = [f"{what}: {', '.join(dict.fromkeys(names))}" for what, names in kinds.items() if names]
    return "Leave out --op for everything, or name one of these.\n  " + "\n  ".join(lists)


def _kinds(problems: Sequence[str], case: str) -> str:
    """Those of one case in one text; of those that differ in their numbers alone the first."""
    kinds: dict[str, str] = {}
    for problem in (each.removeprefix(case).lstrip(":, ") for each in problems):
        kinds.setdefault(NUMBERS.sub("#", problem), problem)
    more = f"; {len(problems)} in all" if len(problems) > len(kinds) else ""
    return joined([*kinds.values()]) + more


def _undefined(check: Check) -> Iterator[CaseResult]:
    yield check.result("all", "failed", f"there are kernels for op {check.subject!r}, which no package defines")


def _covered(check: Check, found: Sequence[CaseResult]) -> Iterator[CaseResult]:
    """A failure where nothing was computed: what the kit cannot check nobody may rely on."""
    if any(r.outcome != "not applicable" for r in found):
        return
    reasons = sorted({r.detail for r in found}) or ["there are no cases for it"]
    if all("not installed" in reason for reason in reasons):
        yield check.result("all", "not applicable", reasons[0])
        return
    yield check.result("all", "failed", f"it refused every case, so nobody knows whether it is right: {reasons[0]}")
