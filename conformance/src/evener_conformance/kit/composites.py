"""Checking a kernel for a composite op: a tiny model with the kernel and one without, step by step.

The model has two decoder layers and a head. One copy is resolved with the kernel and a state provider, the other with
the expansion over reference ops in float32 from the same rounded weights. Hidden states, logits and the written state
must agree over a prefill, a decode, a mixed step, and one with so many rows that kernels take another path.

``evener_conformance.kit.families`` has the kinds of layers.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from operator import is_
from typing import Any

import torch

from evener.contracts.declared import LinearWeight, StackedWeight, StateSlot, Table, Weight
from evener.contracts.device import Device
from evener.contracts.ops import Kernel, OpCall, OpSchema
from evener.contracts.quant import WeightPart, plain
from evener.contracts.state import StateProvider, StateStep, StoredStateProvider
from evener.engine.quantized.state import bind_slot
from evener.layers.builder import Builder
from evener.layers.decoder import AttentionConfig, DecoderLayer, MixerLayer
from evener.layers.embedding import LMHead
from evener.layers.norms import norm_common
from evener.ops.reference.linear import PLAIN
from evener.ops.reference.state import ReferenceState
from evener.plugins.catalog import Provided
from evener.resolution.buckets import bucket_index, token_buckets
from evener.resolution.candidates import Candidates
from evener.resolution.resolver import Resolver
from evener_conformance.kit.cases.blocks import TOLERANCE, format_of, random_part, reference_dequantize, storage_of
from evener_conformance.kit.compare import join_problems
from evener_conformance.kit.fallback_monitor import FallbackMonitor
from evener_conformance.kit.families import (
    MAX_POSITIONS,
    UNINFORMATIVE_PARAMETERS,
    Family,
    families,
    single_option_families,
)
from evener_conformance.kit.guards import GuardedMemory
from evener_conformance.kit.ops import DTYPES
from evener_conformance.kit.outcome import CaseResult, Outcome, format_backend_exception
from evener_conformance.kit.quantized import scales_of
from evener_conformance.kit.rounding import rounding_references
from evener_conformance.kit.wrapped_kernel import monitored
from evener_conformance.reference.device import HostDevice

_PACKAGE = "checked"
#: Of the model.
LAYERS = 2
#: A byte whose repetition is a finite garbage value in every dtype of state: unwritten state must not be read.
GARBAGE = 0x46
_TOLERANCE = {"float32": 1e-4, "bfloat16": 6e-2, "float16": 1e-2}
#: Rounded activations jump to the next element, 6 to 12 % away in float8, where the compute dtype differs by its own
#: unit. What this changes is measured: the reference runs once more with its input off by up to one unit. A kernel,
#: which rounds to its dtype after every step and not only at the input, may differ from the reference so many times as
#: much, but by no more than the second number, far below what wrong scales or groups do. In float32 jumps are rare, so
#: there the usual tolerance holds, and finds kernels that round in another way.
_JUMPS, _MOST_JUMPS = 3.0, 0.25
_UNITS = {"bfloat16": 2.0**-8, "float16": 2.0**-11}


@dataclass
class _Step:
    bucket: int
    token_ids: torch.Tensor
    positions: torch.Tensor
    metas: tuple[Any, ...]
    stream: None = None
    embedding_overrides: None = None


class TinyModel:
    """Decoder layers and a head, resolved over the given kernels and state provider.

    Args:
        like: another model, whose weights are copied and converted to ``dtype``; None makes random ones.
        seed: seed of random weights.
        memory: makes the tensors that kernels are given; None: as torch makes them.
    """

    def __init__(
        self, device: Device, dtype: str, family: Family, kernels: Sequence[Kernel], provider: StateProvider,
        schemas: Iterable[OpSchema], like: TinyModel | None = None, seed: int = 0, memory: GuardedMemory | None = None,
    ) -> None:  # fmt: skip
        self.device, self.dtype, self.provider, self._seed = device, dtype, provider, seed
        self._memory = memory or GuardedMemory(device, guards=False)
        self.hidden, self._spread, self._divided = family.hidden, family.spread, family.divided
        self.build = build = (_SecondHalf if family.divided else Builder)(dtype, MAX_POSITIONS, absorb=family.absorb)
        layer: Any = DecoderLayer if isinstance(family.attention, AttentionConfig) else MixerLayer
        self.layers: list[DecoderLayer] = [
            layer(
                build,
                f"layers.{i}",
                family.hidden,
                family.attention,
                family.mlp,
                family.eps,
                family.offset,
                family.norm,
            )
            for i in range(LAYERS)
        ]
        norms = norm_common(build, family.hidden, family.eps, family.offset, family.norm)
        self.head = LMHead(build, "head.weight", "norm", family.vocab, norms, cap=family.cap, scale=family.scale)
        for slot in build.slots if family.state else ():
            stored = tuple(replace(t, dtype=family.state, wide=dtype) for t in slot.spec.tensors)
            slot.spec = replace(slot.spec, tensors=stored)
            slot.scales = tuple(tuple(scale.tolist()) for scale in scales_of(slot.spec))
        for weight in build.weights:
            # Most checkpoints leave routers as they are.
            if not family.storage or not isinstance(weight, LinearWeight):
                continue
            if family.routers or not weight.name.endswith(".mlp.gate"):
                weight.parts = _stored_as(weight.parts, family.storage)
        available = Candidates(
            schemas={s.name: s for s in schemas}, kernels=[Provided(k, _PACKAGE, _PACKAGE, "0") for k in kernels],
            states=[Provided(provider, _PACKAGE, _PACKAGE, "0")], reference_state=ReferenceState(),
            reference_packing=PLAIN, device=device.capabilities, buckets=token_buckets(MAX_POSITIONS),
        )  # fmt: skip
        self.resolver = Resolver(available)
        self.resolver.states(build.slots)
        self.resolver.packings([w for w in build.weights if isinstance(w, LinearWeight)])
        if kernels:
            self.resolver.sites(build.sites)
        else:  # references and expansions do not depend on the bucket: one stands for all
            for site in build.sites:
                one = self.resolver.resolve(site.op, site.path, site.static, available.buckets[-1])
                site.table = (one,) * len(available.buckets)
        self.weights: list[list[torch.Tensor]] = []
        self._fill(like)
        self._bind()

    def _fill(self, like: TinyModel | None) -> None:
        where, noise = self.device.torch_device, torch.Generator().manual_seed(self._seed)
        wanted: torch.dtype = getattr(torch, self.dtype)
        parts_by_name: dict[str, torch.Tensor] = {}
        for index, weight in enumerate(self.build.weights):
            if isinstance(weight, Table):
                weight.value = weight.make(where)
                if self._spread:  # changed on the host: the device may lack the ops, or hold no values
                    weight.value = _spread_map(weight.key, weight.make(torch.device("cpu"))).to(where)
                if self._divided:
                    weight.value = _second_half(weight.key, weight.make(torch.device("cpu"))).to(where)
                weight.value = self._memory.place(weight.value, str(weight.key))
                self.weights.append([])
                continue
            shapes: list[tuple[int, ...]] = [weight.shape] if isinstance(weight, Weight) else _shapes(weight)
            if like is None:
                made = [torch.randn(s, generator=noise) * (s[-1] ** -0.5 if len(s) > 1 else 0.2) for s in shapes]
                made = [(m + (getattr(weight, "dummy", "") == "ones")).to(wanted) for m in made]
                if weight.name.endswith("correction"):  # rounding must not change which experts are chosen
                    made = [torch.arange(float(s[0])) for s in shapes]
                if isinstance(weight, Weight):
                    made = self._read(weight, made, parts_by_name)
            else:
                made = [m.to(wanted) for m in like.weights[index]]
            if isinstance(weight, LinearWeight):
                packing, size = self.resolver.packings_by_layout[weight.layout], len(weight.parts)
                parts = [self._stored(weight.parts[i % size], m, noise) for i, m in enumerate(made)]
                made = [m if p.format.plain else reference_dequantize(p) for m, p in zip(made, parts, strict=True)]
                parts_by_name |= {part.name: m for part, m in zip(weight.parts, made, strict=False)}
                matrices = [parts[i : i + size] for i in range(0, len(parts), size)]
                packed = (
                    packing.pack_stack(matrices, weight.experts, self.dtype, where)
                    if weight.experts
                    else packing.pack(parts, self.dtype, where)
                )
                weight.value = replace(packed, data=self._memory.place(packed.data, weight.name))
            else:
                weight.value = self._memory.copy(made[0], weight.name)
            self.weights.append(made)
        for group in self.build.groups:
            group.bind()

    def _stored(self, part: WeightPart, values: torch.Tensor, noise: torch.Generator) -> WeightPart:
        """The part with these values, or with random blocks if it is in blocks."""
        if part.format.plain:
            return replace(part, format=plain(self.dtype), tensors={"weight": values})
        found = random_part(storage_of(part.format), part.rows, part.columns, noise)
        return replace(part, tensors=found.tensors)

    def _read(self, weight: Weight, made: list[torch.Tensor], parts: dict[str, torch.Tensor]) -> list[torch.Tensor]:
        """A plain weight may be another view of a matrix that a linear layer has, or be computed from several."""
        if weight.make is not None:
            return [weight.make([parts[name] for name in weight.sources])]
        return [parts.get(weight.sources[0], made[0]).to(getattr(torch, weight.dtype))]

    def _bind(self) -> None:
        slots, alignment = self.build.slots, self.device.capabilities.alignment
        offered = [set(slot.provider.block_sizes(slot.spec)) for slot in slots if slot.provider is not None]
        self.block = min(set.intersection(*offered) or offered[0])
        self.table = torch.tensor([3, 1, 6, 2, 5, 4], dtype=torch.int32).view(2, 3)
        if self.block * 3 < MAX_POSITIONS:
            columns = -(-MAX_POSITIONS // self.block)
            self.table = torch.arange(2 * columns, 0, -1, dtype=torch.int32).view(2, columns)
        self._groups: dict[Any, StateSlot] = {}
        for slot in slots:
            self._groups.setdefault((slot.spec, slot.attention), slot)
            slot.group = list(self._groups).index((slot.spec, slot.attention))
            assert slot.provider is not None, "states were resolved"
            page = -(-slot.provider.bytes_per_block(slot.spec, self.block) // alignment) * alignment
            garbage = torch.full((self.table.numel() + 2, page), GARBAGE, dtype=torch.uint8)
            storage = self._memory.copy(garbage, f"the state of {slot.name}")
            slot.views = bind_slot(slot, slot.provider, storage, 1, self.block, self.device)

    def step(self, x: torch.Tensor, before: Sequence[int], counts: Sequence[int]) -> list[torch.Tensor]:
        """Hidden states [T, hidden] and logits [requests, vocab] of one step of the first requests, on the host.

        Args:
            before: tokens of each request before the step.
            counts: new tokens of the requests in the step.
        """
        before, table = before[: len(counts)], self.table[: len(counts)]
        lengths = [b + n for b, n in zip(before, counts, strict=True)]
        at = [(r, p) for r, (b, e) in enumerate(zip(before, lengths, strict=True)) for p in range(b, e)]
        where = self.device.torch_device

        def put(name: str, values: Any) -> torch.Tensor:
            return self._memory.copy(torch.as_tensor(values, dtype=torch.int32), name)

        ends = torch.tensor(counts).cumsum(0)
        slots = [int(self.table[r, p // self.block]) * self.block + p % self.block for r, p in at]
        state = StateStep(
            tokens=len(at), requests=len(counts), max_query=max(counts), max_kv=max(lengths),
            query_start=put("query_start", [0, *ends.tolist()]), kv_lens=put("kv_lens", lengths),
            positions=put("positions", [p for _, p in at]), slot_mapping=put("slot_mapping", slots),
            block_table=put("block_table", table), host_query_lens=list(counts), host_kv_lens=lengths,
        )  # fmt: skip
        metas = tuple(
            slot.provider.metadata(state, slot.spec, slot.attention, self.block)
            for slot in self._groups.values()
            if slot.provider is not None
        )
        step = _Step(bucket_index(len(at)), state.positions, state.positions, metas)
        stream = self._memory.copy(x.to(getattr(torch, self.dtype)), "the hidden states")
        residual: torch.Tensor | None = None
        for layer in self.layers:
            stream, residual = layer(stream, residual, step)
        assert residual is not None, "there is a layer"
        hidden = stream + residual
        rows = replace(step, bucket=bucket_index(len(counts)))
        logits = self.head(hidden.index_select(0, (ends - 1).to(where)), rows)
        return [self.device.readback(t).wait() for t in (hidden, logits)]

    def contents(self) -> dict[str, torch.Tensor]:
        """Copies of the tensors of every weight, by name; one of several has its number."""
        found: dict[str, torch.Tensor] = {}
        for weight in self.build.weights:
            value = weight.value.data if isinstance(weight, LinearWeight) and weight.value else weight.value
            name = str(weight.key if isinstance(weight, Table) else weight.name)
            tensors = list(tensors_in(value))
            found |= {f"{name}[{i}]" if len(tensors) > 1 else name: t.clone() for i, t in enumerate(tensors)}
        return found

    def written(self, lengths: Sequence[int]) -> dict[str, torch.Tensor]:
        """Every state tensor of every layer and request, by name: for state per token its tokens, for rows the last."""
        found = {}
        for slot in self.build.slots:
            assert isinstance(slot.provider, StoredStateProvider)
            ids = torch.int64 if self.device.capabilities.int64 else torch.int32
            blocks = self.table.flatten().to(ids).to(self.device.torch_device)
            for tensor, part in zip(slot.spec.tensors, slot.provider.export_blocks(slot.views, blocks), strict=False):
                rows = part.cpu().unflatten(0, tuple(self.table.shape))
                for r, length in enumerate(lengths):
                    own = rows[r].flatten(0, 1)[:length]
                    kept = rows[r, (length - 1) // self.block] if slot.spec.per == "request" else own
                    found[f"{tensor.name} of {slot.name}, request {r}"] = kept
        return found


def _stored_as(parts: Sequence[WeightPart], storage: str) -> tuple[WeightPart, ...]:
    """The parts in the format of ``storage``, whose unit each of their rows is a multiple of."""
    return tuple(replace(part, format=format_of(storage)) for part in parts)


class _SecondHalf(Builder):
    """Declares stacks of the second half of a layer's experts: as on the last of the ranks that divide them."""

    def experts(self, name: str, experts: int, *args: Any, **more: Any) -> StackedWeight:
        return super().experts(name, experts - experts // 2, *args, **more)


def _second_half(key: Any, table: torch.Tensor) -> torch.Tensor:
    """A table of the expert map for such stacks. Other tables are left as they are."""
    if key[0] not in ("expert slots", "expert copies"):
        return table
    elsewhere = len(table) // 2
    missing = torch.full_like(table[:elsewhere], -1 if key[0] == "expert slots" else 0)
    return torch.cat((missing, table[: len(table) - elsewhere]))


def _spread_map(key: Any, table: torch.Tensor) -> torch.Tensor:
    """A table of the expert map of a layer without spare slots, after the last expert has gone to another rank and the
    first has got its slot, for a second copy. Other tables are left as they are."""
    last, changed = len(table) - 1, table.clone()
    if "expert copies" in key:
        changed[0], changed[last] = 2, 0
    elif "expert slots" in key:
        changed = torch.cat((changed, torch.full_like(changed, -1)), dim=1)
        changed[0, 1], changed[last] = last, -1
    return changed


def tensors_in(value: Any) -> Iterator[torch.Tensor]:
    """The tensors in a weight's value; objects that only its kernels understand are left out."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, (tuple, list)):
        for each in value:
            yield from tensors_in(each)
    elif isinstance(value, Mapping):
        yield from tensors_in(list(value.values()))


def _shapes(weight: LinearWeight) -> list[tuple[int, ...]]:
    """Shapes of the parts of every matrix, in order."""
    shapes: list[tuple[int, ...]] = [(p.rows, p.columns) for p in weight.parts]
    return shapes * max(1, weight.experts)


def check_composite(
    kernel: Kernel, schemas: Sequence[OpSchema], device: Device, providers: Sequence[StateProvider],
    linears: Sequence[Kernel] = (), dtypes: Iterable[str] = DTYPES, kinds: Sequence[str] = (), seed: int = 0,
    watch: FallbackMonitor | None = None,
) -> list[CaseResult]:  # fmt: skip
    """Check a kernel for a composite with each family of layers and each state provider.

    Args:
        schemas: all ops.
        providers: state providers of the kernel's package; the reference if there are none.
        linears: the package's kernels for ``linear``, in case composites read weights in its own packing.
        kinds: names of the families of layers; all of them if empty. Those in blocks are left out if no packing of the
            kernel takes their format.
        watch: records fallbacks to the host.
    """
    asked: list[str] = []

    def note(call: OpCall, inputs: Sequence[Any]) -> None:
        asked.append(", ".join([*_describe_parameters(call.static), *_biases(inputs)]))

    watch = watch or FallbackMonitor(device)
    watched = monitored(kernel, watch, note)
    results: list[CaseResult] = []

    def check(family: Family, dtype: str, provider: StateProvider) -> bool:
        """Check one family; whether the kernel accepted it."""
        asked.clear()
        try:
            outcome, detail = _check(watched, schemas, device, provider, linears, dtype, family, seed, watch.memory)
        except Exception as error:  # the backend's exception is the failure
            outcome, detail = "failed", format_backend_exception(error)
        if outside := watch.memory.problems():
            outcome, detail = "failed", join_problems([*([detail] if outcome == "failed" else []), *outside])
        if outcome != "not applicable" or family.name in names:
            case = f"{family.name} layers over {provider.name}"
            if outcome == "failed" and asked:
                case += f" ({asked[0]})"
            results.append(CaseResult("composites", kernel.op, kernel.name, dtype, case, outcome, detail))
        return outcome != "not applicable"

    names = [
        f.name
        for f in families()
        if f.calls(kernel.op) and (not kinds or f.name in kinds) and (not f.storage or _takes(kernel, f.storage))
    ]
    for dtype in dtypes:
        fitting = [f.for_dtype(dtype) for f in families() if f.name in names]
        for provider in providers or (ReferenceState(),):
            taken = [family for family in fitting if check(family, dtype, provider)]
            for family in single_option_families(kernel.op, taken, fitting):
                if _valid(family, _Schemas(schemas)):
                    check(family, dtype, provider)
    return results


def _takes(kernel: Kernel, storage: str) -> bool:
    """Whether a packing of the kernel takes a storage in some compute dtype."""
    part = WeightPart("part", 64, 256, format_of(storage))
    return any(p.supports((part,), dtype) is None for p in kernel.packings for dtype in (*DTYPES, "float16"))


def _describe_parameters(static: Mapping[str, Any]) -> Iterator[str]:
    """Static parameters of a call that may select another path of a kernel: neither sizes nor unset ones."""
    for name, value in static.items():
        if isinstance(value, Mapping):
            yield from (f"{name} {each}" for each in _describe_parameters(value))
        elif isinstance(value, StateSlot):
            how = {"window": value.spec.window, "softcap": value.attention.softcap, "sinks": value.attention.sinks}
            yield from (f"{each}={found}" for each, found in how.items() if found)
        elif isinstance(value, (str, int, float)) and value and name not in UNINFORMATIVE_PARAMETERS:
            yield f"{name}={value}"


def _biases(inputs: Sequence[Any]) -> Iterator[str]:
    """Optional inputs that a call is given; no static parameter says so."""
    for weights in inputs:
        for name, value in getattr(weights, "_asdict", dict)().items():
            if "bias" in name and value is not None:
                yield name


class _Schemas(tuple[OpSchema, ...]):
    """Equal only to the same objects: schemas hold what cannot be hashed."""

    def __hash__(self) -> int:
        return hash(tuple(map(id, self)))

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Schemas) and len(self) == len(other) and all(map(is_, self, other))

    def __ne__(self, other: object) -> bool:
        return not self == other


@lru_cache(maxsize=512)
def _valid(family: Family, schemas: _Schemas) -> bool:
    """Whether a layer can have this detail alone."""
    try:
        model = TinyModel(HostDevice(0), "float32", family, (), ReferenceState(), schemas)
        model.step(torch.zeros(2, family.hidden), (0, 0), (1, 1))
    except Exception:  # no code of the backend runs here
        return False
    return True


def _check(
    kernel: Kernel, schemas: Sequence[OpSchema], device: Device, provider: StateProvider, linears: Sequence[Kernel],
    dtype: str, family: Family, seed: int, memory: GuardedMemory,
) -> tuple[Outcome, str]:  # fmt: skip
    model = TinyModel(device, dtype, family, [kernel, *linears], provider, schemas, seed=seed, memory=memory)
    choices = [c for c in model.resolver.manifest.choices if c.op == kernel.op]
    if not choices:
        return "failed", f"no layer of the kit calls op {kernel.op!r}; add cases='module:function' to its OpSchema"
    label = f"{_PACKAGE}/{kernel.name}"
    refused = [reason for c in choices if c.provider != label for name, reason in c.refused if name == label]
    if refused and all(c.provider != label for c in choices):  # one that serves some numbers of tokens is checked
        return "not applicable", refused[0]
    rounding = rounding_references(schemas, model.resolver.manifest.rounded)
    inputs, near = _inputs(family, family.steps, dtype, seed), None
    if rounding or family.storage:  # stored weights are the checked model's own
        want = _run(TinyModel(HostDevice(0), "float32", family, rounding, ReferenceState(), schemas, model), inputs)
        if rounding and dtype in _UNITS:
            other = TinyModel(HostDevice(0), "float32", family, rounding, ReferenceState(), schemas, model)
            near = _run(other, _jittered(inputs, _UNITS[dtype], seed))
    else:
        want = _expected(family, family.steps, dtype, seed, _Schemas(schemas))
    # With blocks a kernel may round activations, as in the check of products.
    close = max(_TOLERANCE[dtype], TOLERANCE[dtype][1]) if family.storage else _TOLERANCE[dtype]
    problems = list(_differences(model, inputs, want, near, close))
    return ("failed", join_problems(problems)) if problems else ("passed", "")


@dataclass(frozen=True)
class _Input:
    """One step: hidden states [T, hidden], tokens of each request before it, and its new ones."""

    x: torch.Tensor
    before: Sequence[int]
    counts: Sequence[int]


@dataclass(frozen=True)
class _Found:
    """What a model gives: hidden states and logits of each step, and the state that is left."""

    steps: Sequence[Sequence[torch.Tensor]]
    written: Mapping[str, torch.Tensor]


def _inputs(family: Family, steps: Sequence[Sequence[int]], dtype: str, seed: int) -> list[_Input]:
    noise, found, lengths = torch.Generator().manual_seed(seed + 1), list[_Input](), (0, 0)
    for counts in steps:
        x = torch.randn(sum(counts), family.hidden, generator=noise).to(getattr(torch, dtype))
        found.append(_Input(x, lengths, counts))
        lengths = (lengths[0] + counts[0], lengths[1] + (counts[1] if len(counts) > 1 else 0))
    return found


def _jittered(inputs: Sequence[_Input], unit: float, seed: int) -> list[_Input]:
    """The same in float32, each number off by up to one unit."""
    jitter = torch.Generator().manual_seed(seed + 2)
    offs = (1 + unit * (2 * torch.rand(each.x.shape, generator=jitter) - 1) for each in inputs)
    return [replace(each, x=each.x.float() * off) for each, off in zip(inputs, offs, strict=True)]


def _run(model: TinyModel, inputs: Sequence[_Input]) -> _Found:
    with torch.inference_mode():
        steps = [model.step(each.x, each.before, each.counts) for each in inputs]
        last = inputs[-1]
        lengths = [n + (last.counts[r] if r < len(last.counts) else 0) for r, n in enumerate(last.before)]
        return _Found(steps, model.written(lengths))


@lru_cache(maxsize=512)
def _expected(family: Family, steps: Sequence[Sequence[int]], dtype: str, seed: int, schemas: _Schemas) -> _Found:
    """What the reference gives in float32, with weights that were rounded to ``dtype``: the same for all kernels and
    devices, so it is computed once."""
    weights = TinyModel(HostDevice(0), dtype, family, (), ReferenceState(), schemas, seed=seed)
    reference = TinyModel(HostDevice(0), "float32", family, (), ReferenceState(), schemas, weights)
    return _run(reference, _inputs(family, steps, dtype, seed))


def _differences(
    model: TinyModel, inputs: Sequence[_Input], want: _Found, near: _Found | None, close: float
) -> Iterator[str]:
    """What is further from the reference than ``close``, or, with ``near``, than the reference of nearly the same input
    allows: see ``_JUMPS``."""
    before = model.contents()
    got = _run(model, inputs)
    others = near.steps if near is not None else [(None, None)] * len(inputs)
    for number, (each, gots, wants, more) in enumerate(zip(inputs, got.steps, want.steps, others, strict=True)):
        found = [
            text
            for what, a, b, c in zip(("hidden states", "logits"), gots, wants, more, strict=True)
            for text in _describe_error(f"step {number} of {len(each.x)} rows: {what}", a, b, _limit(close, b, c))
        ]
        yield from found
        if found:  # later steps follow from it
            break
    for name, kept in want.written.items():
        limit = _limit(close, kept, near.written[name] if near is not None else None)
        yield from _describe_error(f"written {name}", got.written[name], kept, limit)
    for name, value in model.contents().items():
        if not torch.equal(value, before[name]):
            yield f"weight {name} was changed"


def _limit(close: float, want: torch.Tensor, near: torch.Tensor | None) -> float:
    """The largest error that is allowed, as ``_describe_error`` measures it."""
    return close if near is None else max(close, min(_MOST_JUMPS, _JUMPS * _error(near, want)))


def _error(got: torch.Tensor, want: torch.Tensor) -> float:
    """Errors are relative to the largest value, because rounding in one layer changes everything in the next."""
    return float((got.float() - want.float()).abs().max()) / max(1.0, float(want.float().abs().max()))


def _describe_error(what: str, got: torch.Tensor, want: torch.Tensor, close: float) -> Iterator[str]:
    worst = _error(got, want)
    if not worst <= close:
        yield f"{what} differ by up to {worst:.3g} of the largest value"
