"""Prints, as JSON, the ops for which the Ascend backend offers Triton kernels over rows on a chip, and their launches:
at small and at the largest sizes, in each dtype. Launches are recorded over meta tensors.

    python row_launches.py VARIANT       as in evener_backend_ascend.chip
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Mapping
from typing import Any

import aot
import torch
from triton.runtime.jit import JITFunction

from evener.contracts.ops import Bucket, OpCall
from evener_backend_ascend.chip import CHIPS, capabilities
from evener_conformance.reference.device import HostDevice
from evener_kernels_triton import rows

META = torch.device("meta")
TOKENS = 4


def empty(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.empty(*shape, dtype=dtype, device=META)


def cases(kind: torch.dtype) -> Iterator[tuple[str, Mapping[str, Any], tuple[torch.Tensor, ...]]]:
    """(op, static parameters, inputs)."""
    name = str(kind).removeprefix("torch.")
    ints = empty(TOKENS, dtype=torch.int32)
    for hidden in (128, 2880, 7168, 8192):
        norm = {"hidden": hidden, "eps": 1e-5, "offset": 1.0, "dtype": name}
        x, weight = empty(TOKENS, hidden, dtype=kind), empty(hidden, dtype=kind)
        yield "rms_norm", norm, (x, weight)
        yield "add_rms_norm", norm, (x, empty(TOKENS, hidden), weight)
        for scale in (1.0, 3.0):
            table = empty(99, hidden, dtype=kind)
            yield "embedding", {"hidden": hidden, "scale": scale, "dtype": name, "vocab": 99}, (ints, table)
        yield "take_rows", {"hidden": hidden, "dtype": name}, (x, ints.long())
    yield "rms_norm", {"hidden": 128, "eps": 1e-5, "offset": 0.0, "dtype": name}, (
        empty(TOKENS, 8, 128, dtype=kind), empty(128, dtype=kind),
    )  # fmt: skip
    for size, turned in ((64, 64), (128, 64), (256, 256)):
        for interleaved in (False, True):
            static = {"head_dim": size, "rotary_dim": turned, "interleaved": interleaved, "dtype": name}
            yield "rotary", static, (
                ints, empty(TOKENS, 8, size, dtype=kind), empty(TOKENS, 2, size, dtype=kind), empty(99, turned),
            )  # fmt: skip
    for activation in ("silu", "gelu", "gelu_tanh"):
        for inner in (96, 12288):
            static = {"inner": inner, "activation": activation, "dtype": name}
            yield "act_and_mul", static, (empty(TOKENS, 2 * inner, dtype=kind),)
    for vocab in (512, 151936, 262144):
        logits, packed = empty(TOKENS, vocab), empty(TOKENS, -(-vocab // 32), dtype=torch.int32)
        yield "softcap", {"cap": 30.0, "dtype": "float32"}, (logits,)
        yield "greedy", {"vocab": vocab}, (logits,)
        yield "apply_mask", {"vocab": vocab}, (logits, packed)
        floats = empty(TOKENS)
        for filters in (False, True):
            yield "sample", {"vocab": vocab, "filters": filters}, (logits, floats, ints, floats, floats, ints, ints)


def main(variant: str) -> None:
    (chip,) = [chip for chip in CHIPS if chip.name == variant]
    device = HostDevice(0)
    device.capabilities, device.torch_device = capabilities(chip, triton=True), META
    recorder = aot.Recorder()
    JITFunction.run = lambda self, *a, **k: recorder(self, *a, **k)
    rows.no_driver = lambda device: None  # type: ignore[assignment]
    kernels = {kernel.op: kernel for kernel in rows.evener_kernels(device, {})}
    ran = set()
    for dtype in sorted(device.capabilities.dtypes):
        for op, static, inputs in cases(getattr(torch, dtype)):
            call = OpCall(op, static, Bucket(1, TOKENS), device.capabilities)
            reason = kernels[op].supports(call)
            if op in rows.INDEXED and rows.ARGMAX not in chip.triton:
                assert reason is not None
                continue
            assert reason is None, f"{op} {static}: {reason}"
            kernels[op].build(call)(*inputs)
            ran.add(op)
    print(json.dumps({"ops": sorted(ran), "launches": aot.listed(recorder)}))


if __name__ == "__main__":
    main(sys.argv[1])
