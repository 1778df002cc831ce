"""Whole decoder layers, where the blocks together take fewer launches than each alone.

In layers with norms on both sides of attention and MLP, a norm ends attention, and a sum and a norm begin the MLP. Here
these are one launch: what attention's norm gives is not stored and read again.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, cast

import torch

from evener.contracts.device import Device
from evener.contracts.ops import OpCall, OpFunction, Variant
from evener.contracts.statics import DecoderLayerStatic
from evener.contracts.weights import AttentionWeights, MLPWeights
from evener.ops.reference.linear import PLAIN
from evener_kernels_triton.composites import TritonAttentionBlock, TritonMlpBlock, mlp_rows, norms_apart
from evener_kernels_triton.kernel import TritonKernel
from evener_kernels_triton.packed import PACKED
from evener_kernels_triton.state import LAYOUT, PagedMeta, PagedViews
from evener_kernels_triton.stored import STORED
from evener_kernels_triton.tuning import Tuning


class TritonDecoderLayer(TritonKernel):
    """Both blocks, if there is a norm after attention: that norm, the sum and the norm before the MLP in one launch."""

    op = "decoder_layer"
    packings = (PLAIN, STORED, PACKED)
    state_layout = LAYOUT
    non_default = frozenset({"query_scale"})

    def __init__(self, device: Device, tuning: Tuning) -> None:
        super().__init__(device, tuning)
        self._attention, self._mlp = TritonAttentionBlock(device, tuning), TritonMlpBlock(device, tuning)

    def _unsupported_reason(self, call: OpCall) -> str | None:
        s = cast(DecoderLayerStatic, call.static)
        attention, mlp = s["attention"], s["mlp"]
        if not attention["post_norm"]:
            return "is for layers with a norm after attention; in others the blocks take as few launches"
        if (attention["eps"], attention["offset"]) != (mlp["eps"], mlp["offset"]):
            return "computes norms with one eps and one offset"
        for weight in (attention["qkv"], attention["o"], mlp["gate_up"], mlp["down"]):
            if any(part.format.activation for part in weight.parts):
                # Resolution asks the kernels of the blocks, not one of a layer, and reports what they say.
                return "leaves weights whose checkpoint lets activations be rounded to the blocks, which report it"
        first, second = self._halves(call)
        reason = self._attention.supports(first) or self._mlp.supports(second)
        tuning = self.tuning.with_changes(second.variant).part("enter")
        if reason is None and not norms_apart(tuning, second, mlp["gate_up"], mlp["activation"]):
            return "saves no launch where the norm before the MLP is part of the product of one token"
        return reason

    def workspace(self, call: OpCall) -> int:
        first, second = self._halves(call)
        # The rows between the blocks are neither input nor result of the layer.
        between = call.bucket.high * call.static["hidden"] * getattr(torch, call.static["dtype"]).itemsize
        return int(between + max(self._attention.workspace(first), self._mlp.workspace(second)))

    def variants(self, call: OpCall) -> Sequence[Variant]:
        """Those of the blocks that change one product: of four there are thousands of combinations. The tuner compares
        them with the blocks in all of theirs."""
        blocks = zip(("attention", "mlp"), (self._attention, self._mlp), self._halves(call), strict=True)
        return [
            {f"{name}.{key}": value for key, value in variant.items()}
            for name, block, half in blocks
            for variant in block.variants(half)
            if len({key.partition(".")[0] for key in variant}) == 1
        ]

    def build(self, call: OpCall) -> OpFunction:
        first, second = self._halves(call)
        attention = self._attention.build(first)
        mlp = mlp_rows(self.tuning.with_changes(second.variant), second)

        def run(
            x: torch.Tensor, residual: torch.Tensor | None, positions: torch.Tensor, w: AttentionWeights,
            mlp_weights: MLPWeights, views: PagedViews, meta: PagedMeta,
        ) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
            x, stream = attention(x, residual, positions, w, views, meta)
            return mlp(x, stream, mlp_weights, w.post_norm)  # type: ignore[no-any-return]

        return run

    def _halves(self, call: OpCall) -> tuple[OpCall, OpCall]:
        """The calls of attention, without the norm after it, and of the MLP; each with its part of the variant."""
        s = cast(DecoderLayerStatic, call.static)
        attention: Mapping[str, Any] = {**s["attention"], "post_norm": False}

        def half(op: str, name: str, static: Mapping[str, Any]) -> OpCall:
            of = {k.removeprefix(f"{name}."): v for k, v in call.variant.items() if k.startswith(f"{name}.")}
            return replace(call, op=op, static=static, variant=of)

        return half("attention_block", "attention", attention), half("mlp_block", "mlp", {**s["mlp"]})


LAYERS = (TritonDecoderLayer,)
