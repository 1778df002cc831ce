"""Expert layers: rows sorted by expert, one native matrix product for each expert that has rows."""

from __future__ import annotations

import torch

from evener.contracts.ops import OpCall, OpFunction
from evener.contracts.quant import PackedWeight
from evener.ops.reference.linear import PLAIN
from evener_backend_cpu.primitives import NativeKernel


class NativeGroupedLinear(NativeKernel):
    """Weights of experts without rows are not read."""

    op = "grouped_linear"
    packings = (PLAIN,)

    def build(self, call: OpCall) -> OpFunction:
        device, function = self.device, self.native.function("linear", call.static["dtype"])
        rows, columns, experts = (call.static[k] for k in ("rows", "columns", "experts"))

        def run(
            x: torch.Tensor, weight: PackedWeight, slots: torch.Tensor, bias: torch.Tensor | None = None
        ) -> torch.Tensor:
            flat, width = slots.flatten(), slots.shape[1]
            order = flat.argsort(stable=True)
            counts = (flat + 1).bincount(minlength=experts + 1).tolist()
            picked = x.index_select(0, order if width == 1 else order.div(width, rounding_mode="floor"))
            sorted_rows = x.new_empty(len(order), rows)
            start = counts[0]  # slot -1 sorts first
            sorted_rows[:start] = 0
            size = x.element_size()
            for slot, count in enumerate(counts[1:]):
                if not count:
                    continue
                own = None if bias is None else bias[slot].data_ptr()
                into = sorted_rows.data_ptr() + start * rows * size
                given = picked.data_ptr() + start * columns * size
                function(given, count, weight.data[slot].data_ptr(), None, own, rows, columns, into, device.threads)
                start += count
            y = torch.empty_like(sorted_rows)
            y[order] = sorted_rows
            return y.view(*slots.shape, rows)

        return run


EXPERTS = (NativeGroupedLinear,)
