"""The largest logit of one token, without reading all of the head.

A greedy token needs one logit of the vocabulary: the largest. Decoding one request takes as long as its weights take to
be read, and the head is a fifth to two thirds of a small model. ``native/screened.h`` reads codes of four bits instead
(``screened.py``), from which each id's logit is known up to a bound. Then it computes the logits of the ids whose bound
reaches the best logit that is known, as a head does. The result is the id of the largest of all logits, but for a
probability of 1e-12. Every other use of the head reads the weight as it is.

That a search by bounds gives the largest product is well known (Ram and Gray 2012, maximum inner-product search); so is
screening for a softmax (Chen et al. 2019), which learns what to leave out and may be wrong.
"""

from __future__ import annotations

import ctypes
import math
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, cast

import torch

from evener.contracts.declared import LinearWeight
from evener.contracts.ops import OpCall, OpFunction, Use
from evener.contracts.quant import PackedWeight
from evener.contracts.statics import HeadStatic
from evener.ops.composites import head
from evener.ops.norms import any_norm
from evener.ops.ranks import vocab_greedy
from evener.ops.reference.basic import softcap
from evener_backend_cpu.arguments import optional, require, require_weight
from evener_backend_cpu.device import CpuDevice
from evener_backend_cpu.layer_norm import LayerNorm
from evener_backend_cpu.primitives import NativeGreedy, NativeKernel, NativeLinear, NativeRmsNorm
from evener_backend_cpu.screened import certainty

#: Of missing the id that has the largest logit, in one step.
CHANCE = 1e-12
#: All weights of fewer rows are read as fast.
LEAST_ROWS = 8192
#: Of the rows, the part beyond which to read all takes no longer than to read some.
FEW = 0.25
#: Steps that compute all logits at once, after several searches in a row that had too many candidates.
_MOST_STEPS = 64
_OFF = "is used with cpu.screened_head=true"
#: Instructions that the products with codes are written for.
_NEEDED = frozenset({"avx2", "avx512bw"})


class Patience:
    """How often a search is worth a try. One that had too many candidates has cost the time of its codes; so the next
    step computes all logits at once, and twice as many do after each further one."""

    def __init__(self) -> None:
        self._wait = self._left = 0

    def tries(self) -> bool:
        """Whether the next step is to be a search."""
        self._left -= self._left > 0
        return not self._left

    def note(self, helped: bool) -> None:
        """The step was a search, and it helped, or had too many candidates."""
        self._wait = 0 if helped else min(_MOST_STEPS, 2 * self._wait or 1)
        self._left = self._wait + 1 if self._wait else 0


class ScreenedGreedy(NativeKernel):
    """The id of the largest logit of one token. The search itself has an RMS norm; torch computes others before it.

    Factors above 0 and soft caps keep the order of logits, but they can make some equal, of which the lowest id is
    wanted. So where rounding may have made the best ones equal, all logits are computed.
    """

    op = "vocab_greedy"
    priority = 150
    non_default = frozenset({"norm", "logit_scale"})

    def __init__(self, device: CpuDevice) -> None:
        super().__init__(device)
        self.name, self.packings = "screened_greedy", (device.screened,)

    def _unsupported_reason(self, call: OpCall) -> str | None:
        if call.bucket.high != 1:
            return "computes one token"
        s = cast(HeadStatic, call.static)
        if not s["logit_scale"] > 0 or (s["cap"] or 0) < 0:
            return f"has factors above 0 and no negative soft cap, not {s['logit_scale']} and {s['cap']}"
        return _refusal(self.device, call, s["weight"])

    def workspace(self, call: OpCall) -> int:
        s = cast(HeadStatic, call.static)
        # Of a head with a cap, all logits may be there twice.
        logits = 8 * s["vocab"] if _shaping(s) else 0
        return int(self.native.largest_scratch(s["vocab"], s["hidden"], self.device.threads)) + logits

    def build(self, call: OpCall) -> OpFunction:
        s, device, function, patience = cast(HeadStatic, call.static), self.device, self.native.largest, Patience()
        rows, columns, eps, offset, least = s["vocab"], s["hidden"], s["eps"], s["offset"], certainty(CHANCE)
        few, shaping = int(rows * FEW), _shaping(s)
        factor, cap = shaping or (1.0, 0.0)
        other = None if s["norm"] == "rms" else any_norm({**s, "dtype": "float32"}, self._use(call))
        all_logits = vocab_greedy(s, self._use(call)) if shaping else None

        def run(
            x: torch.Tensor, norm: torch.Tensor | None, weight: PackedWeight, bias: torch.Tensor | None
        ) -> torch.Tensor:
            if other is not None:
                normed, gain = other(x, norm).contiguous(), None
            elif norm is None:
                raise ValueError("an RMS norm has a weight")
            else:
                normed, gain = x.contiguous(), norm.contiguous()
            require_weight("the head", weight, (rows, columns), torch.bfloat16)
            found, candidates = torch.empty(1, dtype=torch.int32), ctypes.c_int64()
            tries = bias is None and patience.tries()
            function(
                ctypes.addressof(weight.data.struct),
                require("the stream", normed, torch.float32, (1, columns)),
                optional("the norm", gain, torch.float32, (columns,)),
                optional("the bias", bias, torch.bfloat16, (rows,)),
                eps,
                offset,
                least,
                few if tries else -1,
                found.data_ptr(),
                ctypes.addressof(candidates),
                device.threads,
                factor,
                cap,
            )
            if tries:
                patience.note(0 <= candidates.value <= few)
            if all_logits is not None and int(found) < 0:
                return all_logits(x, norm, weight, bias)  # type: ignore[no-any-return]
            return found

        return run

    def _use(self, call: OpCall) -> Use:
        """The ops that a head is made of, as they serve the heads of several tokens."""

        def use(op: str, /, **static: Any) -> OpFunction:
            if op in _PLAIN:
                return _PLAIN[op](static, use)
            kinds = {kind.op: kind for kind in (NativeRmsNorm, LayerNorm, ScreenedLinear, NativeGreedy)}
            return kinds[op](self.device).build(replace(call, op=op, static=static))

        return use


class ScreenedLinear(NativeLinear):
    """The product alone, which reads the matrix as it is. It decides which weights have codes: heads, whose products
    are float32."""

    priority = 150

    def __init__(self, device: CpuDevice) -> None:
        super().__init__(device)
        self.name, self.packings = "screened_linear", (device.screened,)

    def _unsupported_reason(self, call: OpCall) -> str | None:
        return super()._unsupported_reason(call) or _refusal(self.device, call, call.static["weight"])


#: Of a head's ops those that no kernel here serves.
_PLAIN: Mapping[str, Callable[[Any, Use], OpFunction]] = {"head": head, "softcap": softcap}


def _shaping(s: HeadStatic) -> tuple[float, float] | None:
    """The factor and the soft cap of a head, or 0; None if all logits are compared as well without them. A factor that
    is a power of two makes no numbers equal."""
    factor, cap = s["logit_scale"], s["cap"] or 0.0
    return None if not cap and math.frexp(factor)[0] == 0.5 else (factor, cap)


def _refusal(device: CpuDevice, call: OpCall, weight: LinearWeight) -> str | None:
    """Why a weight has no codes; None if it has, or will have."""
    if not device.screens:
        return _OFF
    if not _NEEDED & call.device.features:
        return "its products are written for AVX2 and AVX-512"
    if call.static.get("out", weight.out) != "float32" or weight.experts or weight.slices:
        return "is for heads that one rank has"
    if weight.rows < LEAST_ROWS:
        return f"is for {LEAST_ROWS} rows or more, not {weight.rows}"
    return device.screened.supports(weight.parts, weight.dtype)


SCREENED = (ScreenedGreedy, ScreenedLinear)
