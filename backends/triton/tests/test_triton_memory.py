"""What composites take on a GPU, counted on the host at a model's widths: nothing is launched, as numbers do not
matter, and every kernel gets the sizes that it has on a GPU with 132 units."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import triton.runtime.interpreter as interpreter
from test_memory_measured import Meter

from evener.contracts.declared import LinearWeight
from evener.contracts.device import DeviceCapabilities
from evener.contracts.ops import Bucket, OpCall
from evener.contracts.quant import PackedWeight
from evener.contracts.state import AttentionSpec, StateSpec, StateStep, StateTensor
from evener.contracts.weights import AttentionWeights, LatentWeights, MLPWeights, MoEWeights
from evener_conformance.kit.cases.blocks import random_part
from evener_conformance.reference.device import HostDevice
from evener_kernels_triton.composites import TritonAttentionBlock, TritonHead, TritonMlpBlock, TritonNormQkvRotaryWrite
from evener_kernels_triton.experts import TritonGroupedLinear, TritonMoeBlock
from evener_kernels_triton.latent import TritonLatentAttentionBlock
from evener_kernels_triton.latent_state import LatentState
from evener_kernels_triton.layers import TritonDecoderLayer
from evener_kernels_triton.linear import StoredLinear
from evener_kernels_triton.logits import TritonPenalize
from evener_kernels_triton.packed import PACKED
from evener_kernels_triton.state import PagedState
from evener_kernels_triton.stored import STORED
from evener_kernels_triton.tuning import Tuning

GPU = DeviceCapabilities(
    dtypes=frozenset({"float32", "bfloat16"}), features=frozenset({"units:132", "shared:232448", "overlap"})
)
HIDDEN, HEADS, KV_HEADS, DIM, INNER, VOCAB, EXPERTS, TOP, SHARED = 1024, 16, 4, 128, 2816, 20000, 32, 4, 512
COMMON: dict[str, Any] = {"hidden": HIDDEN, "dtype": "bfloat16", "eps": 1e-6, "offset": 0.0}
KINDS = (
    TritonNormQkvRotaryWrite, TritonAttentionBlock, TritonMlpBlock, TritonDecoderLayer, TritonHead, TritonMoeBlock,
)  # fmt: skip


@pytest.fixture(autouse=True)
def nothing_is_launched(monkeypatch: pytest.MonkeyPatch, one_thread: None) -> None:
    """The library's products get room for their results, too."""

    def linear(x: torch.Tensor, w: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        return torch.empty(len(x), len(w), dtype=x.dtype)

    def mm(a: torch.Tensor, b: torch.Tensor, out_dtype: torch.dtype) -> torch.Tensor:
        return torch.empty(len(a), b.shape[1], dtype=out_dtype)

    monkeypatch.setattr(interpreter.GridExecutor, "__call__", lambda self, *args, **kwargs: None)
    monkeypatch.setattr(torch.nn.functional, "linear", linear)
    monkeypatch.setattr(torch, "mm", mm)


def packed(*shape: int) -> PackedWeight:
    data = torch.zeros(shape, dtype=torch.bfloat16)
    return PackedWeight("plain", shape, data, data.nbytes)


def declared(weight: PackedWeight) -> Any:
    *experts, rows, columns = weight.shape
    return SimpleNamespace(rows=rows, columns=columns, layout="plain", experts=experts[0] if experts else 0)


def attention(tuning: Tuning, tokens: int) -> tuple[dict[str, Any], AttentionWeights, Any, Any]:
    """Static parameters, weights, pages and metadata: of a prompt, or of as many requests as there are tokens."""
    provider = PagedState(tuning)
    tensors = tuple(StateTensor(name, (KV_HEADS, DIM), "bfloat16") for name in ("key", "value"))
    spec, how = StateSpec("full", tensors), AttentionSpec(HEADS, DIM, DIM**-0.5, dtype="bfloat16")
    requests = tokens if tokens <= 64 else 1
    each, ints = tokens // requests, torch.zeros(tokens + 1, dtype=torch.int32)
    step = StateStep(
        tokens=tokens, requests=requests, max_query=each, max_kv=512, query_start=ints[: requests + 1],
        kv_lens=ints[:requests], positions=ints[:-1], slot_mapping=ints[:-1],
        block_table=torch.zeros(requests, 16).int(), host_query_lens=[each] * requests, host_kv_lens=[512] * requests,
    )  # fmt: skip
    weights = AttentionWeights(
        torch.ones(HIDDEN).bfloat16(), packed((HEADS + 2 * KV_HEADS) * DIM, HIDDEN), packed(HIDDEN, HEADS * DIM),
        torch.zeros(512, DIM), post_norm=torch.ones(HIDDEN),
    )  # fmt: skip
    static = {
        **COMMON, "heads": HEADS, "kv_heads": KV_HEADS, "head_dim": DIM, "value_dim": DIM, "rotary_dim": DIM,
        "interleaved": False, "qk_norm": False, "post_norm": True, "query_scale": False, "qkv": declared(weights.qkv),
        "o": declared(weights.o), "state": SimpleNamespace(provider=provider, spec=spec, attention=how),
    }  # fmt: skip
    views = provider.bind(torch.zeros(1, spec.nbytes * 32, dtype=torch.uint8), spec, 32)
    return static, weights, views, provider.prepare(step, spec, how, 32)


def mlp() -> tuple[dict[str, Any], MLPWeights]:
    """Static parameters and weights."""
    weights = MLPWeights(torch.ones(HIDDEN), packed(2 * INNER, HIDDEN), packed(HIDDEN, INNER))
    static = {**COMMON, "inner": INNER, "activation": "silu", "post_norm": False,
              "gate_up": declared(weights.gate_up), "down": declared(weights.down)}  # fmt: skip
    return static, weights


def peak_and_workspace(kind: Any, tokens: int) -> tuple[int, int]:
    """Bytes that a call holds at its peak beside inputs and results, and those that the kernel names."""
    tuning = Tuning.of(GPU)
    x, stream = torch.zeros(tokens, HIDDEN, dtype=torch.bfloat16), torch.zeros(tokens, HIDDEN)
    positions = torch.zeros(tokens, dtype=torch.int32)
    inputs: tuple[Any, ...]
    if kind in (TritonNormQkvRotaryWrite, TritonAttentionBlock):
        static, w, views, meta = attention(tuning, tokens)
        inputs = (x, stream, positions, w, views, meta)
        if kind is TritonNormQkvRotaryWrite:
            inputs = (x, stream, positions, w.norm, w.qkv, None, None, None, w.cos_sin, views, meta)
    elif kind is TritonMlpBlock:
        static, given = mlp()
        inputs = (x, stream, given)
    elif kind is TritonDecoderLayer:
        first, w, views, meta = attention(tuning, tokens)
        second, given = mlp()
        inputs = (x, stream, positions, w, given, views, meta)
        static = {"hidden": HIDDEN, "dtype": "bfloat16", "attention": first, "mlp": second, "parallel": False}
    elif kind is TritonHead:
        weight = packed(VOCAB, HIDDEN)
        inputs = (stream, torch.ones(HIDDEN), weight, torch.zeros(VOCAB, dtype=torch.bfloat16))
        static = {**COMMON, "vocab": VOCAB, "cap": None, "weight": declared(weight)}
    else:
        moe = MoEWeights(
            norm=torch.ones(HIDDEN), router=packed(EXPERTS, HIDDEN), gate_up=packed(EXPERTS, 2 * SHARED, HIDDEN),
            down=packed(EXPERTS, HIDDEN, SHARED), slots=torch.zeros(EXPERTS, 1, dtype=torch.int32),
            copies=torch.ones(EXPERTS, dtype=torch.int32), shared_gate_up=packed(2 * SHARED, HIDDEN),
            shared_down=packed(HIDDEN, SHARED),
        )  # fmt: skip
        inputs = (x, stream, moe)
        static = {
            **COMMON, "experts": EXPERTS, "top": TOP, "groups": 1, "top_groups": 1, "group_best": 1, "scale": 1.0,
            "scoring": "softmax", "renormalize": True, "inner": SHARED, "activation": "silu", "alpha": 1.0,
            "limit": 0.0, "router_weight_on_input": False, "post_norm": False, "shared_inner": SHARED,
            "shared_gate": None,
            "gate_up": declared(moe.gate_up), "down": declared(moe.down),
            "shared_gate_up": declared(packed(2 * SHARED, HIDDEN)), "shared_down": declared(packed(HIDDEN, SHARED)),
        }  # fmt: skip
    return measured(kind(HostDevice(0), tuning), static, tokens, inputs)


def measured(kernel: Any, static: dict[str, Any], tokens: int, inputs: tuple[Any, ...]) -> tuple[int, int]:
    """As ``peak_and_workspace``, of a call with these inputs."""
    call = OpCall(kernel.op, static, Bucket(tokens, tokens), GPU)
    run = kernel.build(call)
    with torch.inference_mode():
        run(*inputs)  # counters that stay are made by the first call
        with Meter() as meter:
            made = run(*inputs)
    results = made if isinstance(made, tuple) else (made,)
    given = {t.data_ptr() for t in inputs if isinstance(t, torch.Tensor)}
    new = sum(t.nbytes for t in results if t.data_ptr() not in given)
    return meter.peak - new, kernel.workspace(call)


@pytest.mark.parametrize(
    ("kind", "tokens"),
    [
        pytest.param(kind, n, id=f"{kind.op}-{n}")
        for kind in KINDS
        for n in (1, 16, 64, 512)
        if n > 1 or kind is not TritonDecoderLayer  # one token's norm is in its product
    ],
)
def test_composite_workspace_covers_peak_memory_at_model_sizes(kind: Any, tokens: int) -> None:
    taken, named = peak_and_workspace(kind, tokens)
    assert taken <= named + (32 << 10), f"it takes {taken} bytes and names {named}"
    if tokens == 512:
        assert named <= 1.5 * taken + (4 << 20), f"it names {named} bytes and takes {taken}"


#: DeepSeek's widths, of all heads and of those of one rank in eight.
NOPE, ROPE, VALUE, RANK, Q_RANK = 128, 64, 128, 512, 1536


def latent(heads: int, q_rank: int, before: list[int], counts: list[int]) -> tuple[int, int]:
    """Bytes of a step over latents, whose requests have so many tokens and get so many more."""
    tuning, tokens, hidden = Tuning.of(GPU), sum(counts), 2048
    provider, pages = LatentState(tuning), 64
    spec = StateSpec("latent", (StateTensor("latent", (RANK,), "bfloat16"), StateTensor("rope", (ROPE,), "bfloat16")))
    how = AttentionSpec(heads, RANK + ROPE, (NOPE + ROPE) ** -0.5, dtype="bfloat16")
    lengths = [a + b for a, b in zip(before, counts, strict=True)]
    ints = torch.zeros(tokens + 1, dtype=torch.int32)
    step = StateStep(
        tokens=tokens, requests=len(counts), max_query=max(counts), max_kv=max(lengths),
        query_start=ints[: len(counts) + 1], kv_lens=ints[: len(counts)], positions=ints[:-1], slot_mapping=ints[:-1],
        block_table=torch.zeros(len(counts), pages).int(), host_query_lens=counts, host_kv_lens=lengths,
    )  # fmt: skip
    queries = heads * (NOPE + ROPE)
    down, o = packed((q_rank or queries) + RANK + ROPE, hidden), packed(hidden, heads * VALUE)
    q = packed(queries, q_rank) if q_rank else None
    w = LatentWeights(
        torch.ones(hidden), down, torch.ones(RANK), packed(heads * (NOPE + VALUE), RANK), o, torch.zeros(512, ROPE),
        q=q, q_norm=torch.ones(q_rank) if q_rank else None, heads=torch.zeros(heads * (NOPE + VALUE), RANK),
    )  # fmt: skip
    static = {
        "hidden": hidden, "dtype": "bfloat16", "eps": 1e-6, "offset": 0.0, "heads": heads, "nope_dim": NOPE,
        "rope_dim": ROPE, "value_dim": VALUE, "rank": RANK, "q_rank": q_rank or None, "interleaved": True,
        "down": declared(down), "o": declared(o), "q": declared(q) if q is not None else None,
        "state": SimpleNamespace(provider=provider, spec=spec, attention=how),
    }  # fmt: skip
    views = provider.bind(torch.zeros(1, spec.nbytes * 32, dtype=torch.uint8), spec, 32)
    meta = provider.prepare(step, spec, how, 32)
    x, stream = torch.zeros(tokens, hidden, dtype=torch.bfloat16), torch.zeros(tokens, hidden)
    kernel = TritonLatentAttentionBlock(HostDevice(0), tuning)
    return measured(kernel, static, tokens, (x, stream, ints[:-1], w, views, meta))


@pytest.mark.parametrize(
    ("before", "counts", "most"),
    [
        ([2047], [1], True),
        ([2047] * 4, [1] * 4, True),
        ([511] * 64, [1] * 64, True),
        ([100] * 2, [256] * 2, True),
        ([100, 0], [256, 256], False),  # one after the other
        ([0] * 2, [256] * 2, False),  # keys and values are less than queries in latent space
    ],
    ids=["one", "split", "batch", "chunks", "both", "prompts"],
)
@pytest.mark.parametrize(
    ("heads", "q_rank"),
    [(16, 0), *(pytest.param(*each, marks=pytest.mark.slow) for each in ((128, Q_RANK), (16, Q_RANK), (128, 0)))],
)
def test_latent_attention_workspace_covers_peak_memory(
    heads: int, q_rank: int, before: list[int], counts: list[int], most: bool
) -> None:
    taken, named = latent(heads, q_rank, before, counts)
    assert taken <= named + (32 << 10), f"it takes {taken} bytes and names {named}"
    if most:
        assert named <= 1.2 * taken + (64 << 10), f"it names {named} bytes and takes {taken}"


@pytest.mark.parametrize(("tokens", "top", "matrices"), [(1, 8, 128), (8192, 8, 128), (8192, 8, 16), (2000, 1, 16)])
def test_grouped_linear_workspace_covers_its_pair_lists(tokens: int, top: int, matrices: int) -> None:
    rows = columns = 32
    x, slots = torch.zeros(tokens, columns, dtype=torch.bfloat16), torch.zeros(tokens, top, dtype=torch.int32)
    weight = packed(matrices, rows, columns)
    static = {"weight": declared(weight), "experts": matrices, "rows": rows, "columns": columns, "dtype": "bfloat16"}
    taken, named = measured(TritonGroupedLinear(HostDevice(0), Tuning.of(GPU)), static, tokens, (x, weight, slots))
    assert taken <= named, f"it takes {taken} bytes and names {named}"
    if top > 1:
        assert named <= 1.05 * taken + (1 << 16), f"it names {named} bytes and takes {taken}"


@pytest.mark.parametrize("rows", [1, 32, 100])
def test_penalties_count_the_ids_of_a_few_rows_at_a_time(rows: int) -> None:
    vocab, ints, ones = 151936, torch.zeros(rows, dtype=torch.int32), torch.ones(rows)
    tokens = torch.zeros(rows + 1, 64, dtype=torch.int32)
    inputs = torch.zeros(rows, vocab), tokens, ints, ints, ints, 64, ones, ones, ones
    taken, named = measured(TritonPenalize(HostDevice(0), Tuning.of(GPU)), {"vocab": vocab}, rows, inputs)
    assert taken <= named <= 1.05 * taken <= 1.05 * 4 * 32 * vocab


@pytest.mark.parametrize("tokens", [8, 512])
def test_workspace_of_a_product_in_act_order_covers_the_copies_that_the_order_takes(tokens: int) -> None:
    part = random_part("uint4 by 64, act", 1024, HIDDEN, torch.Generator().manual_seed(3))
    matrix = PACKED.pack([part], "bfloat16", torch.device("cpu"))
    weight = LinearWeight("weight", (replace(part, tensors={}),), part.rows, HIDDEN, "bfloat16", layout=PACKED.layout)
    static = {"rows": part.rows, "columns": HIDDEN, "dtype": "bfloat16", "weight": weight}
    x = torch.zeros(tokens, HIDDEN, dtype=torch.bfloat16)
    peak, named = measured(StoredLinear(HostDevice(0), Tuning.of(GPU)), static, tokens, (x, matrix))
    assert 0 < peak <= named


ABLE = Tuning.of(replace(GPU, features=GPU.features | {"fp8", "scaled-rows"}))


def rounding(storage: str, rows: int, columns: int, experts: int = 0) -> tuple[PackedWeight, LinearWeight]:
    """A weight whose activations are rounded, and its declaration."""
    part = random_part(storage, rows, columns, torch.Generator().manual_seed(0))
    packed = STORED.pack_stack(([part] for _ in range(experts)), experts, "bfloat16", torch.device("cpu")) if experts \
        else STORED.pack([part], "bfloat16", torch.device("cpu"))  # fmt: skip
    bare = (replace(part, tensors={}),)
    return packed, LinearWeight("w", bare, rows, columns, "bfloat16", layout=STORED.layout, experts=experts)


@pytest.mark.parametrize("tokens", [32, *(pytest.param(t, marks=pytest.mark.slow) for t in (64, 512))])
@pytest.mark.parametrize("storage", ["e4m3 by block, x by 128", "e4m3 by row, x by token", "e4m3 by tensor, x fixed"])
@pytest.mark.parametrize("op", ["linear", "grouped_linear", "mlp_block", "moe_block"])
def test_workspace_covers_rounded_activations(op: str, storage: str, tokens: int) -> None:
    x, stream, gain = torch.zeros(tokens, HIDDEN, dtype=torch.bfloat16), torch.zeros(tokens, HIDDEN), torch.ones(HIDDEN)
    experts = 8 if op in ("grouped_linear", "moe_block") else 0
    up, of_up = rounding(storage, 2 * SHARED, HIDDEN, experts)
    down, of_down = rounding(storage, HIDDEN, SHARED, experts)
    static: dict[str, Any]
    inputs: tuple[Any, ...]
    kernel: Any
    if op == "linear":
        kernel, inputs = StoredLinear(HostDevice(0), ABLE), (x, up)
        static = {"weight": of_up, "rows": 2 * SHARED, "columns": HIDDEN, "dtype": "bfloat16", "out": "bfloat16"}
    elif op == "grouped_linear":
        kernel = TritonGroupedLinear(HostDevice(0), ABLE)
        inputs = (x, up, torch.zeros(tokens, TOP, dtype=torch.int32))
        static = {"weight": of_up, "experts": experts, "rows": 2 * SHARED, "columns": HIDDEN, "dtype": "bfloat16"}
    elif op == "mlp_block":
        kernel, inputs = TritonMlpBlock(HostDevice(0), ABLE), (x, stream, MLPWeights(gain, up, down))
        static = {**COMMON, "inner": SHARED, "activation": "silu", "post_norm": False, "gate_up": of_up,
                  "down": of_down}  # fmt: skip
    else:
        kernel = TritonMoeBlock(HostDevice(0), ABLE)
        moe = MoEWeights(
            norm=gain, router=packed(experts, HIDDEN), gate_up=up, down=down, copies=torch.ones(experts).int(),
            slots=torch.zeros(experts, 1, dtype=torch.int32),
        )  # fmt: skip
        inputs = (x, stream, moe)
        static = {
            **COMMON, "experts": experts, "top": TOP, "groups": 1, "top_groups": 1, "group_best": 1, "scale": 1.0,
            "scoring": "softmax", "renormalize": True, "inner": SHARED, "activation": "silu", "alpha": 1.0,
            "limit": 0.0, "router_weight_on_input": False, "post_norm": False, "shared_inner": 0,
            "shared_gate": None, "gate_up": of_up, "down": of_down,
        }  # fmt: skip
    taken, named = measured(kernel, static, tokens, inputs)
    assert taken <= named + (32 << 10), f"it takes {taken} bytes and names {named}"
    if tokens == 512:
        assert named <= 1.6 * taken + (1 << 20), f"it names {named} bytes and takes {taken}"
