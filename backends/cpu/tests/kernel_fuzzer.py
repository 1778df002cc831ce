"""Calls every kernel with random valid arguments, and with arguments in which something is wrong.

Run in a process that loaded AddressSanitizer first, over kernels that were built with it (see test_kernel_fuzz.py): a
read or write outside of a tensor then ends the process with a report. A wrong argument must be refused with an
exception; the few changes that harm nothing may also work. Prints the number of each case before it begins, so that
the last one printed is the one that failed::

    python kernel_fuzzer.py LIBRARY --first 17 --count 1
"""

from __future__ import annotations

import argparse
import random
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import torch
from test_cpu_experts import KINDS as EXPERT_KINDS
from test_cpu_experts import Block
from test_cpu_kernels import ATTENTIONS, GRANULARITIES, MIXED, MLPS, Model, blocks_of, stored_as

from evener.contracts.declared import LinearWeight
from evener.contracts.ops import Bucket, OpCall, OpFunction
from evener.contracts.quant import PackedWeight, WeightPart
from evener.contracts.state import AttentionSpec, StateSpec, StateStep, StateTensor
from evener.contracts.statics import ExpertsStatic, select
from evener.layers.decoder import AttentionConfig, MLPConfig
from evener.ops.reference.linear import PLAIN
from evener_backend_cpu.block_packing import KINDS
from evener_backend_cpu.device import CpuDevice
from evener_backend_cpu.experts import NativeGroupedLinear, NativeMixExperts, NativeRoutedExperts
from evener_backend_cpu.native_library import Native
from evener_backend_cpu.primitives import PRIMITIVES, NativeEmbedding
from evener_backend_cpu.screened_head import ScreenedGreedy
from evener_backend_cpu.state import PagedState

CPU = torch.device("cpu")
#: How a wrong argument is refused: by the checks of this backend, or by torch.
REFUSED = (ValueError, RuntimeError, IndexError)
_BLOCKS = sorted(set(KINDS) & {"q4_0", "q4_1", "q5_0", "q5_1", "q8_0"})
#: Wrong arguments that are tried after each valid call.
WRONG_EACH = 12

#: A call with its arguments; the first is valid, and makes new tensors each time.
Case = tuple[str, OpFunction, Callable[[], tuple[Any, ...]]]


class Cases:
    """Random calls of each kernel."""

    def __init__(self, device: CpuDevice, seed: int) -> None:
        self._device, self._rng = device, random.Random(seed)
        self._noise = torch.Generator().manual_seed(seed)
        device.threads = self._rng.choice((1, 2, 3))
        self._dtype = self._rng.choice(("float32", "bfloat16"))
        self._torch: torch.dtype = getattr(torch, self._dtype)

    def all(self) -> Iterator[Case]:
        yield self._linear()
        yield self._grouped()
        yield self._embedding()
        yield from self._rows()
        yield self._rotary()
        yield from self._sampling()
        yield from self._state()
        yield from self._layers()
        yield self._experts()
        yield self._routed()
        yield self._search()

    def _size(self, most: int) -> int:
        return self._rng.randint(1, self._rng.choice((1, 4, most)))

    def _draw(self, *shape: int, dtype: torch.dtype | None = None) -> torch.Tensor:
        return torch.randn(shape, generator=self._noise).to(dtype or self._torch)

    def _built(self, op: str, **static: Any) -> OpFunction:
        kinds = *PRIMITIVES, NativeGroupedLinear, NativeMixExperts
        kernel = next(kind(self._device) for kind in kinds if kind.op == op)
        call = OpCall(op, static, Bucket(1, 512), self._device.capabilities)
        assert kernel.supports(call) is None
        return kernel.build(call)

    def _packed(self, rows: int, columns: int, storage: str) -> PackedWeight:
        matrix = self._draw(rows, columns)
        form = stored_as(storage or self._dtype)
        part = WeightPart("w", rows, columns, form, {"weight": blocks_of(matrix, form)})
        return (self._device.blocks if storage else PLAIN).pack([part], self._dtype, CPU)

    def _linear(self) -> Case:
        storage = self._rng.choice(("", *_BLOCKS))
        columns = 32 * self._size(5) if storage else self._size(200)
        rows, tokens = self._size(130), self._size(70)
        weight, out = self._packed(rows, columns, storage), self._rng.choice((self._dtype, "float32"))
        run = self._built("linear", rows=rows, columns=columns, dtype=self._dtype, out=out)
        bias = self._draw(rows) if self._rng.random() < 0.5 else None
        return f"linear {storage}", run, lambda: (self._draw(tokens, columns), weight, bias)

    def _grouped(self) -> Case:
        experts, rows, columns = self._size(7), self._size(90), self._size(100)
        tokens, top = self._size(40), self._rng.randint(1, experts)
        matrices = [[WeightPart("w", rows, columns, stored_as(self._dtype), {"weight": self._draw(rows, columns)})]]
        weight = PLAIN.pack_stack(matrices * experts, experts, self._dtype, CPU)
        run = self._built("grouped_linear", experts=experts, rows=rows, columns=columns, dtype=self._dtype)
        bias = self._draw(experts, rows) if self._rng.random() < 0.5 else None

        def make() -> tuple[Any, ...]:
            slots = torch.randint(-1, experts, (tokens, top), generator=self._noise, dtype=torch.int32)
            return self._draw(tokens, columns), weight, slots, bias

        return "grouped_linear", run, make

    def _embedding(self) -> Case:
        storage, rows, columns, tokens = self._rng.choice(_BLOCKS), self._size(130), 32 * self._size(5), self._size(70)
        table = self._packed(rows, columns, storage)
        part = WeightPart("w", rows, columns, stored_as(storage))
        weight = LinearWeight("w", (part,), rows, columns, self._dtype, layout=table.layout)
        static = {"vocab": rows, "hidden": columns, "dtype": self._dtype, "scale": 1.5, "weight": weight}
        kernel = NativeEmbedding(self._device)
        call = OpCall("embedding", static, Bucket(1, 512), self._device.capabilities, {"weight": table.layout})
        assert kernel.supports(call) is None
        wide = self._rng.choice((torch.int32, torch.int64))
        return f"embedding {storage}", kernel.build(call), lambda: (
            torch.randint(0, rows, (tokens,), generator=self._noise, dtype=wide), table)  # fmt: skip

    def _rows(self) -> Iterator[Case]:
        tokens, width = self._size(60), self._size(150)
        static = {"hidden": width, "dtype": self._dtype, "eps": 1e-5, "offset": 0.0}
        weight = self._draw(width)
        yield "rms_norm", self._built("rms_norm", **static), lambda: (self._draw(tokens, width), weight)
        yield "add_rms_norm", self._built("add_rms_norm", **static), lambda: (
            self._draw(tokens, width), self._draw(tokens, width, dtype=torch.float32), weight)  # fmt: skip
        act = self._built("act_and_mul", inner=width, activation=self._rng.choice(("silu", "gelu", "gelu_tanh")),
                          dtype=self._dtype, alpha=1.0, limit=0.0)  # fmt: skip
        yield "act_and_mul", act, lambda: (self._draw(tokens, 2 * width),)
        mix, top = self._built("mix_experts", hidden=width, dtype=self._dtype), self._rng.randint(1, 9)
        yield "mix_experts", mix, lambda: (self._draw(tokens, top, width), self._draw(tokens, top, dtype=torch.float32))

    def _rotary(self) -> Case:
        size, heads, kv_heads = 2 * self._size(40), self._size(5), self._size(3)
        dim, tokens, length = 2 * self._rng.randint(0, size // 2), self._size(50), self._size(99)
        run = self._built(
            "rotary", head_dim=size, rotary_dim=dim, interleaved=self._rng.random() < 0.5, dtype=self._dtype
        )
        wide = self._rng.choice((torch.int32, torch.int64))

        def make() -> tuple[Any, ...]:
            positions = torch.randint(0, length, (tokens,), generator=self._noise, dtype=wide)
            return (positions, self._draw(tokens, heads, size), self._draw(tokens, kv_heads, size),
                    self._draw(length, dim, dtype=torch.float32))  # fmt: skip

        return "rotary", run, make

    def _sampling(self) -> Iterator[Case]:
        rows, vocab = self._size(9), self._size(500)
        strange = self._rng.choice((1.0, 1.0, float("nan"), float("inf"), float("-inf"), 1e38))

        def logits() -> torch.Tensor:
            made = self._draw(rows, vocab)
            made[:, self._rng.randrange(vocab)] *= strange
            return made

        def parameters() -> tuple[Any, ...]:
            floats = [torch.rand(rows, generator=self._noise) for _ in range(3)]
            ints = [torch.randint(0, 2 * vocab, (rows,), generator=self._noise, dtype=torch.int32) for _ in range(3)]
            return logits(), floats[0], ints[0], floats[1], floats[2], ints[1], ints[2]

        yield "greedy", self._built("greedy", vocab=vocab), lambda: (logits(),)
        yield "sample", self._built("sample", vocab=vocab, filters=True), parameters
        yield (
            "apply_mask",
            self._built("apply_mask", vocab=vocab),
            lambda: (
                logits(),
                torch.randint(-(2**31), 2**31, (rows, -(-vocab // 32)), generator=self._noise, dtype=torch.int32),
            ),
        )

    def _step(self, block: int, blocks: int, room: int) -> StateStep:
        """Any mix of lengths, at most ``room`` tokens for each of up to four requests."""
        now = [self._size(min(40, room)) for _ in range(self._rng.randint(1, 4))]
        before = [self._rng.randint(0, room - n) for n in now]
        columns = -(-room // block)
        table = torch.randint(0, blocks, (len(now), columns), generator=self._noise, dtype=torch.int32)
        places = [torch.arange(b, b + n) for b, n in zip(before, now, strict=True)]
        slots = torch.cat([table[r, at // block] * block + at % block for r, at in enumerate(places)])
        lengths = [b + n for b, n in zip(before, now, strict=True)]
        return StateStep(
            tokens=sum(now), requests=len(now), max_query=max(now), max_kv=max(lengths),
            query_start=torch.tensor([0, *torch.tensor(now).cumsum(0)], dtype=torch.int32),
            kv_lens=torch.tensor(lengths, dtype=torch.int32), positions=torch.cat(places),
            slot_mapping=slots.to(self._rng.choice((torch.int32, torch.int64))), block_table=table,
            host_query_lens=now, host_kv_lens=lengths,
        )  # fmt: skip

    def _state(self) -> Iterator[Case]:
        kv_heads, group = self._size(3), self._size(5)
        d, dv, block = 16 * self._size(6), 16 * self._size(6), self._rng.choice((16, 32, 64))
        kind = self._rng.choice(("full", "window", "chunk"))
        window = None if kind == "full" else self._size(300)
        spec = StateSpec(kind, (StateTensor("key", (kv_heads, d), self._dtype),
                                StateTensor("value", (kv_heads, dv), self._dtype)), window=window)  # fmt: skip
        attention = AttentionSpec(kv_heads * group, d, d**-0.5, dtype=self._dtype, sinks=self._rng.random() < 0.3)
        state, blocks = PagedState(self._device), self._rng.randint(1, 20)
        assert state.supports(spec, attention, self._device.capabilities) is None
        pages = torch.zeros(blocks, state.bytes_per_block(spec, block), dtype=torch.uint8)
        step = self._step(block, blocks, self._rng.choice((16, 90, 700)))
        sinks = self._draw(attention.heads) if attention.sinks else None

        def run(pages: torch.Tensor, step: StateStep, key: Any, value: Any, query: Any, sinks: Any) -> torch.Tensor:
            views, meta = state.bind(pages, spec, block), state.prepare(step, spec, attention, block)
            state.write(views, meta, key, value)
            return state.attend(views, meta, query, sinks)

        yield f"state {kind}", run, lambda: (
            pages, step, self._draw(step.tokens, kv_heads, d), self._draw(step.tokens, kv_heads, dv),
            self._draw(step.tokens, attention.heads, d), sinks)  # fmt: skip

    def _layers(self) -> Iterator[Case]:
        family = self._rng.choice(sorted(ATTENTIONS))
        storages = MIXED if family == "plain" and self._rng.random() < 0.5 else ()
        for granularity in sorted(GRANULARITIES):
            model = Model(
                self._device, self._dtype, AttentionConfig(**ATTENTIONS[family]), MLPConfig(**MLPS[family]),
                GRANULARITIES[granularity], True, storages=storages,
            )  # fmt: skip
            layer, slot, step = model.layers[0], model.builder.slots[0], self._step(16, 30, 120)

            def run(x: Any, residual: Any, positions: Any, attention: Any, mlp: Any, step: StateStep,
                    layer: Any = layer, slot: Any = slot, state: Any = model.state) -> Any:  # fmt: skip
                meta = state.prepare(step, slot.spec, slot.attention, 16)
                return layer.sites[0].table[0](x, residual, positions, attention, mlp, layer.slot.views, meta)

            def make(layer: Any = layer, step: StateStep = step) -> tuple[Any, ...]:
                residual = self._draw(step.tokens, 96, dtype=torch.float32) if self._rng.random() < 0.7 else None
                return (self._draw(step.tokens, 96), residual, step.positions, layer.attention.values,
                        layer.mlp.values, step)  # fmt: skip

            yield f"{family} by {granularity}", run, make

    def _experts(self) -> Case:
        kind = self._rng.choice(sorted(EXPERT_KINDS))
        block = Block(self._device, EXPERT_KINDS[kind], self._dtype, self._rng.choice(("", "q8_0")))
        tokens = self._size(60)
        return f"experts {kind}", block.run, lambda: (*block.inputs(tokens), block.own)

    def _routed(self) -> Case:
        kind = self._rng.choice(sorted(EXPERT_KINDS))
        block = Block(self._device, EXPERT_KINDS[kind], self._dtype, self._rng.choice(("", "q8_0")))
        static, tokens = {**select(block.static, ExpertsStatic), "placement": None}, self._size(60)
        layouts = {name: getattr(block.own, name).layout for name in ("gate_up", "down")}
        kernel = NativeRoutedExperts(self._device)
        call = OpCall("routed_experts", static, Bucket(1, 512), self._device.capabilities, layouts)
        assert kernel.supports(call) is None
        shape = tokens, static["top"]

        def make() -> tuple[Any, ...]:
            ids = torch.randint(0, static["experts"], shape, generator=self._noise, dtype=torch.int32)
            return block.inputs(tokens)[0], ids, self._draw(*shape, dtype=torch.float32), block.own

        run, into = kernel.build(call), self._rng.random() < 0.5

        def run_into(x: Any, ids: Any, weights: Any, own: Any) -> Any:
            return run(x, ids, weights, own, out=torch.empty_like(x), rows=max(0, len(x) - 1))

        return f"routed_experts {kind}", run_into if into else run, make

    def _search(self) -> Case:
        rows, columns = self._size(3000), 64 * self._size(5)
        matrix = self._draw(rows, columns, dtype=torch.bfloat16)
        part = WeightPart("w", rows, columns, stored_as("bfloat16"), {"weight": matrix})
        weight = self._device.screened.pack([part], "bfloat16", CPU)
        kind, norms = self._rng.choice((("rms", 1), ("layer", 1), ("biased_layer", 2), ("bare_layer", 0)))
        cap, factor = self._rng.choice(((None, 1.0), (30.0, 1.0), (None, 0.3)))
        static = {
            "vocab": rows, "hidden": columns, "dtype": "bfloat16", "eps": 1e-5, "offset": 0.0, "norm": kind, "cap": cap,
            "logit_scale": factor, "communicator": None,
            "weight": LinearWeight("w", (part,), rows, columns, "bfloat16", out="float32"),
        }  # fmt: skip
        call = OpCall("vocab_greedy", static, Bucket(1, 1), self._device.capabilities)
        run = ScreenedGreedy(self._device).build(call)
        bias = self._draw(rows, dtype=torch.bfloat16) if self._rng.random() < 0.3 else None
        strange = self._rng.choice((1.0, 1.0, 0.0, float("nan"), float("inf"), 1e38))

        def make() -> tuple[Any, ...]:
            x, norm = (self._draw(*shape, dtype=torch.float32) for shape in ((1, columns), (norms * columns,)))
            return x * strange, norm if norms else None, weight, bias

        return "vocab_greedy", run, make


class Breaker:
    """Makes one thing wrong somewhere in a call's arguments."""

    def __init__(self, rng: random.Random) -> None:
        self._rng = rng

    def broken(self, arguments: tuple[Any, ...]) -> tuple[Any, ...]:
        """The arguments, with one tensor in them, or in a record or step among them, replaced."""
        places = [i for i, each in enumerate(arguments) if self._tensors(each)]
        at = self._rng.choice(places)
        return (*arguments[:at], self._replaced(arguments[at]), *arguments[at + 1 :])

    def _tensors(self, value: Any) -> bool:
        return isinstance(value, torch.Tensor | PackedWeight | StateStep) or hasattr(value, "_fields")

    def _replaced(self, value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            return self._tensor(value)
        if isinstance(value, PackedWeight):
            if isinstance(value.data, torch.Tensor) and self._rng.random() < 0.5:
                return replace(value, data=self._tensor(value.data))
            axis = self._rng.randrange(len(value.shape))
            shape = list(value.shape)
            shape[axis] = max(0, shape[axis] + self._rng.choice((-1, 1, 16, 100_000)))
            return replace(value, shape=tuple(shape))
        if isinstance(value, StateStep):
            names = [f.name for f in fields(value) if isinstance(getattr(value, f.name), torch.Tensor | int)]
            name = self._rng.choice(names)
            own = getattr(value, name)
            changed = self._tensor(own) if isinstance(own, torch.Tensor) else own + self._rng.choice((-1, 1, 1000))
            changes: dict[str, Any] = {name: changed}
            return replace(value, **changes)
        names = [name for name in value._fields if self._tensors(getattr(value, name))]
        name = self._rng.choice(names)
        return value._replace(**{name: self._replaced(getattr(value, name))})

    def _tensor(self, tensor: torch.Tensor) -> torch.Tensor:
        how = self._rng.randrange(6)
        if how == 0 and tensor.numel():  # shorter
            axis = self._rng.randrange(tensor.dim())
            return tensor.narrow(axis, 0, tensor.shape[axis] - 1).clone()
        if how == 1:  # longer
            axis = self._rng.randrange(tensor.dim())
            return torch.cat((tensor, tensor.narrow(axis, 0, min(1, tensor.shape[axis]))), dim=axis)
        if how == 2:
            kinds = (torch.float32, torch.bfloat16, torch.float64, torch.int32, torch.int64, torch.uint8)
            return tensor.to(self._rng.choice([kind for kind in kinds if kind is not tensor.dtype]))
        if how == 3 and tensor.dim() == 2:
            return tensor.t()
        if how == 4:
            return tensor.repeat_interleave(2, dim=-1)[..., ::2]  # the same numbers, two apart
        if tensor.dtype in (torch.int32, torch.int64) and tensor.numel():
            wrong = tensor.clone()
            limit = torch.iinfo(tensor.dtype)
            worst = self._rng.choice((-1, -2, limit.min, limit.max, 1 << 20, int(tensor.max()) + 1))
            wrong.view(-1)[self._rng.randrange(wrong.numel())] = worst
            return wrong
        return tensor[:0]


def fuzz(device: CpuDevice, number: int, outcomes: Counter[str]) -> None:
    """Every kernel once with valid arguments, and then with wrong ones."""
    rng = random.Random(f"wrong {number}")
    for name, run, make in Cases(device, number).all():
        print(f"case {number}: {name}", flush=True)
        run(*make())
        outcomes["valid"] += 1
        for _ in range(WRONG_EACH):
            broken = Breaker(rng).broken(make())
            try:
                run(*broken)
                outcomes["harmless"] += 1
            except REFUSED as error:
                assert str(error), "a refusal says why"
                outcomes["refused"] += 1


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("library", type=Path)
    parser.add_argument("--outside", action="store_true", help="read outside of a tensor, which must be reported")
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--count", type=int, default=20)
    given = parser.parse_args()
    torch.set_num_threads(1)
    device = CpuDevice(0, {"huge_pages": "off"})
    device._native = native = Native(given.library)
    if given.outside:  # no check can know that 100 numbers are fewer than the caller says
        logits, ids = torch.zeros(100), torch.zeros(1, dtype=torch.int32)
        native.function("greedy", "float32")(logits.data_ptr(), 1, 101, ids.data_ptr())
        return 0
    outcomes: Counter[str] = Counter()
    for number in range(given.first, given.first + given.count):
        fuzz(device, number, outcomes)
    print(f"done: {dict(outcomes)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
