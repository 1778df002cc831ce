"""The largest logit of one token, without reading all of the head.

A greedy token needs one logit of the vocabulary: the largest. The head is the largest matrix of a step, and in bfloat16
also where layers are quantized. ``screened_head.cu`` reads codes of four bits instead, from which each id's logit is
known up to a bound. It then computes the logits of the ids whose bound reaches the best logit that is known, as a head
does. The result is the id of the largest of all logits; the chance that it is another one is less than 1e-12 a token
(``screened.py`` says why). Every other use of the head reads the weight as it is.

That a search by bounds gives the largest product is well known (Ram and Gray 2012, maximum inner-product search); so is
screening for a softmax (Chen et al. 2019), which learns what to leave out and may be wrong.
"""

from __future__ import annotations

import ctypes
import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, cast

import torch
import torch.nn.functional as F

from evener.contracts.declared import LinearWeight
from evener.contracts.device import Device
from evener.contracts.ops import Kernel, OpCall, OpFunction
from evener.contracts.quant import PackedWeight
from evener.contracts.statics import HeadStatic
from evener.ops.composites import head, linear_static
from evener.ops.norms import any_norm
from evener.ops.reference.linear import PLAIN
from evener_backend_cuda.compiled import CompiledKernel, Driver
from evener_backend_cuda.one_launch import PATIENCE, read_sources
from evener_backend_cuda.screened import CHUNK, SCREENED, ScreenedMatrix, aligned, distance
from evener_kernels_triton.arguments import checked
from evener_kernels_triton.composites import TritonHead
from evener_kernels_triton.features import number_of
from evener_kernels_triton.linear import LibraryLinear, TritonLinear
from evener_kernels_triton.tuning import Tuning

#: As in screened_head.cu: threads of a program, and programs of a multiprocessor.
THREADS, RESIDENT = 256, 3
#: The most that the chance to miss the largest logit of a step may be.
CHANCE = 1e-12
_MOST_COLUMNS = 16_384
#: All weights of fewer rows are read as fast.
_LEAST_ROWS = 8192
#: Bytes of shared memory that the system takes for each program.
_RESERVED = 1024


class Screen(ctypes.Structure):
    """``Screen`` of screened_head.cu."""

    _fields_ = [(name, ctypes.c_void_p) for name in (
        "x", "norm", "dither", "values", "mean", "codes", "scales", "found", "id", "report",
    )]  # fmt: skip


class ScreenedGreedy(Kernel):
    """The id of the largest logit of one token. The search itself has an RMS norm; torch computes others before it. A
    factor that is a power of two changes neither the order of logits nor which are equal, so it is left out.

    Args:
        device: where it runs.
        driver: compiles and loads kernels; None: NVIDIA's.
        off: why it is not used at all; None: it is used where it can be.
    """

    op, name = "vocab_greedy", "cuda.screened_greedy"
    priority = 150
    capturable = True
    packings = (SCREENED,)
    non_default = frozenset({"norm", "logit_scale"})

    def __init__(self, device: Device, driver: Driver | None = None, off: str | None = None) -> None:
        self._off, self._driver = off, Driver() if driver is None else driver
        self._head, self._linear = ScreenedHead(device, off), ScreenedLinear(device, off)

    def supports(self, call: OpCall) -> str | None:
        if self._off is not None:
            return self._off
        if call.bucket.high != 1:
            return "computes one token"
        s = cast(HeadStatic, call.static)
        if s["cap"] or s["logit_scale"] <= 0 or math.frexp(s["logit_scale"])[0] != 0.5:
            return f"has no soft cap, and factors that are powers of two: not {s['cap']} and {s['logit_scale']}"
        return _weight_refusal(call, s["weight"]) or _place_refusal(call) or self._driver.refusal()

    def workspace(self, call: OpCall) -> int:
        s = cast(HeadStatic, call.static)
        # With a bias, all logits.
        if s["norm"] == "rms":
            return 4 * s["vocab"] + self._head.workspace(replace(call, op="head"))
        product = replace(call, op="linear", static=linear_static(s["weight"]))
        return 4 * s["vocab"] + 12 * s["hidden"] + self._linear.workspace(product)

    def build(self, call: OpCall) -> OpFunction:
        if call.static["norm"] != "rms":
            return self._behind_another_norm(call)
        search, all_logits = self.search(call), self._head.build(replace(call, op="head"))

        def run(x: torch.Tensor, norm: torch.Tensor, weight: PackedWeight, bias: torch.Tensor | None) -> torch.Tensor:
            if bias is not None:
                return all_logits(x, norm, weight, bias).argmax(1).to(torch.int32)  # type: ignore[no-any-return]
            return search(x, norm, weight.data)

        return checked(call, run)

    def _behind_another_norm(self, call: OpCall) -> OpFunction:
        s, search = cast(HeadStatic, call.static), self.search(call)

        def use(op: str, /, **static: Any) -> OpFunction:
            if op == "linear":
                return self._linear.build(replace(call, op=op, static=static))
            assert op == "layer_norm", op
            return _layer_norm(static["hidden"], static["eps"])

        norm_rows, all_logits = any_norm({**s, "dtype": "float32"}, use), head(s, use)

        def run(
            x: torch.Tensor, norm: torch.Tensor | None, weight: PackedWeight, bias: torch.Tensor | None
        ) -> torch.Tensor:
            if bias is not None:
                return all_logits(x, norm, weight, bias).argmax(1).to(torch.int32)  # type: ignore[no-any-return]
            return search(norm_rows(x, norm), None, weight.data)

        return run

    def search(self, call: OpCall) -> Search:
        """The launch of a call site."""
        s, programs = cast(HeadStatic, call.static), _programs(call)
        shared = shared_bytes(s["hidden"], s["vocab"], programs)
        code = self._driver.compile(source(), defines(s, programs))
        return Search(self._driver.kernel(code, "screened_head", programs, THREADS, shared))


class Search:
    """The launch of one call site.

    Attributes:
        found: what programs tell each other, int64 [3]; each launch leaves zeros. None before the first.
    """

    def __init__(self, launch: CompiledKernel) -> None:
        self._launch, self._argument = launch, Screen()
        self.found: torch.Tensor | None = None

    def __call__(self, x: torch.Tensor, norm: torch.Tensor | None, weight: ScreenedMatrix) -> torch.Tensor:
        """The id, int32 [1], for the stream float32 [1, hidden] and the norm's weight float32 [hidden]; without one for
        a stream that is normed, as the launch was made for."""
        if self.found is None:
            self.found = torch.zeros(3, dtype=torch.int64, device=x.device)
        x, norm = aligned(x), None if norm is None else aligned(norm)
        best = torch.empty(1, dtype=torch.int32, device=x.device)
        tensors = {
            "x": x, "norm": norm, "dither": weight.dither, "values": weight.values, "mean": weight.mean,
            "codes": weight.codes, "scales": weight.scales, "found": self.found, "id": best,
        }  # fmt: skip
        for name, tensor in tensors.items():
            setattr(self._argument, name, None if tensor is None else tensor.data_ptr())
        self._launch(self._launch.place(x.device).stream, self._argument)
        return best


class _AsPlain(Kernel):
    """A kernel of the Triton package that reads the matrix as it is."""

    priority = 150
    capturable = True
    packings = (SCREENED,)

    def __init__(self, off: str | None, inner: tuple[Kernel, ...]) -> None:
        self._off, self._inner = off, inner

    def supports(self, call: OpCall) -> str | None:
        if self._off is not None:
            return self._off
        reason, plain = _weight_refusal(call, call.static["weight"]), _as_plain(call)
        if reason is None and self._serving(plain) is None:
            return "; ".join(filter(None, (kernel.supports(plain) for kernel in self._inner)))
        return reason

    def workspace(self, call: OpCall) -> int:
        plain = _as_plain(call)
        return self._served_by(plain).workspace(plain)

    def build(self, call: OpCall) -> OpFunction:
        plain, at = _as_plain(call), self._weight_at
        built = self._served_by(plain).build(plain)

        def run(*inputs: Any) -> Any:
            given = list(inputs)
            weight: PackedWeight = given[at]
            given[at] = PackedWeight(PLAIN.layout, weight.shape, weight.data.values, weight.data.values.nbytes)
            return built(*given)

        return run

    #: Which input the weight is.
    _weight_at: int

    def _serving(self, plain: OpCall) -> Kernel | None:
        return next((kernel for kernel in self._inner if kernel.supports(plain) is None), None)

    def _served_by(self, plain: OpCall) -> Kernel:
        found = self._serving(plain)
        assert found is not None, "supports said so"
        return found


class ScreenedHead(_AsPlain):
    """All logits, by Triton's head."""

    op, name = "head", "cuda.screened_head"
    _weight_at = 2

    def __init__(self, device: Device, off: str | None = None) -> None:
        super().__init__(off, (TritonHead(device, Tuning.of(device.capabilities)),))


class ScreenedLinear(_AsPlain):
    """The product alone, by Triton's or the library's. It decides which weights have codes: heads, whose products are
    float32."""

    op, name = "linear", "cuda.screened_linear"
    _weight_at = 1

    def __init__(self, device: Device, off: str | None = None) -> None:
        tuning = Tuning.of(device.capabilities)
        super().__init__(off, (TritonLinear(device, tuning), LibraryLinear(device, tuning)))


def source() -> str:
    """The kernels, behind the functions that they are written in."""
    return read_sources("hopper.cuh", "screened_head.cu")


def shared_bytes(columns: int, rows: int, programs: int) -> int:
    """Shared memory of a program."""
    warps, steps = THREADS // 32, -(-columns // (32 * CHUNK))
    tall = 8 if steps == 1 else 4 if steps == 2 else 2 if steps <= 4 else 1
    blocks = -(-rows // tall)
    rounds = -(-blocks // (programs * warps))
    return 4 * columns + columns // CHUNK * 16 + 4 * warps * rounds * tall + -(-2 * warps * 4 // 16) * 16 + 8 * warps


def defines(s: HeadStatic, programs: int) -> dict[str, object]:
    """The macros that screened_head.cu needs."""
    apart, rounding = distance(s["hidden"], CHANCE)
    # Of a stream that is normed, the weight is 0 and the offset 1.
    normed = s["norm"] != "rms"
    return {
        "HIDDEN": s["hidden"], "ROWS": s["vocab"], "PROGRAMS": programs, "THREADS": THREADS, "RESIDENT": RESIDENT,
        "NORMED": int(normed), "EPS": f"{s['eps']!r}f", "OFFSET": f"{1.0 if normed else float(s['offset'])!r}f",
        "DISTANCE": f"{apart!r}f",
        "ROUNDING": f"{rounding!r}f", "PATIENCE": f"{PATIENCE}u",
        "SHARED_BYTES": shared_bytes(s["hidden"], s["vocab"], programs),
    }  # fmt: skip


def _layer_norm(hidden: int, eps: float) -> OpFunction:
    """The op ``layer_norm`` in float32, by torch."""
    return lambda x, weight, bias: F.layer_norm(x, (hidden,), weight, bias, eps)


def _programs(call: OpCall) -> int:
    return RESIDENT * number_of("units", call.device.features, 1)


def _as_plain(call: OpCall) -> OpCall:
    """The call as if the weight had been packed as plain numbers."""
    static: Mapping[str, Any] = {**call.static, "weight": replace(call.static["weight"], layout=PLAIN.layout)}
    return replace(call, static=static, layouts={**call.layouts, "weight": PLAIN.layout})


def _weight_refusal(call: OpCall, weight: LinearWeight) -> str | None:
    """Why a weight has no codes; None if it has, or will have."""
    if call.static.get("out", weight.out) != "float32" or weight.experts or weight.slices:
        return "is for heads that one rank has"
    if call.device.variant != "sm_90":
        return f"its machine code is for sm_90, not {call.device.variant}"
    if weight.rows < _LEAST_ROWS or weight.columns > _MOST_COLUMNS:
        return (
            f"is for {_LEAST_ROWS} rows or more of up to {_MOST_COLUMNS} columns, not {weight.rows} x {weight.columns}"
        )
    return SCREENED.supports(weight.parts, weight.dtype)


def _place_refusal(call: OpCall) -> str | None:
    """Why its programs cannot all be there at once; None if they can."""
    s = cast(HeadStatic, call.static)
    needed = RESIDENT * (shared_bytes(s["hidden"], s["vocab"], _programs(call)) + _RESERVED)
    there = number_of("shared", call.device.features, 0) + _RESERVED
    return None if needed <= there else f"needs {needed} bytes of shared memory of a multiprocessor, not {there}"
