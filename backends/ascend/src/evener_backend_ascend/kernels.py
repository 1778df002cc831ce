"""Kernels of torch_npu as evener's ops. Norms and rotation compute in float32 where the op's meaning does."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from evener.contracts.ops import Kernel, OpCall, OpFunction
from evener.contracts.quant import PackedWeight, Packing
from evener.ops.reference.linear import PLAIN
from evener_backend_ascend import calls
from evener_backend_ascend.chip import refusal


class NpuKernel(Kernel):
    """A kernel for the chips that the vendor documents it for. ``vendor``: the vendor's kernel that it calls."""

    vendor: str
    priority = 100
    capturable = True

    def supports(self, call: OpCall) -> str | None:
        dtype = call.static.get("dtype")
        if dtype is not None and dtype not in call.device.dtypes:
            return f"{call.device.variant} has no {dtype}"
        return refusal(call.device.variant, self.vendor) or self._unsupported(call)

    def _unsupported(self, call: OpCall) -> str | None:
        del call
        return None


def _gamma(weight: torch.Tensor, offset: float) -> torch.Tensor:
    wide = weight.float()
    return wide + offset if offset else wide


class NpuRmsNorm(NpuKernel):
    """In the row's dtype; in float32 where the weight has an offset, which half precision would round."""

    op, name, vendor = "rms_norm", "ascend.rms_norm", "npu_rms_norm"

    def workspace(self, call: OpCall) -> int:
        return int(call.bucket.high * call.static["hidden"] * 12)

    def build(self, call: OpCall) -> OpFunction:
        eps, offset = call.static["eps"], call.static["offset"]

        def run(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
            if offset or weight.dtype != x.dtype:
                return calls.rms_norm(x.float(), _gamma(weight, offset), eps).to(x.dtype)
            return calls.rms_norm(x, weight, eps)

        return run


class NpuAddRmsNorm(NpuKernel):
    """The stream is float32, and the vendor's kernel takes one dtype: x is widened."""

    op, name, vendor = "add_rms_norm", "ascend.add_rms_norm", "npu_add_rms_norm"
    # Reported for the fused form by its users.
    deterministic = False

    def workspace(self, call: OpCall) -> int:
        return int(call.bucket.high * call.static["hidden"] * 12)

    def build(self, call: OpCall) -> OpFunction:
        eps, offset = call.static["eps"], call.static["offset"]

        def run(x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            y, total = calls.add_rms_norm(x.float(), residual.float(), _gamma(weight, offset), eps)
            return y.to(x.dtype), total

        return run


class NpuSwiGlu(NpuKernel):
    """silu and product; on 310P in float32, as the vendor's own engine calls it there."""

    op, name, vendor = "act_and_mul", "ascend.swiglu", "npu_swiglu"

    def _unsupported(self, call: OpCall) -> str | None:
        kind = call.static["activation"]
        return None if kind == "silu" else f"computes silu, not {kind}"

    def build(self, call: OpCall) -> OpFunction:
        if "bfloat16" in call.device.dtypes:
            return calls.swiglu

        def wide(x: torch.Tensor) -> torch.Tensor:
            return calls.swiglu(x.float()).to(x.dtype)

        return wide

    def workspace(self, call: OpCall) -> int:
        return 0 if "bfloat16" in call.device.dtypes else int(call.bucket.high * call.static["inner"] * 12)


class NpuRotary(NpuKernel):
    """In float32, like the op's meaning: angles in half precision would move keys by their rounding."""

    op, name, vendor = "rotary", "ascend.rotary", "npu_rotary_mul"

    def _unsupported(self, call: OpCall) -> str | None:
        size = call.static["rotary_dim"]
        return None if size % 2 == 0 and size < 896 else f"rotates an even number of elements below 896, not {size}"

    def build(self, call: OpCall) -> OpFunction:
        size, head, interleaved = (call.static[k] for k in ("rotary_dim", "head_dim", "interleaved"))

        def turn(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
            if not x.numel():
                return x
            turned = calls.rotate(x[..., :size].float(), cos, sin, interleaved).to(x.dtype)
            return turned if size == head else torch.cat((turned, x[..., size:]), dim=-1)

        def run(
            positions: torch.Tensor, query: torch.Tensor, key: torch.Tensor, cos_sin: torch.Tensor
        ) -> tuple[torch.Tensor, torch.Tensor]:
            half = cos_sin.index_select(0, positions).float().chunk(2, dim=-1)
            if interleaved:
                cos, sin = (part.repeat_interleave(2, dim=-1) for part in half)
            else:
                cos, sin = (torch.cat((part, part), dim=-1) for part in half)
            return turn(query, cos, sin), turn(key, cos, sin)

        return run


class NpuRoute(NpuKernel):
    """Scores, groups and the best experts in one kernel. Sigmoid scores are made to sum to 1 by the kernel itself,
    softmax scores by us."""

    op, name, vendor = "route", "ascend.route", "npu_moe_gating_top_k"

    def _unsupported(self, call: OpCall) -> str | None:
        s = call.static
        experts, groups = s["experts"], s["groups"]
        if s["scoring"] not in ("softmax", "sigmoid"):
            return f"scores by softmax or sigmoid, not by {s['scoring']}"
        if s["scoring"] == "sigmoid" and not s["renormalize"]:
            return "sigmoid scores always sum to 1 there"
        if s["top_groups"] < groups and s["group_best"] not in (1, 2):
            return f"ranks a group by its best score or its best two, not by {s['group_best']}"
        if experts > 2048 or experts // groups <= 2 or -(-experts // groups // 32) * 32 * groups > 2048:
            return f"has no room for {experts} experts in {groups} groups"
        if s["top"] > experts // groups * s["top_groups"]:
            return f"cannot choose {s['top']} experts from {s['top_groups']} groups"
        return None

    def build(self, call: OpCall) -> OpFunction:
        s = call.static
        sigmoid, scale, renormalize = s["scoring"] == "sigmoid", s["scale"], s["renormalize"]
        limited = s["top_groups"] < s["groups"]

        def run(logits: torch.Tensor, bias: torch.Tensor | None = None) -> tuple[torch.Tensor, torch.Tensor]:
            weights, ids = calls.gate_experts(
                logits.float(), None if bias is None else bias.float(), top=s["top"],
                groups=s["groups"] if limited else 1, top_groups=s["top_groups"] if limited else 1,
                group_best=s["group_best"] if limited else 1, sigmoid=sigmoid, scale=scale if sigmoid else 1.0,
            )  # fmt: skip
            if not sigmoid:
                weights = weights / weights.sum(-1, keepdim=True) if renormalize else weights
                weights = weights * scale
            return ids, weights

        return run


class NpuGroupedLinear(NpuKernel):
    """Pairs of token and expert, sorted by expert, in one product. No value is read on the host."""

    op, name, vendor = "grouped_linear", "ascend.grouped_linear", "npu_grouped_matmul"
    packings: tuple[Packing, ...] = (PLAIN,)

    def _unsupported(self, call: OpCall) -> str | None:
        experts, rows, dtype = (call.static[k] for k in ("experts", "rows", "dtype"))
        if not 1 < experts <= 1024:
            return f"multiplies by 2 to 1024 matrices, not by {experts}"
        if "bfloat16" not in call.device.dtypes and (dtype != "float16" or rows % 16):
            return f"multiplies in float16 there, by matrices with a multiple of 16 rows, not {rows} in {dtype}"
        return None

    def product(self, call: OpCall) -> Callable[[torch.Tensor, Any, torch.Tensor], torch.Tensor]:
        """Of rows that are sorted by matrix, what the packing holds, and the number of rows of each matrix."""
        del call

        def multiply(x: torch.Tensor, data: torch.Tensor, counts: torch.Tensor) -> torch.Tensor:
            return calls.grouped_matmul(x, data.transpose(1, 2), counts)

        return multiply

    def workspace(self, call: OpCall) -> int:
        # The number of experts for each token is not a static parameter; 16 is more than any known model has.
        s = call.static
        width: int = getattr(torch, s["dtype"]).itemsize
        return int(call.bucket.high * 16 * (s["columns"] * width + 2 * s["rows"] * width + 64))

    def build(self, call: OpCall) -> OpFunction:
        experts, rows, multiply = call.static["experts"], call.static["rows"], self.product(call)

        def run(
            x: torch.Tensor, weight: PackedWeight, slots: torch.Tensor, bias: torch.Tensor | None = None
        ) -> torch.Tensor:
            if not slots.numel():
                return x.new_zeros(*slots.shape, rows)
            named = torch.where(slots < 0, experts, slots).flatten().long()
            order = named.argsort(stable=True)
            counts = torch.zeros(experts + 1, dtype=torch.int64, device=x.device)
            counts.scatter_add_(0, named, torch.ones_like(named))
            rows_of_x = torch.div(order, slots.shape[1], rounding_mode="floor")
            y = multiply(x.index_select(0, rows_of_x), weight.data, counts[:experts].contiguous())
            sorted_slots = named.index_select(0, order)
            if bias is not None:
                y = y + bias.index_select(0, sorted_slots.clamp_max(experts - 1))
            # Pairs without an expert come last, and the product leaves their rows as they were.
            y = y.masked_fill((sorted_slots == experts)[:, None], 0)
            out = torch.empty_like(y).index_copy_(0, order, y)
            return out.view(*slots.shape, rows)

        return run


KERNELS = (NpuRmsNorm, NpuAddRmsNorm, NpuSwiGlu, NpuRotary, NpuRoute, NpuGroupedLinear)
