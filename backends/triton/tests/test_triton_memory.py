"""What composites take on a GPU, counted on the host at a model's widths: nothing is launched, as numbers do not
matter, and every kernel gets the sizes that it has on a GPU with 132 units."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
import triton.runtime.interpreter as interpreter
from test_memory_measured import Meter

from evener.contracts.device import DeviceCapabilities
from evener.contracts.ops import Bucket, OpCall
from evener.contracts.quant import PackedWeight
from evener.contracts.state import AttentionSpec, StateSpec, StateStep, StateTensor
from evener.ops.composites import AttentionWeights, MLPWeights
from evener.ops.expert_composites import MoEWeights
from evener.testing.reference_device import HostDevice
from evener_kernels_triton.composites import TritonAttentionBlock, TritonHead, TritonMlpBlock, TritonNormQkvRotaryWrite
from evener_kernels_triton.experts import TritonMoeBlock
from evener_kernels_triton.state import PagedState
from evener_kernels_triton.tuning import Tuning

GPU = DeviceCapabilities(
    dtypes=frozenset({"float32", "bfloat16"}), features=frozenset({"units:132", "shared:232448", "overlap"})
)
HIDDEN, HEADS, KV_HEADS, DIM, INNER, VOCAB, EXPERTS, TOP, SHARED = 1024, 16, 4, 128, 2816, 20000, 32, 4, 512
COMMON: dict[str, Any] = {"hidden": HIDDEN, "dtype": "bfloat16", "eps": 1e-6, "offset": 0.0}
KINDS = (TritonNormQkvRotaryWrite, TritonAttentionBlock, TritonMlpBlock, TritonHead, TritonMoeBlock)


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
    return SimpleNamespace(rows=rows, columns=columns, experts=experts[0] if experts else 0)


def attention(tuning: Tuning, tokens: int) -> tuple[dict[str, Any], AttentionWeights, Any, Any]:
    """Static parameters, weights, pages and metadata: of a prompt, or of as many requests as there are tokens."""
    provider = PagedState(tuning)
    tensors = tuple(StateTensor(name, (KV_HEADS, DIM), "bfloat16") for name in ("key", "value"))
    spec, how = StateSpec("full", tensors), AttentionSpec(HEADS, DIM, DIM**-0.5, dtype="bfloat16")
    requests = tokens if tokens <= 64 else 1
    each, ints = tokens // requests, torch.zeros(tokens, dtype=torch.int32)
    step = StateStep(
        tokens=tokens, requests=requests, max_query=each, max_kv=512, query_start=ints[: requests + 1],
        kv_lens=ints[:requests], positions=ints, slot_mapping=ints, block_table=torch.zeros(requests, 16).int(),
        host_query_lens=[each] * requests, host_kv_lens=[512] * requests,
    )  # fmt: skip
    weights = AttentionWeights(
        torch.ones(HIDDEN), packed((HEADS + 2 * KV_HEADS) * DIM, HIDDEN), packed(HIDDEN, HEADS * DIM),
        torch.zeros(512, DIM), post_norm=torch.ones(HIDDEN),
    )  # fmt: skip
    static = {
        **COMMON, "heads": HEADS, "kv_heads": KV_HEADS, "head_dim": DIM, "value_dim": DIM, "rotary_dim": DIM,
        "interleaved": False, "qk_norm": False, "post_norm": True, "query_scale": False, "qkv": declared(weights.qkv),
        "o": declared(weights.o), "state": SimpleNamespace(provider=provider, spec=spec, attention=how),
    }  # fmt: skip
    views = provider.bind(torch.zeros(1, spec.nbytes * 32, dtype=torch.uint8), spec, 32)
    return static, weights, views, provider.prepare(step, spec, how, 32)


def taken_and_named(kind: Any, tokens: int) -> tuple[int, int]:
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
        mlp = MLPWeights(torch.ones(HIDDEN), packed(2 * INNER, HIDDEN), packed(HIDDEN, INNER))
        inputs = (x, stream, mlp)
        static = {**COMMON, "inner": INNER, "activation": "silu", "post_norm": False,
                  "gate_up": declared(mlp.gate_up), "down": declared(mlp.down)}  # fmt: skip
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
            "limit": 0.0, "weigh_input": False, "post_norm": False, "shared_inner": SHARED, "shared_gate": None,
            "gate_up": declared(moe.gate_up), "down": declared(moe.down),
            "shared_gate_up": declared(packed(2 * SHARED, HIDDEN)), "shared_down": declared(packed(HIDDEN, SHARED)),
        }  # fmt: skip
    kernel = kind(HostDevice(0), tuning)
    call = OpCall(kernel.op, static, Bucket(tokens, tokens), GPU)
    run = kernel.build(call)
    with torch.inference_mode():
        run(*inputs)  # counters that stay are made by the first call
        with Meter() as meter:
            made = run(*inputs)
    results = made if isinstance(made, tuple) else (made,)
    new = sum(t.nbytes for t in results if t.data_ptr() != stream.data_ptr())
    return meter.peak - new, kernel.workspace(call)


@pytest.mark.parametrize("tokens", [1, 16, 64, 512])
@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.op)
def test_a_composite_names_what_it_takes_at_a_models_widths(kind: Any, tokens: int) -> None:
    taken, named = taken_and_named(kind, tokens)
    assert taken <= named + (32 << 10), f"it takes {taken} bytes and names {named}"
    if tokens == 512:
        assert named <= 1.5 * taken + (4 << 20), f"it names {named} bytes and takes {taken}"
