"""Kernels of this package: rotary by the vendor's op, and sampling with filters on the host."""

from __future__ import annotations

import logging

import torch

from evener.contracts.ops import Kernel, OpCall, OpFunction
from evener.ops.reference.sampling import sample
from evener_backend_parts.vllm_ops import VendorKernel, aligned

log = logging.getLogger("evener.gcu")
ROTARY = "_C::rotary_embedding"


class GcuRotary(VendorKernel):
    """``rotary`` in place, where all of a head is rotated."""

    op = "rotary"

    def refusal(self, call: OpCall) -> str | None:
        if call.static["rotary_dim"] != call.static["head_dim"]:
            return f"rotates whole heads, not {call.static['rotary_dim']} of {call.static['head_dim']} elements"
        return self.ops.refusal(ROTARY, call.device.variant)

    def build(self, call: OpCall) -> OpFunction:
        function, size = self.ops.function(ROTARY), int(call.static["head_dim"])
        halves = not call.static["interleaved"]

        def run(
            positions: torch.Tensor, query: torch.Tensor, key: torch.Tensor, cos_sin: torch.Tensor
        ) -> tuple[torch.Tensor, torch.Tensor]:
            # Rows of all heads: the vendor's source takes the last dimension as a row.
            q, k = (aligned(t.reshape(t.shape[0], -1), call.device.alignment) for t in (query, key))
            if q.numel():
                # The table in the compute dtype: only this step's rows of it are converted.
                rows = cos_sin.index_select(0, positions).to(q.dtype)
                place = torch.arange(rows.shape[0], dtype=positions.dtype, device=positions.device)
                function(positions=place, query=q, key=k, head_size=size, cos_sin_cache=rows, is_neox=halves)
            return q.view(query.shape), k.view(key.shape)

        return run

    def workspace(self, call: OpCall) -> int:
        # Copies of query and key where they have strides, and the step's rows of the table twice.
        heads = int(call.static.get("heads", 0)) + int(call.static.get("kv_heads", 0))
        return 4 * call.bucket.high * int(call.static["head_dim"]) * (heads + 2)


class GcuHostSort(Kernel):
    """``sample`` with filters, on the host: sorting a vocabulary and its cumulative sum abort on the device. It is said
    once, in the log, and such a step cannot be captured."""

    op, name, priority = "sample", "gcu.host_sort", 100

    def __init__(self) -> None:
        self._announced = False

    def supports(self, call: OpCall) -> str | None:
        return None if call.static["filters"] else "nothing is sorted without filters"

    def build(self, call: OpCall) -> OpFunction:
        if not self._announced:
            self._announced = True
            log.warning(
                "top_k, top_p and min_p run on the host: this device can neither sort a vocabulary nor sum it up"
            )
        compute = sample(call.static, _no_other)

        def run(logits: torch.Tensor, *columns: torch.Tensor) -> torch.Tensor:
            drawn: torch.Tensor = compute(logits.cpu(), *(column.cpu() for column in columns))
            return drawn.to(logits.device)

        return run


def _no_other(op: str, /, **_: object) -> OpFunction:
    raise AssertionError(f"a primitive uses no other op, and {op} was asked for")
