"""A block of experts as one call: against its expansion over reference ops, plain and in blocks, in any company."""

from __future__ import annotations

import ctypes
import gc
import threading
import time
import weakref
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import gguf
import pytest
import torch

from evener.contracts.declared import LinearWeight, StackedWeight, Table
from evener.contracts.ops import Bucket, OpCall, OpFunction
from evener.contracts.quant import WeightPart, block_format, plain
from evener.contracts.statics import ExpertsStatic, select
from evener.contracts.weights import MoEWeights
from evener.layers.builder import Builder
from evener.layers.experts import MoEConfig
from evener.layers.norms import norm_common
from evener.ops.parts import load_reference
from evener.ops.reference.linear import PLAIN
from evener.ops.schemas import BUILTIN
from evener_backend_cpu.device import CpuDevice
from evener_backend_cpu.experts import NativeGroupedLinear, NativeMoeBlock, NativeRoutedExperts
from evener_conformance.kit.ops import forbid_nested_ops

SCHEMAS = {schema.name: schema for schema in BUILTIN}
HIDDEN, CPU = 96, torch.device("cpu")
LIBC = ctypes.CDLL(None)
CLOSE = {"float32": 1e-4, "bfloat16": 2e-2}
KINDS = {
    "softmax": MoEConfig(experts=16, top=4, inner=64),
    "grouped sigmoid": MoEConfig(
        experts=12, top=3, inner=96, scoring="sigmoid", correction="correction", groups=4, top_groups=2, group_best=2,
        scale=2.5, shared_inner=64, shared_gate="gate", post_norm="post", activation="gelu_tanh",
    ),
    "biased pairs": MoEConfig(
        experts=5, top=5, inner=32, scoring="softmax_top", renormalize=False, bias=True, activation="clamped_swiglu",
        alpha=1.702, limit=7.0,
    ),
    "shared": MoEConfig(experts=6, top=1, inner=32, renormalize=False, shared_inner=160),
}  # fmt: skip


class Block:
    """A declared block with weights, in this backend's packings and as plain float32 numbers."""

    def __init__(self, device: CpuDevice, config: MoEConfig, dtype: str, storage: str = "") -> None:
        self.device, self.dtype, build = device, dtype, Builder(dtype, 64)
        common = norm_common(build, HIDDEN, 1e-5, 0.0, "rms")
        group, self.static = config.declare(build, "layer", common)
        noise, layouts = torch.Generator().manual_seed(7), {}
        own: dict[str, Any] = {}
        wide: dict[str, Any] = {}
        for name, weight in group.fields.items():
            if isinstance(weight, LinearWeight):
                blocks = bool(storage) and name not in ("router", "shared_gate")
                own[name], wide[name] = self._linear(weight, noise, storage if blocks else "")
                layouts[name] = own[name].layout
            elif isinstance(weight, Table):
                own[name] = wide[name] = weight.make(CPU)
            elif weight is not None:
                made = torch.randn(weight.shape, generator=noise) * 0.3 + (weight.dummy == "ones")
                own[name] = made.to(getattr(torch, weight.dtype))
                wide[name] = own[name].float()
        self.own, self.wide = MoEWeights(**own), MoEWeights(**wide)
        call = OpCall("moe_block", self.static, Bucket(1, 1024), device.capabilities, layouts)
        kernel = NativeMoeBlock(device)
        assert kernel.supports(call) is None and kernel.workspace(call) > 0
        self.run = kernel.build(call)

    def _linear(self, weight: LinearWeight, noise: torch.Generator, storage: str) -> tuple[Any, Any]:
        matrices, values = [], []
        for _ in range(max(1, weight.experts)):
            parts = [
                replace(p, tensors={"weight": torch.randn(p.rows, p.columns, generator=noise) * p.columns**-0.5})
                for p in weight.parts
            ]
            parts = [stored(p, storage or self.dtype) for p in parts]
            matrices.append(parts)
            values.append([replace(p, format=plain("float32"), tensors={"weight": numbers(p)}) for p in parts])
        packing = self.device.blocks if storage else PLAIN
        if isinstance(weight, StackedWeight):
            count = weight.experts
            return (
                packing.pack_stack(matrices, count, self.dtype, CPU),
                PLAIN.pack_stack(values, count, "float32", CPU),
            )
        return packing.pack(matrices[0], self.dtype, CPU), PLAIN.pack(values[0], "float32", CPU)

    def inputs(self, tokens: int, alike: bool = False) -> tuple[torch.Tensor, torch.Tensor]:
        """``alike``: all go to the same experts."""
        noise = torch.Generator().manual_seed(tokens)
        x, stream = torch.randn(tokens, HIDDEN, generator=noise), torch.randn(tokens, HIDDEN, generator=noise)
        if alike:
            stream = stream[:1].expand(tokens, -1).clone() + 1e-3 * stream
            x = x[:1].expand(tokens, -1).clone()
        return x.to(getattr(torch, self.dtype)), stream

    def native(self, x: torch.Tensor, stream: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        y, sums = self.run(x.clone(), stream.clone(), self.own)
        return y, sums

    def expected(self, x: torch.Tensor, stream: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        def use(op: str, /, **static: Any) -> OpFunction:
            inner = use if SCHEMAS[op].composite else forbid_nested_ops
            run: OpFunction = load_reference(SCHEMAS[op])({**static, "dtype": "float32", "out": "float32"}, inner)
            if op != "add_rms_norm":
                return run

            def rounded(*inputs: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
                # The router sees what the kernel's does: other rounding would choose other experts.
                y, sums = run(*inputs)
                return y.to(getattr(torch, self.dtype)).float(), sums

            return rounded

        y, sums = load_reference(SCHEMAS["moe_block"])(self.static, use)(x.float(), stream.clone(), self.wide)
        return y, sums


def stored(part: WeightPart, storage: str) -> WeightPart:
    values = part.tensors["weight"]
    if storage in CLOSE:
        return replace(part, format=plain(storage), tensors={"weight": values.to(getattr(torch, storage))})
    kind = gguf.GGMLQuantizationType[storage.upper()]
    blocks = torch.from_numpy(gguf.quants.quantize(values.numpy(), kind))
    return replace(part, format=block_format(storage), tensors={"weight": blocks})


def numbers(part: WeightPart) -> torch.Tensor:
    if part.format.plain:
        return part.tensors["weight"].float()
    kind = gguf.GGMLQuantizationType[part.format.storage.upper()]
    return torch.from_numpy(gguf.quants.dequantize(part.tensors["weight"].numpy(), kind))


def check(block: Block, x: torch.Tensor, stream: torch.Tensor) -> None:
    (got, sums), (want, total) = block.native(x, stream), block.expected(x, stream)
    assert got.dtype == x.dtype
    torch.testing.assert_close(sums, total, rtol=1e-6, atol=1e-6)
    worst = float((got.float() - want).abs().max() / want.abs().max())
    assert worst < CLOSE[block.dtype], worst


@pytest.mark.parametrize("dtype", list(CLOSE))
@pytest.mark.parametrize(
    "storage", ["", pytest.param("q8_0", marks=pytest.mark.slow), "q4_1"], ids=["plain", "q8_0", "q4_1"]
)
@pytest.mark.parametrize("kind", list(KINDS))
def test_the_moe_block_matches_its_expansion(device: CpuDevice, kind: str, storage: str, dtype: str) -> None:
    block = Block(device, KINDS[kind], dtype, storage)
    for tokens in (1, 3, 5, 40):
        check(block, *block.inputs(tokens))


def test_unbalanced_expert_load_and_more_tokens_than_a_panel(device: CpuDevice) -> None:
    block = Block(device, KINDS["softmax"], "float32")
    check(block, *block.inputs(300, alike=True))
    check(block, *block.inputs(1100))


@pytest.mark.parametrize("storage", ["", "q4_1"], ids=["plain", "q4_1"])
@pytest.mark.parametrize("dtype", list(CLOSE))
def test_experts_are_bitwise_invariant_to_batch_and_thread_count(device: CpuDevice, dtype: str, storage: str) -> None:
    block = Block(device, KINDS["grouped sigmoid"], dtype, storage)
    x, stream = block.inputs(600)
    whole, before = block.native(x, stream)[0], device.threads
    try:
        for threads in (1, 2, 3):
            device.limit_threads(threads)
            for count in (1, 4, 5, 170, 600):
                assert torch.equal(block.native(x[:count], stream[:count])[0], whole[:count]), (threads, count)
    finally:
        device.limit_threads(before)


def test_weights_that_are_refused_leave_nothing_for_those_before_them(device: CpuDevice) -> None:
    # Half of them was kept: the next call read behind the end of the slots of the weights that were there before.
    block = Block(device, KINDS["softmax"], "float32")
    x, stream = block.inputs(3)
    want = block.run(x.clone(), stream.clone(), block.own)
    with pytest.raises(ValueError, match="slots"):
        block.run(x.clone(), stream.clone(), block.own._replace(slots=block.own.slots.t()))
    found = block.run(x.clone(), stream.clone(), block.own)
    assert all(map(torch.equal, found, want))


def test_experts_are_found_through_the_slot_map_and_remote_ones_add_nothing(device: CpuDevice) -> None:
    block = Block(device, KINDS["softmax"], "float32")
    experts = 16
    order = torch.randperm(experts, generator=torch.Generator().manual_seed(1)).int()
    apart = torch.stack((order, order.roll(1)), 1)
    gone = apart.clone()
    gone[::3] = -1
    for slots, copies in (
        (order[:, None].contiguous(), torch.ones(experts, dtype=torch.int32)),
        (apart, torch.full((experts,), 2, dtype=torch.int32)),
        (gone, (gone[:, 0] >= 0).int()),
    ):
        block.own, block.wide = (w._replace(slots=slots, copies=copies) for w in (block.own, block.wide))
        for tokens in (2, 31):
            check(block, *block.inputs(tokens))


@pytest.mark.parametrize("dtype", list(CLOSE))
@pytest.mark.parametrize("storage", ["", "q8_0"], ids=["plain", "q8_0"])
@pytest.mark.parametrize("kind", ["softmax", "biased pairs"])
def test_routed_experts_match_their_expansion_and_are_invariant_to_batch_and_threads(
    device: CpuDevice, kind: str, storage: str, dtype: str
) -> None:
    block = Block(device, KINDS[kind], dtype, storage)
    static = {**select(block.static, ExpertsStatic), "placement": None}
    layouts = {name: getattr(block.own, name).layout for name in ("gate_up", "down")}
    kernel = NativeRoutedExperts(device)
    call = OpCall("routed_experts", static, Bucket(1, 1024), device.capabilities, layouts)
    assert kernel.supports(call) is None and kernel.workspace(call) > 0
    run, experts, noise = kernel.build(call), static["experts"], torch.Generator().manual_seed(3)
    slots = torch.randperm(experts, generator=noise).int()[:, None].repeat(1, 2)
    slots[1] = -1
    copies = torch.full((experts,), 2, dtype=torch.int32)
    copies[1] = 0
    own, wide = (w._replace(slots=slots, copies=copies) for w in (block.own, block.wide))

    def use(op: str, /, **more: Any) -> OpFunction:
        inner = use if SCHEMAS[op].composite else forbid_nested_ops
        found: OpFunction = load_reference(SCHEMAS[op])({**more, "dtype": "float32", "out": "float32"}, inner)
        return found

    want_of = load_reference(SCHEMAS["routed_experts"])({**static, "dtype": "float32"}, use)
    before = device.threads
    try:
        for tokens in (1, 5, 530):
            x = torch.randn(tokens, HIDDEN, generator=noise).to(getattr(torch, dtype))
            ids = torch.rand(tokens, experts, generator=noise).argsort()[:, : static["top"]].int()
            weights = torch.rand(tokens, static["top"], generator=noise)
            want, got = want_of(x.float(), ids, weights, wide), run(x, ids, weights, own)
            assert float((got.float() - want).abs().max() / want.abs().max().clamp(min=1e-6)) < CLOSE[dtype]
            for threads in (1, 3):
                device.limit_threads(threads)
                assert torch.equal(run(x, ids, weights, own), got)
            if tokens > 2:
                assert torch.equal(run(x[:2], ids[:2], weights[:2], own), got[:2])
            out = torch.full_like(x, torch.nan)
            for rows in (tokens - 1, tokens):
                assert run(x, ids, weights, own, out=out, rows=rows) is out
                assert torch.equal(out[:rows], got[:rows]) and bool(out[rows:].isnan().all())
            word, out = torch.zeros(1, dtype=torch.int32), torch.full_like(x, torch.nan)
            for threads, told in ((1, None), (3, word)):
                end = run.begin(x, ids, weights, own, out.fill_(torch.nan), threads, told)
                assert end() > 0 and torch.equal(out, got)
            assert word.item() == 1
    finally:
        device.limit_threads(before)
    with pytest.raises(ValueError, match="experts' ids"):
        run(x, ids + experts, weights, own)
    for into in (None, out):
        with pytest.raises(ValueError, match="531 rows of 530"):
            run(x, ids, weights, own, out=into, rows=531)
    with pytest.raises(ValueError, match="the result"):
        run(x, ids, weights, own, out=out[1:])
    end = run.begin(x, ids + experts, weights, own, out, 1, word.zero_())
    with pytest.raises(ValueError, match="a call that nobody waited for"):
        run.begin(x, ids, weights, own, out, 1)
    with pytest.raises(ValueError, match="experts' ids"):
        end()
    assert word.item() == 1, "also after an error"
    with pytest.raises(ValueError, match="the thread has no call"):
        end()
    with pytest.raises(ValueError, match="the result"):
        run.begin(x, ids, weights, own, out[1:], 1)


def test_a_thread_ends_with_its_device_also_in_the_middle_of_a_call() -> None:
    device = CpuDevice(0, {})
    block = Block(device, KINDS["softmax"], "float32")
    static = {**select(block.static, ExpertsStatic), "placement": None}
    layouts = {name: getattr(block.own, name).layout for name in ("gate_up", "down")}
    run: Any = NativeRoutedExperts(device).build(
        OpCall("routed_experts", static, Bucket(1, 64), device.capabilities, layouts)
    )
    x, ids = torch.ones(64, HIDDEN), torch.arange(64 * 4, dtype=torch.int32).view(64, 4) % 16
    word, out = torch.zeros(1, dtype=torch.int32), torch.empty_like(x)
    run.begin(x, ids, torch.ones(64, 4), block.own, out, 1, word)
    ended = weakref.ref(device.aside)
    device._aside = None
    gc.collect()
    assert ended() is None and word.item() == 1


class Asking:
    """A device that asks for rows of several calls, one after another."""

    def __init__(self, calls: int) -> None:
        self._words = torch.zeros(calls, 2, 16, dtype=torch.int32)
        self.words = [(ready.data_ptr(), done.data_ptr()) for ready, done in self._words]
        for ready, _ in self.words:
            LIBC.pthread_spin_init(ctypes.c_void_p(ready), 0)
            LIBC.pthread_spin_lock(ctypes.c_void_p(ready))

    def ask(self, call: int) -> None:
        """Ask, and wait for the answer."""
        LIBC.pthread_spin_unlock(ctypes.c_void_p(self.words[call][0]))
        end, done = time.monotonic() + 60, self._words[call, 1, 0]
        while not done.item():
            assert time.monotonic() < end, "nobody answers"
        done.zero_()


def routed(block: Block) -> Any:
    """``routed_experts`` with the weights of a block."""
    layouts = {name: getattr(block.own, name).layout for name in ("gate_up", "down")}
    static = {**select(block.static, ExpertsStatic), "placement": None}
    call = OpCall("routed_experts", static, Bucket(1, 64), block.device.capabilities, layouts)
    return NativeRoutedExperts(block.device).build(call)


class Answering:
    """A thread that answers a step once; what it returned, or raised."""

    def __init__(self, answer: Any, rows: int | None) -> None:
        self.state, self.found, self.error = (ctypes.c_int64 * 2)(), (0, 0), ""
        self._thread = threading.Thread(target=self._run, args=(answer, rows))
        self._thread.start()

    def _run(self, answer: Any, rows: int | None) -> None:
        try:
            self.found = answer(rows, 2, ctypes.addressof(self.state))
        except Exception as error:
            self.error = f"{type(error).__name__}: {error}"

    def join(self) -> None:
        self._thread.join(60)
        assert not self._thread.is_alive() and self.state[0] == 0


@pytest.mark.parametrize("storage", ["", "q8_0"], ids=["plain", "q8_0"])
def test_one_call_answers_a_device_that_asks_for_several_layers(device: CpuDevice, storage: str) -> None:
    """Again and again, with all rows and without the last ones."""
    block, noise = Block(device, KINDS["softmax"], "bfloat16", storage), torch.Generator().manual_seed(3)
    asking = Asking(3)
    experts, top = block.static["experts"], block.static["top"]
    owns = [block.own._replace(slots=block.own.slots.roll(n, 0)) for n in range(3)]
    x, out = torch.randn(5, HIDDEN, generator=noise).bfloat16(), torch.zeros(5, HIDDEN).bfloat16()
    ids, weights = torch.zeros(5, top, dtype=torch.int32), torch.rand(5, top, generator=noise)
    runs = [routed(block) for _ in owns]
    answer = runs[0].answers([run.asked(x, ids, weights, own, out, 10**n, *words) for n, (run, own, words)
                              in enumerate(zip(runs, owns, asking.words, strict=True))])  # fmt: skip
    for rows in (None, 3, 5):
        answering, read = Answering(answer, rows), 0
        for n, own in enumerate(owns):
            ids.copy_(torch.rand(5, experts, generator=noise).argsort()[:, :top])
            read += 10**n * len(ids[:rows].unique())
            want = routed(block)(x[:rows], ids[:rows], weights[:rows], own)
            out.fill_(torch.nan)
            asking.ask(n)
            assert torch.equal(out[:rows], want) and bool(out[rows or 5 :].isnan().all())
        answering.join()
        assert answering.found[0] > 0 and answering.found[1] == read


def test_a_device_is_answered_also_if_a_call_is_refused(device: CpuDevice) -> None:
    """By the library, or because of its weights: nothing is computed from there on."""
    block, run = (made := Block(device, KINDS["softmax"], "float32")), routed(made)
    x, out = torch.ones(2, HIDDEN), torch.zeros(2, HIDDEN)
    ids, weights = torch.zeros(2, block.static["top"], dtype=torch.int32), torch.ones(2, block.static["top"])

    def refused() -> None:
        raise ValueError("other weights")

    for what in ("experts' ids", "other weights", "3 rows of 2"):
        asking = Asking(2)
        ids.fill_(99 if what == "experts' ids" else 0)
        asked = [run.asked(x, ids, weights, block.own, out, 1, *words) for words in asking.words]
        if what == "other weights":
            asked[1] = replace(asked[1], none=refused)
        answering = Answering(run.answers(asked), 3 if what == "3 rows of 2" else None)
        asking.ask(0)
        ids.zero_()
        asking.ask(1)
        answering.join()
        assert answering.error.startswith("ValueError") and what in answering.error and not out.any()


def test_a_thread_that_waits_for_a_device_ends_if_it_is_told_so(device: CpuDevice) -> None:
    block, run = (made := Block(device, KINDS["softmax"], "float32")), routed(made)
    x, out, asking = torch.ones(1, HIDDEN), torch.zeros(1, HIDDEN), Asking(1)
    ids, weights = torch.zeros(1, block.static["top"], dtype=torch.int32), torch.ones(1, block.static["top"])
    answering = Answering(run.answers([run.asked(x, ids, weights, block.own, out, 1, *asking.words[0])]), None)
    while answering.state[0] != asking.words[0][0]:
        time.sleep(0.001)
    answering.state[1] = 1
    LIBC.pthread_spin_unlock(ctypes.c_void_p(answering.state[0]))
    answering.join()
    assert not out.any() and answering.found == (0, 0)


def _stack(device: CpuDevice, storage: str, dtype: str) -> tuple[Any, torch.Tensor]:
    noise, experts, rows, columns = torch.Generator().manual_seed(5), 7, (33, 16), 512
    matrices = []
    for _ in range(experts):
        made = [torch.randn(n, columns, generator=noise) for n in rows]
        matrices.append(
            [stored(WeightPart("p", len(m), columns, plain("float32"), {"weight": m}), storage) for m in made]
        )
    packed = device.blocks.pack_stack(matrices, experts, dtype, CPU)
    return packed, torch.stack([torch.cat([numbers(p) for p in parts]) for parts in matrices])


@pytest.mark.parametrize("dtype", list(CLOSE))
@pytest.mark.parametrize("storage", ["q8_0", "q5_1", "q4_0"])
def test_a_quantized_expert_stack_matches_its_dequantized_product(device: CpuDevice, storage: str, dtype: str) -> None:
    packed, values = _stack(device, storage, dtype)
    static: Mapping[str, Any] = {"experts": 7, "rows": 49, "columns": 512, "dtype": dtype}
    kernel = NativeGroupedLinear(device)
    call = OpCall("grouped_linear", static, Bucket(1, 64), device.capabilities, {"weight": packed.layout})
    assert kernel.supports(call) is None and packed.layout in {p.layout for p in kernel.packings}
    noise = torch.Generator().manual_seed(6)
    for tokens in (1, 50):
        x = torch.randn(tokens, 512, generator=noise).to(getattr(torch, dtype))
        slots = torch.randint(-1, 7, (tokens, 3), generator=noise, dtype=torch.int32)
        got = kernel.build(call)(x, packed, slots).float()
        want = torch.einsum("tc,tkrc->tkr", x.float(), values[slots.clamp(min=0).long()]) * (slots >= 0)[..., None]
        assert float((got - want).abs().max() / want.abs().max().clamp(min=1e-6)) < CLOSE[dtype]


def test_refusals_name_the_reason(device: CpuDevice) -> None:
    build = Builder("float32", 8)
    common = norm_common(build, 32, 1e-5, 0.0, "rms")
    _, static = MoEConfig(experts=2, top=1, inner=32).declare(build, "layer", common)
    for change, reason in (
        ({"activation": "relu"}, "relu"), ({"scoring": "sinkhorn"}, "sinkhorn"),
        ({"router_weight_on_input": True}, "inputs"), ({"dtype": "float16"}, "not float16"),
    ):  # fmt: skip
        call = OpCall("moe_block", {**static, **change}, Bucket(1, 1), device.capabilities)
        refusal = NativeMoeBlock(device).supports(call)
        assert refusal is not None and reason in refusal
