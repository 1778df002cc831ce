"""Compiles every kernel ahead of time, as it would be launched, for targets that this machine does not have.

    python aot.py TARGET...        cuda:90, hip:gfx942, …

Launches are recorded over meta tensors, so no device is needed. Prints one JSON object: target → {kernel: error}.
"""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from typing import Any

import torch
import triton
from evener_kernels_triton.plugin import evener_kernels, evener_state_providers
from evener_kernels_triton.linear import few
from evener_kernels_triton.sampling import choose
from evener_kernels_triton.tuning import Tuning
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.runtime.jit import JITFunction

from evener.contracts.device import DeviceCapabilities
from evener.contracts.ops import Bucket, OpCall
from evener.layers.decoder import AttentionConfig, MLPConfig
from evener.layers.rotary import RotaryConfig
from evener.ops.schemas import BUILTIN
from evener.testing.composite_check import Family, TinyModel, families
from evener.testing.reference_device import HostDevice

META = torch.device("meta")
TYPES = {
    torch.float32: "fp32", torch.float16: "fp16", torch.bfloat16: "bf16", torch.int32: "i32", torch.int64: "i64",
    torch.uint8: "u8",
}  # fmt: skip
#: What such a device says of itself: units, shared memory, bfloat16, whether kernels may overlap.
FACTS = {
    "cuda:75": (40, 64 << 10, False, False), "cuda:80": (108, 163 << 10, True, False),
    "cuda:90": (132, 227 << 10, True, True), "cuda:100": (148, 227 << 10, True, True),
    "hip": (104, 64 << 10, True, False),
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
    units, shared, bf16, overlap = FACTS.get(target, FACTS["hip"])
    features = {f"units:{units}", f"shared:{shared}"} | ({"overlap"} if overlap else set())
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
    for family in (large, *families()):
        model = TinyModel(device, dtype, family, kernels, states[0], BUILTIN)
        noise = torch.randn(64, 96)
        with torch.inference_mode():
            for counts, before in (((1, 1), (3, 9)), ((33, 30), (0, 0))):
                model.step(noise[: sum(counts)], before, counts)
    tuning = Tuning.of(device.capabilities)
    for tokens in (1, 4, 16, 64):
        for rows, columns, act in ((6144, 4096, ""), (24576, 4096, "silu"), (4096, 12288, ""), (1024, 3072, "")):
            x = torch.empty(tokens, columns, dtype=getattr(torch, dtype), device=META)
            w = torch.empty(rows, columns, dtype=getattr(torch, dtype), device=META)
            few(tuning, x, w, x.dtype, activation=act)
    logits = torch.empty(4, 151936, device=META)
    ints = torch.empty(4, dtype=torch.int32, device=META)
    choose(tuning, logits)
    choose(tuning, logits, torch.empty(4, device=META), ints, ints)
    for kernel in kernels:
        static = {"scale": 3.0, "dtype": dtype, "cap": 5.0, "vocab": 151936, "hidden": 96, "eps": 1e-5, "offset": 0.0}
        call = OpCall(kernel.op, static, Bucket(1, 4), device.capabilities)
        rows = torch.empty(4, 96, dtype=getattr(torch, dtype), device=META)
        inputs = {"embedding": (ints, rows), "take_rows": (rows, ints.long()), "softcap": (rows,),
                  "apply_mask": (logits, torch.empty(4, 4748, dtype=torch.int32, device=META))}  # fmt: skip
        if kernel.op in inputs:
            kernel.build(call)(*inputs[kernel.op])
    return recorder


def compile_all(target: str, only: str = "") -> dict[str, Any]:
    """Errors by kernel; "" has the number of launches."""
    kind, _, arch = target.partition(":")
    where = GPUTarget(kind, int(arch) if kind == "cuda" else arch, 32 if kind == "cuda" else 64)
    shared = FACTS.get(target, FACTS["hip"])[1]
    found: dict[str, Any] = {}
    seen = record(target).seen
    for function, signature, constants, options in seen.values():
        if only and function.__name__ != only:
            continue
        attrs = options.pop("attrs")
        try:
            source = ASTSource(function, signature, constants, attrs)
            made = triton.compile(source, target=where, options=options)
        except Exception as error:  # a compiler's; it is the finding
            lines = [line for line in str(error).splitlines() if line.strip()]
            found[f"{function.__name__} {constants} {options}"] = f"{type(error).__name__}: {' | '.join(lines[-3:])}"
            continue
        if made.metadata.shared > shared:
            found[f"{function.__name__} {constants} {options}"] = f"{made.metadata.shared} bytes of shared memory"
    return {"launches": len(seen), "errors": found}


if __name__ == "__main__":
    print(json.dumps({target: compile_all(target) for target in sys.argv[1:]}, indent=1))
