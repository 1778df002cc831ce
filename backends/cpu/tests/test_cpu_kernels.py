"""Every kernel against its reference, computed in float32: odd sizes, slices, any token count."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import cycle
from typing import Any

import gguf
import pytest
import torch

from evener.contracts.declared import LinearWeight, Table
from evener.contracts.ops import Bucket, Kernel, OpCall, OpFunction
from evener.contracts.quant import BLOCKS, PackedWeight, QuantFormat, WeightPart, block_format, plain
from evener.contracts.state import StateStep
from evener.layers.builder import Builder
from evener.layers.decoder import AttentionConfig, DecoderLayer, MLPConfig
from evener.layers.rotary import RotaryConfig
from evener.ops.parts import load_reference
from evener.ops.reference.linear import PLAIN
from evener.ops.reference.state import ReferenceState
from evener.ops.schemas import BUILTIN
from evener.plugins.catalog import Provided
from evener.resolution.candidates import Candidates
from evener.resolution.resolver import Resolver
from evener_backend_cpu.composites import COMPOSITES
from evener_backend_cpu.device import CpuDevice
from evener_backend_cpu.primitives import PRIMITIVES
from evener_backend_cpu.state import PagedState

DTYPES = ["float32", "bfloat16"]
SCHEMAS = {schema.name: schema for schema in BUILTIN}
CLOSE = {"float32": 2e-5, "bfloat16": 2e-2}


def built(device: CpuDevice, op: str, static: Mapping[str, Any]) -> OpFunction:
    kernel: Kernel = next(kind(device) for kind in (*PRIMITIVES, *COMPOSITES) if kind.op == op)
    call = OpCall(op, static, Bucket(1, 512), device.capabilities)
    assert kernel.supports(call) is None
    return kernel.build(call)


def reference(op: str, static: Mapping[str, Any]) -> OpFunction:
    return load_reference(SCHEMAS[op])(static, None)  # type: ignore[no-any-return]


def noise(*shape: int, dtype: str, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed + sum(shape))).to(getattr(torch, dtype))


def close(got: Any, want: Any, dtype: str) -> None:
    torch.testing.assert_close(got.float(), want.float(), rtol=CLOSE[dtype], atol=CLOSE[dtype])


def packed(matrix: torch.Tensor) -> PackedWeight:
    return PackedWeight("plain", (matrix.shape[0], matrix.shape[1]), matrix, matrix.nbytes)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("tokens", [1, 2, 3, 4, 5, 19, 130])
@pytest.mark.parametrize(("rows", "columns"), [(33, 40), (96, 64), (7, 13), (130, 576)])
@pytest.mark.parametrize("biased", [False, True])
def test_linear(device: CpuDevice, dtype: str, tokens: int, rows: int, columns: int, biased: bool) -> None:
    x, w = noise(tokens, columns, dtype=dtype), noise(rows, columns, dtype=dtype) * columns**-0.5
    bias = noise(rows, dtype=dtype) if biased else None
    want = torch.nn.functional.linear(x.float(), w.float(), None if bias is None else bias.float())
    for out in {dtype, "float32"}:
        run = built(device, "linear", {"rows": rows, "columns": columns, "dtype": dtype, "out": out})
        close(run(x, packed(w), bias), want, out)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("rows", "columns"), [(100, 200), (71, 2085)])
def test_linear_is_batch_invariant(device: CpuDevice, dtype: str, rows: int, columns: int) -> None:
    x, w = noise(70, columns, dtype=dtype), noise(rows, columns, dtype=dtype)
    run = built(device, "linear", {"rows": rows, "columns": columns, "dtype": dtype, "out": dtype})
    whole = run(x, packed(w))
    for count in (1, 2, 3, 4, 7, 15, 16, 17, 23, 67):
        assert torch.equal(run(x[:count].clone(), packed(w)), whole[:count])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("offset", [0.0, 1.0])
@pytest.mark.parametrize("size", [64, 576, 37])
def test_norms(device: CpuDevice, dtype: str, offset: float, size: int) -> None:
    static = {"hidden": size, "dtype": dtype, "eps": 1e-5, "offset": offset}
    x, residual, w = noise(5, size, dtype=dtype), noise(5, size, dtype="float32", seed=1), noise(size, dtype=dtype)
    close(built(device, "rms_norm", static)(x, w), reference("rms_norm", static)(x, w), dtype)
    heads = noise(3, 4 * size, dtype=dtype)[:, size:].unflatten(1, (3, size))
    close(built(device, "rms_norm", static)(heads, w), reference("rms_norm", static)(heads, w), dtype)
    want = reference("add_rms_norm", static)(x, residual, w)
    got = built(device, "add_rms_norm", static)(x.clone(), residual.clone(), w)
    assert torch.equal(got[1], want[1])
    close(got[0], want[0], dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("dim", [64, 48, 8])
@pytest.mark.parametrize("index", [torch.int32, torch.int64])
def test_rotary_of_slices(device: CpuDevice, dtype: str, interleaved: bool, dim: int, index: torch.dtype) -> None:
    static = {"head_dim": 64, "rotary_dim": dim, "interleaved": interleaved, "dtype": dtype}
    wide = noise(6, 64 * 5, dtype=dtype)
    q, k = wide[:, : 3 * 64].unflatten(1, (3, 64)), wide[:, 3 * 64 :].unflatten(1, (2, 64))
    table, positions = (
        RotaryConfig(dim)._angles(0, 50),
        torch.tensor([0, 3, 49, 7, 7, 1], dtype=index),
    )
    want = reference("rotary", static)(positions, q.clone(), k.clone(), table)
    for a, b in zip(built(device, "rotary", static)(positions, q, k, table), want, strict=True):
        close(a, b, dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("activation", ["silu", "gelu", "gelu_tanh"])
@pytest.mark.parametrize("inner", [64, 19])
def test_act_and_mul(device: CpuDevice, dtype: str, activation: str, inner: int) -> None:
    static = {"inner": inner, "activation": activation, "dtype": dtype}
    x = noise(5, 2 * inner, dtype=dtype) * 4
    close(built(device, "act_and_mul", static)(x), reference("act_and_mul", static)(x.float()), dtype)


@pytest.mark.parametrize("dtype", [*DTYPES, "float16"])
def test_greedy_takes_the_lowest_id_of_a_tie(device: CpuDevice, dtype: str) -> None:
    logits = noise(4, 1003, dtype=dtype)
    logits[0, [5, 900]] = 9.0
    logits[1, 1002] = 9.0
    logits[2] = -float("inf")
    got = built(device, "greedy", {"vocab": 1003})(logits)
    assert got.tolist()[:3] == [5, 1002, 0]
    assert got.dtype == torch.int32 and got[3] == logits[3].argmax()


FILTERS = [(0, 1.0, 0.0), (50, 1.0, 0.0), (0, 0.9, 0.0), (0, 1.0, 0.05), (40, 0.95, 0.02), (20000, 0.99, 0.0)]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("spread", [0.5, 4.0], ids=["flat", "peaked"])
def test_sampling_picks_the_references_tokens_from_a_whole_vocabulary(
    device: CpuDevice, dtype: str, spread: float
) -> None:
    rows = 2 * len(FILTERS)
    logits = noise(rows, 32011, dtype=dtype) * spread
    logits[1, ::2] = -torch.inf  # as a mask leaves it
    top_k, top_p, min_p = (torch.tensor(column) for column in zip(*FILTERS * 2, strict=True))
    temperature = torch.tensor([0.7] * len(FILTERS) + [1.0] * (len(FILTERS) - 1) + [0.0])
    seed = torch.arange(rows, dtype=torch.int32) * 977 - 5000
    inputs = (logits, temperature, top_k.int(), top_p, min_p, seed, torch.arange(rows, dtype=torch.int32))
    static = {"vocab": 32011, "filters": True}
    assert built(device, "sample", static)(*inputs).tolist() == reference("sample", static)(*inputs).tolist()


@pytest.mark.parametrize("few", [1, 63, 64, 500])
def test_where_a_mask_forbids_almost_all_ids_a_random_row_takes_the_references_token(
    device: CpuDevice, few: int
) -> None:
    rows, vocab = 8, 32011
    logits = noise(rows, vocab, dtype="float32")
    kept = torch.randint(0, vocab, (rows, few), generator=torch.Generator().manual_seed(few))
    kept[:, 0] = torch.tensor([0, vocab - 1, vocab - 12, 63, 64, 15, 16, 31999])
    logits = torch.full_like(logits, -torch.inf).scatter_(1, kept, logits.gather(1, kept))
    off, ones, counter = torch.zeros(rows), torch.ones(rows), torch.arange(rows, dtype=torch.int32)
    inputs = (logits, ones, off.int(), ones, off, counter, counter)
    static = {"vocab": vocab, "filters": False}
    assert built(device, "sample", static)(*inputs).tolist() == reference("sample", static)(*inputs).tolist()


@pytest.mark.parametrize("dtype", [*DTYPES, "float16"])
@pytest.mark.parametrize("vocab", [5, 32, 95, 1003])
def test_a_mask_leaves_the_logits_of_allowed_ids_as_they_are(device: CpuDevice, dtype: str, vocab: int) -> None:
    words = -(-vocab // 32)
    mask = torch.randint(-(2**31), 2**31, (6, words), generator=torch.Generator().manual_seed(vocab), dtype=torch.int32)
    mask[0], mask[1] = -1, 0
    mask[2, ::2], mask[3, -1] = 0, -(2**31)
    logits = noise(6, vocab, dtype=dtype)
    logits[4, 0], logits[5] = torch.nan, -torch.inf
    wanted = reference("apply_mask", {"vocab": vocab})(logits.clone(), mask)
    got = built(device, "apply_mask", {"vocab": vocab})(logits, mask)
    torch.testing.assert_close(got, wanted, rtol=0, atol=0, equal_nan=True)


def stored_as(storage: str) -> QuantFormat:
    return block_format(storage) if storage in BLOCKS else plain(storage)


def blocks_of(matrix: torch.Tensor, form: QuantFormat) -> torch.Tensor:
    if form.plain:
        return matrix
    kind = gguf.GGMLQuantizationType[form.storage.upper()]
    return torch.from_numpy(gguf.quants.quantize(matrix.float().numpy(), kind))


def values_of(part: WeightPart) -> torch.Tensor:
    """What the numbers of a part are, in float32."""
    stored = part.tensors["weight"]
    if part.format.plain:
        return stored.float()
    kind = gguf.GGMLQuantizationType[part.format.storage.upper()]
    return torch.from_numpy(gguf.quants.dequantize(stored.numpy(), kind))


class Model:
    """One or two declared decoder layers with weights and pages, resolved with or without this backend's kernels."""

    def __init__(
        self,
        device: CpuDevice,
        dtype: str,
        attention: AttentionConfig,
        mlp: MLPConfig,
        ops: set[str],
        native: bool,
        offset: float = 0.0,
        storages: Sequence[str] = (),
    ) -> None:
        self.values: dict[str, torch.Tensor] = {}
        self.change: Mapping[str, torch.Tensor] = {}  # of the steps that are run
        self.builder = Builder(dtype, 1024)
        self.layers = [DecoderLayer(self.builder, f"layers.{i}", 96, attention, mlp, 1e-5, offset) for i in range(2)]
        offered = ops | {"linear"} if storages else ops  # packings are those of kernels for "linear"
        kernels = [kind(device) for kind in (*PRIMITIVES, *COMPOSITES) if kind.op in offered]
        self.state = PagedState(device) if native else ReferenceState()
        offers = [Provided(k, "cpu", "cpu", "0") for k in kernels] if native else []
        available = Candidates(
            schemas=SCHEMAS,
            kernels=offers,
            states=[Provided(self.state, "cpu", "cpu", "0")],
            reference_state=ReferenceState(),
            reference_packing=PLAIN,
            device=device.capabilities,
            buckets=[Bucket(1, 512)],
        )
        self.resolver = Resolver(available)
        self.resolver.states(self.builder.slots)
        linears = [w for w in self.builder.weights if isinstance(w, LinearWeight)]
        turn = cycle(storages)
        for weight in linears if storages else ():
            weight.parts = tuple(replace(p, format=stored_as(next(turn))) for p in weight.parts)
        self.resolver.packings(linears)
        assert {w.layout for w in linears} == {"cpu.blocks" if storages else "plain"}
        self.resolver.sites(self.builder.sites)
        self._fill(dtype)
        for slot in self.builder.slots:
            slot.group = 0
            pages = torch.full((30, self.state.bytes_per_block(slot.spec, 16)), 255, dtype=torch.uint8)
            slot.views = self.state.bind(pages, slot.spec, 16)

    def _fill(self, dtype: str) -> None:
        for number, weight in enumerate(self.builder.weights):
            if isinstance(weight, Table):
                weight.value = weight.make(torch.device("cpu"))
            elif isinstance(weight, LinearWeight):
                matrix = noise(weight.rows, weight.columns, dtype=dtype, seed=number) * weight.columns**-0.5
                parts = [
                    replace(p, tensors={"weight": blocks_of(rows, p.format)})
                    for p, rows in zip(weight.parts, matrix.split([p.rows for p in weight.parts]), strict=True)
                ]
                weight.value = self.resolver.packings_by_layout[weight.layout].pack(parts, dtype, torch.device("cpu"))
                self.values[weight.name] = torch.cat([values_of(p) for p in parts])
            else:
                weight.value = noise(*weight.shape, dtype=dtype, seed=number) * 0.2 + (weight.dummy == "ones")
        for group in self.builder.groups:
            group.bind()

    def run(self, x: torch.Tensor, before: list[int], now: list[int]) -> torch.Tensor:
        table = torch.arange(1, 25, dtype=torch.int32).view(len(now), -1)
        rows = list(enumerate(zip(before, now, strict=True)))
        positions = torch.cat([torch.arange(b, b + n) for _, (b, n) in rows])
        slots = torch.cat(
            [table[r, torch.arange(b, b + n) // 16] * 16 + torch.arange(b, b + n) % 16 for r, (b, n) in rows]
        )
        lengths = [b + n for b, n in zip(before, now, strict=True)]
        step = StateStep(
            tokens=sum(now),
            requests=len(now),
            max_query=max(now),
            max_kv=max(lengths),
            query_start=torch.tensor([0, *torch.tensor(now).cumsum(0).tolist()], dtype=torch.int32),
            kv_lens=torch.tensor(lengths, dtype=torch.int32),
            positions=positions,
            slot_mapping=slots,
            block_table=table,
            host_query_lens=now,
            host_kv_lens=lengths,
        )
        step = replace(step, **self.change)
        slot = self.builder.slots[0]
        meta = self.state.prepare(step, slot.spec, slot.attention, 16)
        residual: torch.Tensor | None = None
        x = x.clone()  # donated
        for layer in self.layers:
            table_entry = layer.sites[0].table[0]
            x, residual = table_entry(
                x, residual, step.positions, layer.attention.values, layer.mlp.values, layer.slot.views, meta
            )
        assert residual is not None
        return x + residual


ATTENTIONS = {
    "plain": {"heads": 9, "kv_heads": 3, "head_dim": 64, "rotary": RotaryConfig(64)},
    "gemma": {
        "heads": 2,
        "kv_heads": 1,
        "head_dim": 32,
        "rotary": RotaryConfig(32),
        "qk_norm": True,
        "post_norm": "post",
        "window": 24,
        "softcap": 20.0,
    },
    "biases": {
        "heads": 4,
        "kv_heads": 4,
        "head_dim": 16,
        "rotary": RotaryConfig(8, interleaved=True),
        "qkv_bias": True,
        "o_bias": True,
    },
}
MLPS = {
    "plain": {"inner": 160},
    "gemma": {"inner": 72, "activation": "gelu_tanh", "post_norm": "post_mlp"},
    "biases": {"inner": 40, "bias": True, "activation": "gelu"},
}
GRANULARITIES = {
    "layer": {"decoder_layer"},
    "blocks": {"attention_block", "mlp_block"},
    "enter": {"norm_qkv_rotary_write", "linear"},
    "primitives": {"linear", "rms_norm", "add_rms_norm", "rotary", "act_and_mul"},
}


#: What the parts of the linears are stored as, in turn: merged ones get a mixture.
MIXED = ("q8_0", "q4_1", "bfloat16", "q5_0", "q4_0")


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("family", list(ATTENTIONS))
@pytest.mark.parametrize("granularity", list(GRANULARITIES))
def test_a_decoder_layer_at_any_granularity(device: CpuDevice, dtype: str, family: str, granularity: str) -> None:
    compare_layers(device, dtype, family, granularity, ())


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("granularity", list(GRANULARITIES))
def test_a_decoder_layer_over_mixed_blocks(device: CpuDevice, dtype: str, granularity: str) -> None:
    compare_layers(device, dtype, "plain", granularity, MIXED)


def compare_layers(device: CpuDevice, dtype: str, family: str, granularity: str, storages: Sequence[str]) -> None:
    attention, mlp = AttentionConfig(**ATTENTIONS[family]), MLPConfig(**MLPS[family])
    offset = 1.0 if family == "gemma" else 0.0
    got = Model(device, dtype, attention, mlp, GRANULARITIES[granularity], True, offset, storages)
    want = Model(device, "float32", attention, mlp, set(), False, offset)
    for a, b in zip(want.builder.weights, got.builder.weights, strict=True):  # the same rounded weights in both
        if isinstance(a, LinearWeight):
            a.value = packed(got.values[b.name])
        else:
            a.value = b.value.float()
    for group in want.builder.groups:
        group.bind()
    providers = {c.op: c.provider for c in got.resolver.manifest.choices if c.op in GRANULARITIES[granularity]}
    assert providers and all(name == f"cpu/native_{op}" for op, name in providers.items())
    for before, now in (([0, 0, 0], [40, 3, 17]), ([40, 3, 17], [1, 1, 1]), ([41, 4, 18], [1, 30, 1])):
        x = noise(sum(now), 96, dtype=dtype)
        y, z = got.run(x, before, now).float(), want.run(x.float(), before, now)
        # Two layers round about twenty times to bfloat16: single elements may be far off, not the whole.
        bound = {"float32": 1e-4 if storages else 1e-5, "bfloat16": 4e-2}[dtype]
        assert float((y - z).norm() / z.norm()) < bound


@pytest.mark.parametrize("storages", [(), MIXED], ids=["plain", "blocks"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_decoder_layer_is_batch_invariant(device: CpuDevice, dtype: str, storages: Sequence[str]) -> None:
    attention, mlp = AttentionConfig(**ATTENTIONS["plain"]), MLPConfig(**MLPS["plain"])
    x = noise(300, 96, dtype=dtype)
    together = Model(device, dtype, attention, mlp, {"decoder_layer"}, True, storages=storages)
    whole = together.run(x, [0], [300])
    apart = Model(device, dtype, attention, mlp, {"decoder_layer"}, True, storages=storages)
    pieces, at = [], 0
    for count in (1, 2, 5, 64, 227, 1):
        pieces.append(apart.run(x[at : at + count], [at], [count]))
        at += count
    assert torch.equal(torch.cat(pieces), whole)


def test_refusals_name_the_reason(device: CpuDevice) -> None:
    kernels = {kind.op: kind(device) for kind in (*PRIMITIVES, *COMPOSITES)}
    for op, static, reason in (
        ("rms_norm", {"dtype": "float16"}, "not float16"),
        ("act_and_mul", {"dtype": "float32", "activation": "relu"}, "relu"),
        ("mlp_block", {"dtype": "float32", "activation": "relu"}, "relu"),
        ("attention_block", {"dtype": "float32", "head_dim": 24, "value_dim": 24}, "head_dim 24"),
    ):
        refusal = kernels[op].supports(OpCall(op, static, Bucket(1, 1), device.capabilities))
        assert refusal is not None and reason in refusal


def test_workspace_grows_with_the_bucket(device: CpuDevice) -> None:
    model = Model(device, "float32", AttentionConfig(**ATTENTIONS["plain"]), MLPConfig(**MLPS["plain"]), set(), True)
    kernel = next(kind(device) for kind in COMPOSITES if kind.op == "decoder_layer")
    static = model.layers[0].sites[0].static
    few, many = (kernel.workspace(OpCall("decoder_layer", static, Bucket(1, n), device.capabilities)) for n in (8, 512))
    assert 0 < few < many


def test_wrong_arguments_are_refused_and_name_what_is_wrong(device: CpuDevice) -> None:
    x = noise(3, 64, dtype="float32")
    norm = built(device, "rms_norm", {"hidden": 64, "dtype": "float32", "eps": 1e-5, "offset": 0.0})
    with pytest.raises(ValueError, match=r"the weight is torch.float32 \[63\]; .* torch.float32 \[64\], contiguous"):
        norm(x, torch.ones(63))
    static = {"head_dim": 32, "rotary_dim": 16, "interleaved": False, "dtype": "float32"}
    rotary, heads = built(device, "rotary", static), x.view(3, 2, 32)
    angles = torch.zeros(8, 16)
    for positions, why in (([0, 1, 8], "positions has 8, outside 0 to 7"), ([0, -1, 2], "positions has -1")):
        with pytest.raises(ValueError, match=f"evener_rotary_f32 was called with wrong arguments: {why}"):
            rotary(torch.tensor(positions), heads.clone(), heads.clone(), angles)
    with pytest.raises(ValueError, match=r"the table of angles is torch.float32 \[8, 14\]"):
        rotary(torch.tensor([0, 1, 2]), heads.clone(), heads.clone(), angles[:, :14].contiguous())


def test_a_rotation_wider_than_its_heads_is_left_to_the_reference(device: CpuDevice) -> None:
    kernel = next(kind(device) for kind in PRIMITIVES if kind.op == "rotary")
    static = {"head_dim": 16, "rotary_dim": 32, "interleaved": False, "dtype": "float32"}
    refusal = kernel.supports(OpCall("rotary", static, Bucket(1, 8), device.capabilities))
    assert refusal == "rotary_dim 32 is odd, or more than head_dim 16"


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"block_table": torch.full((3, 8), 30, dtype=torch.int32)}, "the block table has 30, outside 0 to 29"),
        ({"slot_mapping": torch.full((60,), 480)}, "slot_mapping has 480, outside 0 to 479"),
        ({"kv_lens": torch.tensor([40, 3, 129], dtype=torch.int32)}, "the block table has room for 128"),
        ({"query_start": torch.tensor([0, 40, 30, 60], dtype=torch.int32)}, "request 1 has tokens 40 to 30"),
        ({"positions": torch.full((60,), 1024)}, "positions has 1024, outside 0 to 1023"),
    ],
    ids=["block", "slot", "length", "order", "position"],
)
def test_a_step_that_points_outside_of_the_pool_is_refused(
    device: CpuDevice, change: Mapping[str, torch.Tensor], why: str
) -> None:
    attention, mlp = AttentionConfig(**ATTENTIONS["plain"]), MLPConfig(**MLPS["plain"])
    model = Model(device, "float32", attention, mlp, {"decoder_layer"}, True)
    model.change = change
    with pytest.raises(ValueError, match=why):
        model.run(noise(60, 96, dtype="float32"), [0, 0, 0], [40, 3, 17])
