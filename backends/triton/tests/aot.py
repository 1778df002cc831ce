"""Compiles every kernel ahead of time, as it would be launched, for targets that this machine does not have.

    python aot.py [--one] TARGET...        cuda:90, hip:gfx942, …; --one: one launch a kernel
    python aot.py --list TARGET            nothing is compiled: the launches, as JSON, for another compiler

Launches are recorded over meta tensors, so no device is needed. Prints one JSON object: target → {kernel: error}.
"""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.experimental.gluon._runtime import GluonASTSource
from triton.runtime.jit import JITFunction

from evener.contracts.device import DeviceCapabilities
from evener.contracts.ops import Bucket, OpCall
from evener.contracts.quant import Rounding
from evener.contracts.state import AttentionSpec, StateSpec, StateStep, StateTensor
from evener.layers.decoder import AttentionConfig, MLPConfig
from evener.layers.experts import MoEConfig
from evener.layers.latent import LatentConfig
from evener.layers.rotary import RotaryConfig
from evener.ops.schemas import BUILTIN
from evener_conformance.kit.composites import TinyModel
from evener_conformance.kit.families import Family, families
from evener_conformance.reference.device import HostDevice
from evener_kernels_triton.blocks import FORMS, PackedForm
from evener_kernels_triton.experts import grouped, scores, sort
from evener_kernels_triton.linear import dequantized, dequantized_linear, few_tokens_linear, gemv, skinny
from evener_kernels_triton.packed import PackedMatrix, Segment
from evener_kernels_triton.packed_experts import ExpertAssignment, packed_grouped
from evener_kernels_triton.packed_linear import packed_linear
from evener_kernels_triton.packed_token import packed_token
from evener_kernels_triton.plugin import evener_kernels, evener_state_providers
from evener_kernels_triton.primitives import act_rows
from evener_kernels_triton.rounded import activated_product, round_rows, rounded_linear
from evener_kernels_triton.rounded_experts import rounded_grouped
from evener_kernels_triton.rounded_few import activated_sizes
from evener_kernels_triton.rounded_values import round_values
from evener_kernels_triton.sampling import choose, sample_filtered
from evener_kernels_triton.stored import Form, StoredMatrix
from evener_kernels_triton.tuning import MAX_OWN_TOKENS_STORED, Tuning

META = torch.device("meta")
#: Of the kit's families with latent state, those whose blocks these kernels compute.
LATENT = ("latent", "latent queries")
TYPES = {
    torch.float32: "fp32", torch.float16: "fp16", torch.bfloat16: "bf16", torch.int32: "i32", torch.int64: "i64",
    torch.uint8: "u8", torch.int8: "i8", torch.int16: "i16", torch.float8_e4m3fn: "fp8e4nv",
}  # fmt: skip
#: What such a device says of itself: units, shared memory, bfloat16, and what else it can.
FACTS: dict[str, tuple[int, int, bool, tuple[str, ...]]] = {
    "cuda:75": (40, 64 << 10, False, ()), "cuda:80": (108, 163 << 10, True, ("ptx", "int8")),
    "cuda:90": (132, 227 << 10, True, ("overlap", "ptx", "fp8", "int8", "warpgroups")),
    "cuda:100": (148, 227 << 10, True, ("overlap", "ptx", "fp8", "int8")), "hip": (104, 64 << 10, True, ()),
    "npu": (24, 192 << 10, True, ()),
}  # fmt: skip


class Recorder:
    """Stands for a launch; ``seen`` has one entry for each different one."""

    def __init__(self) -> None:
        self.seen: dict[str, tuple[Any, dict[str, str], dict[Any, Any], dict[str, Any]]] = {}

    def __call__(self, function: Any, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> None:
        names = [p.name for p in function.params]
        values = dict(zip(names, args, strict=False)) | {k: v for k, v in kwargs.items() if k in names}
        options = {k: v for k, v in kwargs.items() if k not in names}
        signature, constants, aligned = {}, {}, {}
        for index, p in enumerate(function.params):
            value = values[p.name]
            if p.is_constexpr:
                signature[p.name], constants[(index,)] = "constexpr", value
            elif isinstance(value, torch.Tensor):
                signature[p.name], aligned[(index,)] = "*" + TYPES[value.dtype], [["tt.divisibility", 16]]
            elif hasattr(value, "block_shape"):
                box = ", ".join(map(str, value.block_shape))
                signature[p.name] = f"tensordesc<{TYPES[value.base.dtype]}[{box}],{value.layout!r}>"
            elif isinstance(value, float):
                signature[p.name] = "fp32"
            else:
                signature[p.name] = "i32" if abs(value) < 1 << 31 else "i64"
                if value % 16 == 0:
                    aligned[(index,)] = [["tt.divisibility", 16]]
        key = json.dumps([function.__name__, signature, str(constants), sorted(options.items())])
        self.seen[key] = (function, signature, constants, options | {"attrs": aligned})


def record(target: str) -> Recorder:
    """Every launch of tiny models of all kinds and of the sizes of a large one."""
    units, memory, bf16, more = FACTS.get(target, FACTS["hip"])
    features = {f"units:{units}", f"shared:{memory}", *more}
    device = HostDevice(0)
    dtypes = {"float32", "float16"} | ({"bfloat16"} if bf16 else set())
    device.capabilities = DeviceCapabilities(dtypes=frozenset(dtypes), features=frozenset(features))
    device.torch_device = META
    recorder = Recorder()
    JITFunction.run = lambda self, *a, **k: recorder(self, *a, **k)
    kernels, states = evener_kernels(device, {}), evener_state_providers(device, {})
    dtype = "bfloat16" if bf16 else "float16"
    large = Family("large", AttentionConfig(heads=32, kv_heads=8, head_dim=128, rotary=RotaryConfig(128), qk_norm=True),
                   MLPConfig(inner=192))  # fmt: skip
    many = Family("many experts", large.attention, MoEConfig(experts=128, top=8, inner=768))
    shared = Family("shared experts", large.attention, MoEConfig(experts=64, top=6, inner=1408, shared_inner=2816))
    noise, wide = torch.randn(64, 96), torch.randn(64, 256)
    small = [family for family in families() if family.hidden == noise.shape[1]]
    served = [f for f in small if f.calls("attention_block") or f.calls("moe_block") or f.name in LATENT]
    stored = [
        replace(family, name=f"{family.name}, {storage}", storage=storage, hidden=256)
        for family, storage in (
            (large, "e4m3 by row"),
            (many, "e4m3 by block"),
            (large, "e4m3 by row, x by token"),
            (many, "e4m3 by block, x by 128"),
        )
    ]
    for family in (large, many, shared, *stored, *_large_latent(states[1], device, dtype), *served):
        latent = isinstance(family.attention, LatentConfig)
        model = TinyModel(device, dtype, family, kernels, states[latent], BUILTIN)
        with torch.inference_mode():
            for counts, before in (((1, 1), (3, 9)), ((1,), (5,)), ((33, 30), (0, 0))):
                model.step((wide if family.storage else noise)[: sum(counts)], before, counts)
    tuning = Tuning.of(device.capabilities)
    for tokens in (1, 4, 16, 64):
        for rows, columns in ((6144, 4096), (24576, 4096), (4096, 12288), (1024, 3072)):
            x = torch.empty(tokens, columns, dtype=getattr(torch, dtype), device=META)
            w = torch.empty(rows, columns, dtype=getattr(torch, dtype), device=META)
            few_tokens_linear(tuning, x.dtype, x, w)
            if tokens == 1:
                gemv(tuning, x, w, x.dtype, activation="silu")
    _experts(tuning, getattr(torch, dtype))
    _stored(tuning, getattr(torch, dtype))
    _rounded(tuning, getattr(torch, dtype))
    _packed(tuning, getattr(torch, dtype))
    logits = torch.empty(4, 151936, device=META)
    ints = torch.empty(4, dtype=torch.int32, device=META)
    choose(tuning, logits)
    floats = torch.empty(4, device=META)
    choose(tuning, logits, floats, ints, ints)
    sample_filtered(logits, floats, ints, floats, floats, ints, ints)
    act_rows(tuning, torch.empty(4, 96, dtype=getattr(torch, dtype), device=META), 48, "gelu")
    _long_step(states[0], device, getattr(torch, dtype), dtype)
    _long_prompts(states[0], device, getattr(torch, dtype), dtype)
    _captured_steps(states[0], device, getattr(torch, dtype), dtype)
    _latent_steps(states[1], device, getattr(torch, dtype), dtype)
    for kernel in kernels:
        of_logits = kernel.op in ("apply_mask", "add_bias", "penalize", "logprobs")
        static = {"scale": 3.0, "cap": 5.0, "vocab": 151936, "hidden": 96, "eps": 1e-5, "offset": 0.0}
        static["dtype"] = "float32" if of_logits else dtype
        call = OpCall(kernel.op, static, Bucket(1, 4), device.capabilities)
        rows = torch.empty(4, 96, dtype=getattr(torch, dtype), device=META)
        static |= {"head_dim": 64, "rotary_dim": 64, "interleaved": False}
        if kernel.op == "add_adapters":  # in others, a name may be that of another size
            static |= {"columns": 96, "rows": 160, "parts": (96, 64), "slots": 4, "rank": 16, "inner": 32}
        down, up = (torch.empty(4, *size, dtype=rows.dtype, device=META) for size in ((32, 96), (160, 16)))
        table = torch.empty(151936, 96, dtype=rows.dtype, device=META)
        heads = torch.empty(4, 6, 64, dtype=getattr(torch, dtype), device=META)
        packed = torch.empty(4, 4748, dtype=torch.int32, device=META)
        biases, tokens = (torch.empty(4, n, dtype=torch.int32, device=META) for n in (1024, 4097))
        inputs = {
            "rotary": (ints, heads, heads, torch.empty(9, 64, device=META)), "embedding": (ints, table),
            "take_rows": (rows, ints.long()), "softcap": (rows,), "apply_mask": (logits, packed),
            "layer_norm": (rows, rows[0], rows[1]),
            "add_adapters": (torch.empty(4, 160, dtype=rows.dtype, device=META), rows, down, up, ints),
            "add_bias": (logits, biases, biases.float(), biases, ints),
            "penalize": (logits, tokens, ints, ints, ints, 4096, floats, floats, floats),
            "logprobs": (logits, ints, 5),
        }  # fmt: skip
        if kernel.op in inputs:
            kernel.build(call)(*inputs[kernel.op])
    return recorder


def _experts(tuning: Tuning, kind: torch.dtype) -> None:
    """The products of a large model's experts, from a few tokens to many."""
    for gate_up_weight, down_weight in (((128, 1536, 2048), (128, 2048, 768)), ((64, 2816, 2048), (64, 2048, 1408))):
        for tokens in (2, 16, 64, 256, 1024, 8192):
            slots = torch.empty(tokens, 8, dtype=torch.int32, device=META)
            x = torch.empty(tokens, gate_up_weight[2], dtype=kind, device=META)
            scores(tuning, x, torch.empty(gate_up_weight[0], gate_up_weight[2], dtype=kind, device=META))
            work = sort(tuning, slots, gate_up_weight[0], tokens)
            inside = torch.empty(slots.numel(), down_weight[2], dtype=kind, device=META)
            grouped(
                tuning,
                x,
                torch.empty(gate_up_weight, dtype=kind, device=META),
                inside,
                work,
                share=True,
                activation="silu",
            )
            down_output = torch.empty(slots.numel(), down_weight[1], dtype=kind, device=META)
            grouped(tuning, inside, torch.empty(down_weight, dtype=kind, device=META), down_output, work, share=False)


def _stored(tuning: Tuning, kind: torch.dtype) -> None:
    """Products with weights of one byte an element, of large models."""
    for name, high, wide in (("e4m3", 128, 128), ("e5m2", 1, 0), ("int8", 1, 0)):
        element, form = torch.int8 if name == "int8" else torch.uint8, Form(name, high, wide)

        def matrix(*shape: int, element: torch.dtype = element, form: Form = form) -> StoredMatrix:
            blocks = -(-shape[-1] // form.wide) if form.wide else 1
            scales = torch.empty(*shape[:-2], -(-shape[-2] // form.high), blocks, device=META)
            return StoredMatrix(torch.empty(shape, dtype=element, device=META), scales, form)

        for tokens in (1, 64, 256, 1024):
            product = few_tokens_linear if tokens <= MAX_OWN_TOKENS_STORED else dequantized_linear
            product(tuning, kind, torch.empty(tokens, 12288, dtype=kind, device=META), matrix(4096, 12288))
        for tokens, product in ((1, gemv), (16, skinny)):
            product(
                tuning, torch.empty(tokens, 4096, dtype=kind, device=META), matrix(24576, 4096), kind, activation="silu"
            )
        for tokens in (2, 1024):
            slots = torch.empty(tokens, 8, dtype=torch.int32, device=META)
            x = torch.empty(tokens, 2048, dtype=kind, device=META)
            inside = torch.empty(slots.numel(), 768, dtype=kind, device=META)
            work = sort(tuning, slots, 128, tokens)
            grouped(tuning, x, matrix(128, 1536, 2048), inside, work, share=True, activation="silu")
            grouped(tuning, inside, matrix(128, 2048, 768), torch.empty(slots.numel(), 2048, device=META), work,
                    share=False)  # fmt: skip


def _rounded(tuning: Tuning, kind: torch.dtype) -> None:
    """Products of rounded activations, of large models, where the device has any."""
    kinds = [*([("e4m3", 128, 128, 128), ("e4m3", 1, 0, 0)] if tuning.float8 else []),
             *([("int8", 1, 0, -1)] if tuning.integers else [])]  # fmt: skip
    for name, high, wide, group in kinds:
        form, rounding = Form(name, high, wide), Rounding("int8" if name == "int8" else "float8_e4m3fn", group)

        def matrix(*shape: int, form: Form = form, how: Rounding = rounding) -> StoredMatrix:
            blocks = -(-shape[-1] // form.wide) if form.wide else 1
            scales = torch.empty(*shape[:-2], -(-shape[-2] // form.high), blocks, device=META)
            elements = torch.empty(shape, dtype=torch.int8 if form.kind == "int8" else torch.uint8, device=META)
            return StoredMatrix(elements, scales, form, how, torch.empty(1, device=META) if how.group < 0 else None)

        for tokens in (16, 64, 128, 1024):
            rounded_linear(tuning, kind, torch.empty(tokens, 12288, dtype=kind, device=META), matrix(4096, 12288))
            inside = activated_sizes(tuning, tokens, 24576, 4096, form, group)
            if inside is not None:
                rows = round_rows(tuning, torch.empty(tokens, 4096, dtype=kind, device=META), matrix(24576, 4096))
                activated_product(tuning, inside, rows, matrix(24576, 4096), "silu")
        for tokens in (32, 4096):
            slots = torch.empty(tokens, 8, dtype=torch.int32, device=META)
            inside = torch.empty(slots.numel(), 768, dtype=kind, device=META)
            work = sort(tuning, slots, 128, tokens)
            x = torch.empty(tokens, 2048, dtype=kind, device=META)
            rounded_grouped(tuning, x, matrix(128, 1536, 2048), inside, work, share=True, activation="silu")
            y = torch.empty(slots.numel(), 2048, dtype=kind, device=META)
            rounded_grouped(tuning, inside, matrix(128, 2048, 768), y, work, share=False)


#: GGUF's legacy and k-quants, with scales of their own and inside of blocks; and MXFP4. NVFP4 and NF4 are no blocks.
_COMPILED_FORMS = ("q4_0", "q4_k", "q6_k", "float4_e2m1")


def _packed(tuning: Tuning, kind: torch.dtype) -> None:
    """Products with packed weights of one form of each kind, of a large model's sizes: compiling one takes seconds."""
    forms = {"uint4, zeros": PackedForm("q4", "zero", 128), **{name: FORMS[name] for name in _COMPILED_FORMS}}
    forms |= {"nvfp4": PackedForm("e2m1", "e4m3", 16), "nf4": PackedForm("table", "float", 64)}
    for name, form in forms.items():
        for tokens in (1, 64):
            x = torch.empty(tokens, 4096, dtype=kind, device=META)
            few_tokens_linear(tuning, kind, x, _matrix(form, 4096, 4096))
        dequantized(tuning, _matrix(form, 4096, 4096), kind)
        if name == "uint4, zeros":
            _rounded_values(tuning, kind, form)
        if name in ("q4_k", "nvfp4", "nf4", "float4_e2m1") and kind.itemsize == 2:
            _one_token(tuning, kind, form)
        for tokens in (4, 64) if name in ("q4_k", "nvfp4", "nf4") else ():
            slots = torch.empty(tokens, 8, dtype=torch.int32, device=META)
            x = torch.empty(tokens, 2048, dtype=kind, device=META)
            inside = torch.empty(tokens * 8, 768, dtype=kind, device=META)
            work = sort(tuning, slots, 128, tokens) if tokens > 16 else ExpertAssignment(slots, None, None)
            grouped(tuning, x, _matrix(form, 128, 1536, 2048), inside, work, share=True, activation="silu")
            y = torch.empty(tokens * 8, 2048, dtype=kind, device=META)
            grouped(tuning, inside, _matrix(form, 128, 2048, 768), y, work, share=False)


def _one_token(tuning: Tuning, kind: torch.dtype, form: PackedForm) -> None:
    """One token with a norm and an activation."""
    x, gain = torch.empty(1, 2048, dtype=kind, device=META), torch.empty(2048, dtype=kind, device=META)
    total = torch.empty(1, 2048, device=META)
    packed_token(tuning, kind, x, _matrix(form, 3072, 2048), activation="silu", residual=total, total=total, gain=gain)


def _rounded_values(tuning: Tuning, kind: torch.dtype, form: PackedForm) -> None:
    """Products of rounded activations with packed weights."""
    for storage in ("int8", "float8_e4m3fn"):
        x, factors = round_values(tuning, torch.empty(1, 4096, dtype=kind, device=META), Rounding(storage))
    packed_linear(tuning, kind, x, _matrix(form, 4096, 4096), factors=factors)
    slots = torch.empty(1, 8, dtype=torch.int32, device=META)
    packed_grouped(
        tuning, x, _matrix(form, 128, 1536, 4096), torch.empty(8, 768, dtype=kind, device=META),
        ExpertAssignment(slots, None, None), share=True, activation="silu", factors=factors,
    )  # fmt: skip


def _matrix(form: PackedForm, *shape: int) -> PackedMatrix:
    *count, rows, columns = shape
    spans = form.spans(columns)

    def room(*more: int, dtype: torch.dtype) -> torch.Tensor:
        return torch.empty(*count, spans, rows, *more, dtype=dtype, device=META)

    low, scales = room(form.low, dtype=torch.int16), room(form.words, dtype=torch.int32)
    high = room(form.high, dtype=form.high_dtype) if form.high else low
    held, dtype = form.tops(rows, columns) or ((), torch.int32)
    tops = torch.empty(*count, *held, dtype=dtype, device=META) if held else scales
    return PackedMatrix(shape, (Segment(0, rows, columns, form, low, high, scales, tops),))


def _large_latent(provider: Any, device: HostDevice, dtype: str) -> tuple[Family, ...]:
    """Few heads whose queries are made directly, and many that have a rank; none where they are refused."""
    sizes: dict[str, Any] = {"nope_dim": 128, "rope_dim": 64, "value_dim": 128, "rank": 512}
    rotary = RotaryConfig(64, interleaved=True)
    return tuple(
        Family(f"{heads} latent heads", LatentConfig(heads=heads, q_rank=q_rank, rotary=rotary, **sizes),
               MLPConfig(inner=192))
        for heads, q_rank in ((16, None), (128, 1536)) if _latent_spec(provider, device, heads, dtype, dtype)
    )  # fmt: skip


def _latent_spec(
    provider: Any, device: HostDevice, heads: int, dtype: str, stored: str
) -> tuple[StateSpec, AttentionSpec] | None:
    """Latent state of a large model; None if it is refused, which only a lack of shared memory may explain."""
    spec = StateSpec("latent", (StateTensor("latent", (512,), stored), StateTensor("rope", (64,), stored)))
    attention = AttentionSpec(heads, 576, 192**-0.5, dtype=dtype)
    reason = provider.supports(spec, attention, device.capabilities)
    assert reason is None or "shared memory" in reason, reason
    return (spec, attention) if reason is None else None


def _latent_steps(provider: Any, device: HostDevice, kind: torch.dtype, dtype: str) -> None:
    """Plain writes and reads of latent state, of the compute type and of a narrow one where there is one."""
    for stored in (dtype, *(["float8_e4m3fn"] if "fp8" in device.capabilities.features else [])):
        for heads, count in ((16, 1), (128, 1), (16, 40)):
            found = _latent_spec(provider, device, heads, dtype, stored)
            if found is None:
                continue
            spec, attention = found
            storage = torch.empty(9, provider.bytes_per_block(spec, 32), dtype=torch.uint8, device=META)
            views = provider.bind(storage, spec, 32)
            ints = torch.empty(2 * count + 1, dtype=torch.int32, device=META)
            table = torch.empty(2, 128, dtype=torch.int32, device=META)
            counts, lengths = (count, count), (4096, 4096)
            step = StateStep(2 * count, 2, count, 4096, ints, ints[:2], ints, ints, table, counts, lengths)
            meta = provider.prepare(step, spec, attention, 32)
            rows = torch.empty(2 * count, 576, dtype=kind, device=META)
            provider.write(views, meta, rows[:, :512], rows[:, 512:])
            provider.attend(views, meta, torch.empty(2 * count, heads, 576, dtype=kind, device=META))


def _long_step(provider: Any, device: HostDevice, kind: torch.dtype, dtype: str) -> None:
    """A decode step over so many keys that they are split, and a plain write."""
    shape = (8, 128)
    spec = StateSpec("full", (StateTensor("key", shape, dtype), StateTensor("value", shape, dtype)))
    attention = AttentionSpec(32, 128, 128**-0.5, dtype=dtype)
    views = provider.bind(torch.empty(9, provider.bytes_per_block(spec, 32), dtype=torch.uint8, device=META), spec, 32)
    ints = torch.empty(3, dtype=torch.int32, device=META)
    table = torch.empty(2, 128, dtype=torch.int32, device=META)
    step = StateStep(2, 2, 1, 4096, ints, ints[:2], ints[:2], ints[:2], table, (1, 1), (4096, 4096))
    meta = provider.prepare(step, spec, attention, 32)
    rows = torch.empty(2, *shape, dtype=kind, device=META)
    provider.write(views, meta, rows, rows)
    provider.attend(views, meta, torch.empty(2, 32, 128, dtype=kind, device=META))


def _long_prompts(provider: Any, device: HostDevice, kind: torch.dtype, dtype: str) -> None:
    """Prompts of 2,048 tokens beside a request that decodes, heads of three lengths, whole and in windows."""
    ints = torch.empty(4098, dtype=torch.int32, device=META)
    counts, lengths = (1, 2048, 2048), (4096, 4096, 2048)
    table = torch.empty(3, 128, dtype=torch.int32, device=META)
    step = StateStep(4097, 3, 2048, 4096, ints[:4], ints[:3], ints[:4097], ints[:4097], table, counts, lengths)
    for heads, kv_heads, d, window in ((32, 8, 128, None), (8, 4, 256, None), (8, 4, 256, 1024), (32, 8, 64, 1024)):
        tensors = tuple(StateTensor(name, (kv_heads, d), dtype) for name in ("key", "value"))
        spec = StateSpec("window" if window else "full", tensors, window=window)
        storage = torch.empty(9, provider.bytes_per_block(spec, 32), dtype=torch.uint8, device=META)
        meta = provider.prepare(step, spec, AttentionSpec(heads, d, d**-0.5, dtype=dtype), 32)
        provider.attend(provider.bind(storage, spec, 32), meta, torch.empty(4097, heads, d, dtype=kind, device=META))


def _captured_steps(provider: Any, device: HostDevice, kind: torch.dtype, dtype: str) -> None:
    """A captured decode step of states that may be long, heads of three lengths, whole and in windows."""
    ints = torch.empty(3, dtype=torch.int32, device=META)
    table = torch.empty(2, 512, dtype=torch.int32, device=META)
    step = StateStep(2, 2, 1, 16384, ints, ints[:2], ints[:2], ints[:2], table, (1, 1), (16384, 16384), captured=True)
    for heads, kv_heads, d, window in ((32, 8, 128, None), (8, 4, 256, None), (8, 4, 256, 1024), (32, 8, 64, None)):
        tensors = tuple(StateTensor(name, (kv_heads, d), dtype) for name in ("key", "value"))
        spec = StateSpec("window" if window else "full", tensors, window=window)
        storage = torch.empty(9, provider.bytes_per_block(spec, 32), dtype=torch.uint8, device=META)
        meta = provider.prepare(step, spec, AttentionSpec(heads, d, d**-0.5, dtype=dtype), 32)
        provider.attend(provider.bind(storage, spec, 32), meta, torch.empty(2, heads, d, dtype=kind, device=META))


def compile_all(target: str, one: bool) -> dict[str, Any]:
    """How many launches were compiled, and errors by launch."""
    kind, _, arch = target.partition(":")
    where = GPUTarget(kind, int(arch) if kind == "cuda" else arch, 32 if kind == "cuda" else 64)
    shared = FACTS.get(target, FACTS["hip"])[1]
    found: dict[str, Any] = {}
    launches = list(record(target).seen.values())
    if one:
        launches = list({launch[0].__name__: launch for launch in launches}.values())
    for function, signature, constants, options in launches:
        attrs = options.pop("attrs")
        try:
            gluon = getattr(function, "is_gluon", bool)()
            source = (GluonASTSource if gluon else ASTSource)(function, signature, constants, attrs)
            made = triton.compile(source, target=where, options=options)
        except Exception as error:  # a compiler's; it is the finding
            lines = [line for line in str(error).splitlines() if line.strip()]
            found[f"{function.__name__} {constants} {options}"] = f"{type(error).__name__}: {' | '.join(lines[-3:])}"
            continue
        if made.metadata.shared > shared:
            found[f"{function.__name__} {constants} {options}"] = f"{made.metadata.shared} bytes of shared memory"
    return {"launches": len(launches), "errors": found}


def listed(recorder: Recorder) -> list[dict[str, Any]]:
    """Each launch: module and name of its function, signature, constants by name, and which parameters have values that
    16 divides."""
    found = []
    for function, signature, constants, options in recorder.seen.values():
        names = [p.name for p in function.params]
        found.append({
            "module": function.fn.__module__, "name": function.__name__, "signature": signature,
            "constants": {names[index]: value for (index,), value in constants.items()},
            "aligned": [names[index] for (index,) in options["attrs"]],
        })  # fmt: skip
    return found


if __name__ == "__main__":
    if sys.argv[1] == "--list":
        print(json.dumps(listed(record(sys.argv[2]))))
        sys.exit()
    targets = [word for word in sys.argv[1:] if word != "--one"]
    print(json.dumps({target: compile_all(target, "--one" in sys.argv) for target in targets}, indent=1))
