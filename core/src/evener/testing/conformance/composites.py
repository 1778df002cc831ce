"""Checking a kernel for a composite: a tiny declared model with it and one without, step by step.

The model has two decoder layers and a head. One copy is resolved with the kernel and a state provider, the other with
the expansion over reference ops in float32 from the same rounded weights. Hidden states, logits and the written state
must agree over a prefill, a decode, a mixed step, and one of more rows than those at which kernels change what they do.

A family of layers has several details, and a kernel that refuses one of them is not asked for the others: those are
then shown to it one at a time, in a family that it takes.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, fields, replace
from typing import Any

import torch

from evener.contracts.device import Device
from evener.contracts.ops import Kernel, OpCall, OpFunction, OpSchema
from evener.contracts.quant import plain
from evener.contracts.state import StateProvider, StateStep
from evener.layers.alibi import alibi_slopes
from evener.layers.builder import Builder
from evener.layers.declared import LinearWeight, StateSlot, Table, Weight
from evener.layers.decoder import AttentionConfig, DecoderLayer, MixerLayer, MLPConfig
from evener.layers.embedding import LMHead
from evener.layers.experts import MoEConfig
from evener.layers.hybrid import DeltaConfig, GatedAttentionConfig
from evener.layers.latent import IndexConfig, LatentConfig
from evener.layers.norms import norm_common
from evener.layers.rotary import RotaryConfig, TemperatureConfig
from evener.ops.reference.linear import PLAIN
from evener.ops.reference.state import ReferenceState
from evener.plugins.delivered import judged
from evener.resolution.buckets import bucket_index, token_buckets
from evener.resolution.resolver import Market, Offer, Resolver
from evener.testing.conformance.compare import joined
from evener.testing.conformance.ops import DTYPES
from evener.testing.conformance.outcome import CaseResult, Outcome, raised
from evener.testing.conformance.witness import HostWatch
from evener.testing.reference_device import HostDevice

_HIDDEN, _VOCAB, _LONGEST, _PACKAGE = 96, 67, 192, "checked"
#: Finite garbage in every type that state may have: state that nobody wrote must not be read.
GARBAGE = 0x46
_CLOSE = {"float32": 1e-4, "bfloat16": 6e-2, "float16": 1e-2}
#: Tokens of each of two requests, step by step: prompts, a decode step, one of each, and a tall one: a kernel may take
#: another path from some number of rows on, and few take one only beyond 128.
_STEPS = ((17, 5), (1, 1), (1, 20), (1, 1), (131, 6))
#: Blocks that only these mixers call; an ``index_block`` only a sparse one.
_MIXED: dict[type, tuple[str, ...]] = {
    LatentConfig: ("latent_attention_block", "latent_attend", "index_block"), DeltaConfig: ("delta_block",),
    GatedAttentionConfig: ("gated_attention_block",),
}  # fmt: skip


#: Whose details an op sees; "": of the layer or the head.
_PARTS = {
    "mlp_block": ("mlp", ""), "moe_block": ("mlp", ""), "attention_block": ("attention", ""), "head": ("",),
    "norm_qkv_rotary_write": ("attention", ""),
}  # fmt: skip
#: Fields of a family and its parts that are no details, but names and sizes.
_SIZES = {
    "name", "attention", "mlp", "absorb", "eps", "heads", "kv_heads", "head_dim", "inner", "experts", "top", "at",
    "qkv", "rise", "fall", "key_heads", "key_dim", "value_dim", "width", "nope_dim", "rope_dim", "rank",
}  # fmt: skip
#: Static parameters that are sizes, or say the same of every family.
_UNTELLING = _SIZES | {"hidden", "dtype", "vocab", "rotary_dim", "q_rank", "shared_inner", "eps"}
#: Details that are nothing alone.
_TOGETHER = {
    "gated": ("gated", "rise"), "qk_norm_over": ("qk_norm", "qk_norm_over"), "qk_norms": ("qk_norm", "qk_norms"),
    "groups": ("groups", "top_groups", "group_best", "scoring", "correction", "experts", "top"),
    "shared_gate": ("shared_inner", "shared_gate"), "alpha": ("alpha", "limit", "activation"),
}  # fmt: skip


@dataclass(frozen=True)
class Family:
    """One kind of decoder layer."""

    name: str
    attention: AttentionConfig | LatentConfig | DeltaConfig | GatedAttentionConfig
    mlp: MLPConfig | MoEConfig
    offset: float = 0.0
    cap: float | None = None
    norm: str = "rms"
    scale: float = 1.0
    absorb: str = "auto"
    eps: float = 0.1  # large enough to be missed

    def calls(self, op: str) -> bool:
        """Whether its layers call a composite; of those that several kinds of layer call, all but odd mixers' do."""
        if isinstance(self.mlp, MoEConfig) or op == "moe_block":
            return isinstance(self.mlp, MoEConfig) and op == "moe_block"
        if op == "index_block":
            return isinstance(self.attention, LatentConfig) and self.attention.index is not None
        own = _MIXED.get(type(self.attention))
        return op in own if own else not any(op in others for others in _MIXED.values())

    @property
    def steps(self) -> tuple[tuple[int, ...], ...]:
        """Those that it is checked over: where some of many tokens are chosen, rounding alone would choose others."""
        index = self.attention.index if isinstance(self.attention, LatentConfig) else None
        return _STEPS if index is None or index.top >= _LONGEST else _STEPS[:-1]

    def within(self, dtype: str) -> Family:
        """As it is checked in a type: rounding in a narrow one would choose other tokens, so there all are chosen."""
        how, mlp = self.attention, self.mlp
        if dtype != "float32" and isinstance(mlp, MoEConfig) and mlp.correction is None:
            return replace(self, mlp=replace(mlp, top=mlp.experts))
        if dtype == "float32" or not isinstance(how, LatentConfig) or how.index is None:
            return self
        return replace(self, attention=replace(how, index=replace(how.index, top=_LONGEST)))


def families() -> tuple[Family, ...]:
    """Grouped heads; windows, caps, offsets and norms on both sides; biases, partial and interleaved rotation; experts;
    what mixes tokens otherwise; and what few families have: layer norms, plain MLPs, norms of all heads together,
    halves side by side, chunks, sinks, norms without weights, no rotation, linear biases, factors on queries."""
    return (
        Family(
            "grouped", AttentionConfig(heads=9, kv_heads=3, head_dim=64, rotary=RotaryConfig(64)), MLPConfig(inner=160)
        ),
        Family(
            "windowed",
            AttentionConfig(
                heads=2, kv_heads=1, head_dim=32, rotary=RotaryConfig(32), qk_norm=True, post_norm="post", window=12,
                softcap=20.0,
            ),
            MLPConfig(inner=72, activation="gelu_tanh", post_norm="post_mlp"),
            1.0,
            30.0,
        ),
        Family(
            "biased",
            AttentionConfig(
                heads=4, kv_heads=4, head_dim=16, rotary=RotaryConfig(8, interleaved=True), qkv_bias=True, o_bias=True
            ),
            MLPConfig(inner=40, bias=True, activation="gelu"),
        ),
        *_other_mixers(),
        Family(
            "layer-normed",
            AttentionConfig(
                heads=4, kv_heads=2, head_dim=16, rotary=RotaryConfig(16), qkv=("qkv",), qk_norm=True,
                qk_norm_over="each", post_norm="post",
            ),
            MLPConfig(inner=56, gated=False, rise=("up",), activation="relu", bias=True),
            norm="biased_layer", scale=0.5,
        ),
        Family(
            "parallel",
            AttentionConfig(
                heads=2, kv_heads=2, head_dim=32, rotary=RotaryConfig(32), qk_norm=True, qk_norm_over="all"
            ),
            MLPConfig(inner=48, rise=("gate_up",), parallel=True, post_norm="post_mlp"), norm="layer",
        ),
        Family(
            "local",
            AttentionConfig(
                heads=4, kv_heads=2, head_dim=32, rotary=RotaryConfig(32, interleaved=True), chunk=9, qk_norm=True,
                qk_norms=None, sinks=True,
            ),
            MLPConfig(inner=40),
        ),
        Family(
            "unturned",
            AttentionConfig(
                heads=4, kv_heads=1, head_dim=16, rotary=RotaryConfig(0), slopes=alibi_slopes(4),
                temperature=TemperatureConfig(5, 0.7),
            ),
            MLPConfig(inner=40),
        ),
        Family(
            "expert",
            AttentionConfig(heads=2, kv_heads=1, head_dim=32, rotary=RotaryConfig(32)),
            MoEConfig(
                experts=6, top=2, inner=40, scoring="sigmoid", correction="correction", groups=3, top_groups=2,
                group_best=2, scale=2.5, shared_inner=24, shared_gate="gate", post_norm="post_mlp",
            ),
        ),
        Family(
            "plain expert", AttentionConfig(heads=2, kv_heads=1, head_dim=32, rotary=RotaryConfig(32)),
            MoEConfig(experts=5, top=2, inner=40),
        ),
        Family(
            "biased expert",
            AttentionConfig(heads=2, kv_heads=1, head_dim=32, rotary=RotaryConfig(32)),
            MoEConfig(
                experts=3, top=3, inner=24, scoring="softmax_top", renormalize=False, bias=True,
                activation="clamped_swiglu", alpha=1.702, limit=7.0,
            ),
        ),
    )  # fmt: skip


def _other_mixers() -> tuple[Family, ...]:
    """Latent attention in each of its ways, a sparse index, a recurrence, gated attention."""
    return (
        Family(
            "latent",
            LatentConfig(heads=3, nope_dim=20, rope_dim=8, value_dim=24, rank=40, q_rank=None,
                         rotary=RotaryConfig(8, interleaved=True)),
            MLPConfig(inner=40),
        ),
        Family(
            "latent queries",
            LatentConfig(heads=5, nope_dim=16, rope_dim=16, value_dim=16, rank=32, q_rank=48, rotary=RotaryConfig(16),
                         bias=True),
            MLPConfig(inner=40),
        ),
        Family(
            "latent products",
            LatentConfig(heads=3, nope_dim=20, rope_dim=8, value_dim=24, rank=40, q_rank=32, rotary=RotaryConfig(8)),
            MLPConfig(inner=40), absorb="absorb",
        ),
        Family(
            "latent expanded",
            LatentConfig(heads=3, nope_dim=20, rope_dim=8, value_dim=24, rank=40, q_rank=None, rotary=RotaryConfig(8)),
            MLPConfig(inner=40), absorb="none",
        ),
        Family(
            "sparse",
            LatentConfig(heads=3, nope_dim=16, rope_dim=8, value_dim=16, rank=24, q_rank=32, rotary=RotaryConfig(8),
                         index=IndexConfig(heads=4, head_dim=16, top=9)),
            MLPConfig(inner=40),
        ),
        Family("recurrent", DeltaConfig(heads=4, key_heads=2, key_dim=12, value_dim=10, width=4), MLPConfig(inner=40)),
        Family(
            "gated", GatedAttentionConfig(heads=6, kv_heads=2, head_dim=20, rotary=RotaryConfig(8), bias=True),
            MLPConfig(inner=40), 1.0,
        ),
    )  # fmt: skip


@dataclass
class _Step:
    bucket: int
    token_ids: torch.Tensor
    positions: torch.Tensor
    metas: tuple[Any, ...]
    stream: None = None
    overlay: None = None


class TinyModel:
    """Two layers and a head, resolved over the given offers.

    Args:
        like: another model, whose weights are taken, in this one's type; None makes new ones.
        seed: of new weights.
    """

    def __init__(
        self, device: Device, dtype: str, family: Family, kernels: Sequence[Kernel], provider: StateProvider,
        schemas: Iterable[OpSchema], like: TinyModel | None = None, seed: int = 0,
    ) -> None:  # fmt: skip
        self.device, self.dtype, self.provider, self._seed = device, dtype, provider, seed
        self.build = build = Builder(dtype, _LONGEST, absorb=family.absorb)
        layer: Any = DecoderLayer if isinstance(family.attention, AttentionConfig) else MixerLayer
        self.layers: list[DecoderLayer] = [
            layer(build, f"layers.{i}", _HIDDEN, family.attention, family.mlp, family.eps, family.offset, family.norm)
            for i in range(2)
        ]
        norms = norm_common(build, _HIDDEN, family.eps, family.offset, family.norm)
        self.head = LMHead(build, "head.weight", "norm", _VOCAB, norms, cap=family.cap, scale=family.scale)
        market = Market(
            schemas={s.name: s for s in schemas}, kernels=[Offer(k, _PACKAGE, "0") for k in kernels],
            states=[Offer(provider, _PACKAGE, "0")], reference_state=ReferenceState(), reference_packing=PLAIN,
            device=device.capabilities, buckets=token_buckets(_LONGEST),
        )  # fmt: skip
        self.resolver = Resolver(market)
        self.resolver.states(build.slots)
        self.resolver.packings([w for w in build.weights if isinstance(w, LinearWeight)])
        self.resolver.sites(build.sites)
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
            self.weights.append(made)
            if isinstance(weight, LinearWeight):
                packing, size = self.resolver.packings_by_layout[weight.layout], len(weight.parts)
                parts_by_name |= {part.name: m for part, m in zip(weight.parts, made, strict=False)}
                parts = [
                    replace(weight.parts[i % size], format=plain(self.dtype), tensors={"weight": m})
                    for i, m in enumerate(made)
                ]
                matrices = [parts[i : i + size] for i in range(0, len(parts), size)]
                weight.value = (
                    packing.pack_stack(matrices, weight.experts, self.dtype, where)
                    if weight.experts
                    else packing.pack(parts, self.dtype, where)
                )
            else:
                weight.value = made[0].to(where, copy=True)
        for group in self.build.groups:
            group.bind()

    def _read(
        self, weight: Weight, made: list[torch.Tensor], parts: dict[str, torch.Tensor]
    ) -> list[torch.Tensor]:  # fmt: skip
        """A matrix may be read whole beside the layer that multiplies by it, or be a product of several."""
        if weight.make is not None:
            return [weight.make([parts[name] for name in weight.sources])]
        return [parts.get(weight.sources[0], made[0]).to(getattr(torch, weight.dtype))]

    def _bind(self) -> None:
        slots, alignment = self.build.slots, self.device.capabilities.alignment
        offered = [set(slot.provider.block_sizes(slot.spec)) for slot in slots if slot.provider is not None]
        self.block = min(set.intersection(*offered) or offered[0])
        self.table = torch.tensor([3, 1, 6, 2, 5, 4], dtype=torch.int32).view(2, 3)
        if self.block * 3 < _LONGEST:
            columns = -(-_LONGEST // self.block)
            self.table = torch.arange(2 * columns, 0, -1, dtype=torch.int32).view(2, columns)
        self._groups: dict[Any, StateSlot] = {}
        for slot in slots:
            self._groups.setdefault((slot.spec, slot.attention), slot)
            slot.group = list(self._groups).index((slot.spec, slot.attention))
            assert slot.provider is not None, "states were resolved"
            page = -(-slot.provider.bytes_per_block(slot.spec, self.block) // alignment) * alignment
            storage = torch.zeros(self.table.numel() + 2, page, dtype=torch.uint8, device=self.device.torch_device)
            slot.views = slot.provider.bind(storage.fill_(GARBAGE), slot.spec, self.block)

    def step(self, x: torch.Tensor, before: Sequence[int], counts: Sequence[int]) -> list[torch.Tensor]:
        """Hidden states [T, hidden] and logits [2, vocab] of one step, on the host."""
        lengths = [b + n for b, n in zip(before, counts, strict=True)]
        at = [(r, p) for r, (b, e) in enumerate(zip(before, lengths, strict=True)) for p in range(b, e)]
        where = self.device.torch_device

        def put(values: Any) -> torch.Tensor:
            return torch.as_tensor(values, dtype=torch.int32).to(where)

        ends = torch.tensor(counts).cumsum(0)
        state = StateStep(
            tokens=len(at), requests=len(counts), max_query=max(counts), max_kv=max(lengths),
            query_start=put([0, *ends.tolist()]), kv_lens=put(lengths), positions=put([p for _, p in at]),
            slot_mapping=put([int(self.table[r, p // self.block]) * self.block + p % self.block for r, p in at]),
            block_table=put(self.table), host_query_lens=list(counts), host_kv_lens=lengths,
        )  # fmt: skip
        metas = tuple(
            slot.provider.metadata(state, slot.spec, slot.attention, self.block)
            for slot in self._groups.values() if slot.provider is not None
        )  # fmt: skip
        step = _Step(bucket_index(len(at)), state.positions, state.positions, metas)
        stream = x.to(getattr(torch, self.dtype)).to(where, copy=True)
        residual: torch.Tensor | None = None
        for layer in self.layers:
            stream, residual = layer(stream, residual, step)
        assert residual is not None, "there is a layer"
        hidden = stream + residual
        rows = replace(step, bucket=bucket_index(len(counts)))
        logits = self.head(hidden.index_select(0, (ends - 1).to(where)), rows)
        return [self.device.readback(t).wait() for t in (hidden, logits)]

    def contents(self) -> dict[str, torch.Tensor]:
        """Copies of what the weights hold, where that is one tensor."""
        found = {}
        for weight in self.build.weights:
            value = weight.value.data if isinstance(weight, LinearWeight) and weight.value else weight.value
            if isinstance(value, torch.Tensor):
                found[str(weight.key if isinstance(weight, Table) else weight.name)] = value.clone()
        return found

    def written(self, lengths: Sequence[int]) -> list[torch.Tensor]:
        """Every state tensor of every layer, for the tokens of each request; of rows the last one."""
        found = []
        for slot in self.build.slots:
            assert slot.provider is not None
            ids = torch.int64 if self.device.capabilities.int64 else torch.int32
            blocks = self.table.flatten().to(ids).to(self.device.torch_device)
            for part in slot.provider.export_blocks(slot.views, blocks):
                rows = part.cpu().unflatten(0, tuple(self.table.shape))
                if slot.spec.per == "request":
                    found += [rows[r, (length - 1) // self.block] for r, length in enumerate(lengths)]
                else:
                    found += [rows[r].flatten(0, 1)[:length] for r, length in enumerate(lengths)]
        return found


def _shapes(weight: LinearWeight) -> list[tuple[int, ...]]:
    """Of the parts of every matrix, one after another."""
    shapes: list[tuple[int, ...]] = [(p.rows, p.columns) for p in weight.parts]
    return shapes * max(1, weight.experts)


class Wrapped(Kernel):
    """A kernel with something around its calls: ``around`` is given what was asked for and what the kernel made."""

    def __init__(self, kernel: Kernel, around: Callable[[OpCall, OpFunction], OpFunction]) -> None:
        self._kernel, self._around = kernel, around
        for name in ("op", "name", "priority", "capturable", "deterministic", "batch_invariant", "packings",
                     "state_layout", "across_ranks", "unusual"):  # fmt: skip
            setattr(self, name, copy.copy(getattr(kernel, name)))

    def supports(self, call: OpCall) -> str | None:
        return judged(self._kernel, self._kernel.supports(call))

    def workspace(self, call: OpCall) -> int:
        return self._kernel.workspace(call)

    def build(self, call: OpCall) -> OpFunction:
        run: OpFunction = self._around(call, self._kernel.build(call))
        return run


def _watched(kernel: Kernel, watch: HostWatch, asked: list[str]) -> Kernel:
    """A kernel whose calls are watched; ``asked`` gets what tells the first one of each callable from others."""

    def around(call: OpCall, run: OpFunction) -> OpFunction:
        looks = [watch.profiled]  # the slow look: once for each callable

        def watched(*inputs: Any) -> Any:
            if looks:
                asked.append(", ".join([*_telling(call.static), *_biases(inputs)]))
            with looks.pop()() if looks else nullcontext(), watch():
                return run(*inputs)

        return watched

    return Wrapped(kernel, around)


def check_composite(
    kernel: Kernel, schemas: Sequence[OpSchema], device: Device, providers: Sequence[StateProvider],
    linears: Sequence[Kernel] = (), dtypes: Iterable[str] = DTYPES, kinds: Sequence[str] = (), seed: int = 0,
    watch: HostWatch | None = None,
) -> list[CaseResult]:  # fmt: skip
    """Check a kernel for a composite, over each family of layers and each provider.

    Args:
        schemas: all ops.
        providers: state providers of the kernel's package; the reference is used where there are none.
        linears: the package's kernels for ``linear``, if composites read weights in a packing of their own.
        kinds: names of the families of layers; all of them if empty.
        watch: notes fallbacks to the host.
    """
    asked: list[str] = []
    watched = _watched(kernel, watch or HostWatch(device), asked)
    results: list[CaseResult] = []

    def check(family: Family, dtype: str, provider: StateProvider) -> bool:
        """Whether the kernel takes it."""
        asked.clear()
        try:
            outcome, detail = _check(watched, schemas, device, provider, linears, dtype, family, seed)
        except Exception as error:  # the backend's; it is the finding
            outcome, detail = "failed", raised(error)
        if outcome != "not applicable" or family.name in names:
            case = f"{family.name} layers over {provider.name}"
            if outcome == "failed" and asked:
                case += f" ({asked[0]})"
            results.append(CaseResult("composites", kernel.op, kernel.name, dtype, case, outcome, detail))
        return outcome != "not applicable"

    names = [f.name for f in families() if f.calls(kernel.op) and (not kinds or f.name in kinds)]
    for dtype in dtypes:
        fitting = [f.within(dtype) for f in families() if f.name in names]
        for provider in providers or (ReferenceState(),):
            taken = [family for family in fitting if check(family, dtype, provider)]
            for family in details(kernel.op, taken, fitting):
                if _valid(family, schemas):
                    check(family, dtype, provider)
    return results


def _telling(static: Mapping[str, Any]) -> Iterator[str]:
    """The parameters of a call by which a kernel may take another path: neither sizes nor what is off."""
    for name, value in static.items():
        if isinstance(value, Mapping):
            yield from (f"{name} {each}" for each in _telling(value))
        elif isinstance(value, StateSlot):
            how = {"window": value.spec.window, "softcap": value.attention.softcap, "sinks": value.attention.sinks}
            yield from (f"{each}={found}" for each, found in how.items() if found)
        elif isinstance(value, (str, int, float)) and value and name not in _UNTELLING:
            yield f"{name}={value}"


def _biases(inputs: Sequence[Any]) -> Iterator[str]:
    """Those that a call is given: whether there is one no static parameter says."""
    for weights in inputs:
        for name, value in getattr(weights, "_asdict", dict)().items():
            if "bias" in name and value is not None:
                yield name


def details(op: str, taken: Sequence[Family], asked: Sequence[Family]) -> Iterator[Family]:
    """The first of those that were ``taken``, with one detail each that only others have which were ``asked`` for."""
    parts = _PARTS.get(op, ("attention", "mlp", ""))
    seen = {(part, name, repr(value)) for family in taken for part, name, value in _own(family, parts)}
    for family in asked if taken else ():
        for part, name, value in _own(family, parts):
            base: Any = getattr(taken[0], part) if part else taken[0]
            same = not part or type(base) is type(getattr(family, part))
            if same and (part, name, repr(value)) not in seen:
                seen.add((part, name, repr(value)))
                source = getattr(family, part) if part else family
                other = replace(base, **{each: getattr(source, each) for each in _TOGETHER.get(name, (name,))})
                changed: dict[str, Any] = {part: other} if part else {name: value}
                yield replace(taken[0], **changed, name=f"{taken[0].name} layers with {name} {value} as {family.name}")


def _own(family: Family, parts: Sequence[str]) -> Iterator[tuple[str, str, Any]]:
    """Details of a family that are no sizes: the part it is of, its name, what it is."""
    for part in parts:
        value = getattr(family, part) if part else family
        for each in fields(value):
            if each.name not in _SIZES:
                yield part, each.name, getattr(value, each.name)


def _valid(family: Family, schemas: Sequence[OpSchema]) -> bool:
    """Whether layers can have such a detail without the others that it came with."""
    try:
        model = TinyModel(HostDevice(0), "float32", family, (), ReferenceState(), schemas)
        model.step(torch.zeros(2, _HIDDEN), (0, 0), (1, 1))
    except Exception:  # nothing of the backend's is in it
        return False
    return True


def _check(
    kernel: Kernel, schemas: Sequence[OpSchema], device: Device, provider: StateProvider, linears: Sequence[Kernel],
    dtype: str, family: Family, seed: int,
) -> tuple[Outcome, str]:  # fmt: skip
    model = TinyModel(device, dtype, family, [kernel, *linears], provider, schemas, seed=seed)
    choices = [c for c in model.resolver.manifest.choices if c.op == kernel.op]
    if not choices:
        return "failed", f"no layer that the kit has calls op {kernel.op!r}; its schema needs cases"
    label = f"{_PACKAGE}/{kernel.name}"
    refused = [reason for c in choices if c.provider != label for name, reason in c.refused if name == label]
    if refused:
        return "not applicable", refused[0]
    reference = TinyModel(HostDevice(0), "float32", family, (), ReferenceState(), schemas, model)
    problems = list(_differences(model, reference, family.steps, _CLOSE[dtype], seed))
    return ("failed", joined(problems)) if problems else ("passed", "")


def _differences(
    model: TinyModel, reference: TinyModel, steps: Sequence[Sequence[int]], close: float, seed: int
) -> Iterator[str]:
    noise, lengths = torch.Generator().manual_seed(seed + 1), [0, 0]
    before = model.contents()
    with torch.inference_mode():
        for number, counts in enumerate(steps):
            x = torch.randn(sum(counts), _HIDDEN, generator=noise).to(getattr(torch, model.dtype))
            got, want = (m.step(x, lengths, counts) for m in (model, reference))
            lengths = [b + n for b, n in zip(lengths, counts, strict=True)]
            for what, a, b in zip(("hidden states", "logits"), got, want, strict=True):
                yield from _off(f"step {number} of {sum(counts)} rows: {what}", a, b, close)
        for index, (a, b) in enumerate(zip(model.written(lengths), reference.written(lengths), strict=True)):
            yield from _off(f"written state {index}", a, b, close)
    for name, value in model.contents().items():
        if not torch.equal(value, before[name]):
            yield f"weight {name} was changed"


def _off(what: str, got: torch.Tensor, want: torch.Tensor, close: float) -> Iterator[str]:
    """Errors relative to the largest value: rounding in one layer moves all of the next."""
    worst = float((got.float() - want.float()).abs().max()) / max(1.0, float(want.float().abs().max()))
    if not worst <= close:
        yield f"{what} are off by {worst:.3g} of the largest value"
