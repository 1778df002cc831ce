"""What the device computes with experts that are in slots.

A step goes on in waves if it needs more experts than there are slots, or is large. The results of the waves are those
of one product with all experts: each (token, expert) pair is computed in one wave, with all pairs of its expert, and
the pairs of a token are summed up in the end, in the order of its choices. A small step whose experts all have slots is
one call of ``routed_experts`` with a map from experts to slots. Which steps are depends on nothing but their routing.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import numpy as np
import torch

from evener.contracts.device import Device
from evener.contracts.ops import Bucket, OpFunction, Static
from evener.contracts.weights import MoEWeights
from evener.ops.composites import linear_static
from evener.resolution.resolver import Resolver
from evener_offload.resident_layer import ResidentLayer

#: Tokens of the largest step that is computed at once if its experts have slots. In larger ones products with experts
#: that are there take long enough to be worth a launch of their own while others are copied.
MOST_TOKENS = 64


class SlotProducts:
    """The experts of one layer, at one bucket.

    Args:
        number: which of the slots' layers it is.
        resolver: the device's.
        together: small steps are one call if all their experts have slots, which are this layer's alone.
    """

    def __init__(
        self, layer: ResidentLayer, number: int, device: Device, resolver: Resolver, path: str, static: Static,
        bucket: Bucket, together: bool,
    ) -> None:  # fmt: skip
        self._layer, self._first, self._device = layer, number * layer.experts, device
        top = static["top"]

        def use(part: str, sizes: dict[str, int], **inner: Any) -> OpFunction:
            return resolver.resolve(part, path, inner, bucket, sizes)

        self._whole: OpFunction | None = None
        stacks = {"gate_up": layer.gate_up.weight, "down": layer.down.weight}
        if together and bucket.high <= MOST_TOKENS:
            self._whole = use("routed_experts", {}, **{**static, **stacks, "placement": None})
        self._gate_up = use("grouped_linear", {"K": top}, **linear_static(layer.gate_up.weight))
        self._act = use("act_and_mul", {"T": top}, inner=static["inner"],
                        **{k: static[k] for k in ("activation", "alpha", "limit", "dtype")})  # fmt: skip
        self._down = use("grouped_linear", {"T": top}, **linear_static(layer.down.weight))
        self._mix = use("mix_experts", {"K": top}, hidden=static["hidden"], dtype=static["dtype"])
        #: The map, and the weights with it; those of the last step mostly serve again.
        self._last: tuple[torch.Tensor, MoEWeights] | None = None

    def __call__(
        self, x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor, w: MoEWeights,
        numbers: np.ndarray[Any, np.dtype[np.int32]], elsewhere: Collection[int] = (),
    ) -> torch.Tensor:  # fmt: skip
        """The experts' sum, [T, hidden].

        Args:
            x, ids, weights: the op's inputs.
            w: the layer's weights; its stacks are not read.
            numbers: ``ids``, on the host.
            elsewhere: experts that are computed elsewhere, and left out.
        """
        layer, needed = self._layer, (numbers + self._first if self._first else numbers).ravel().tolist()
        total: torch.Tensor | None = None
        together = self._whole is not None and len(set(needed)) - len(elsewhere) <= layer.residents.count
        for wave in layer.filled(needed, elsewhere, together):
            if together and self._whole is not None:
                total = self._whole(x, ids, weights, self._placed(w))
                continue
            # -1: the expert is not in the wave.
            slot_of = np.full(layer.experts, -1, dtype=np.int32)
            slot_of[[expert - self._first for expert in wave.slots]] = list(wave.slots.values())
            slots, biases = self._device.upload(slot_of[numbers]), [w.gate_up_bias, w.down_bias]
            if biases != [None, None]:
                expert_of = np.zeros(layer.residents.count, dtype=np.int32)
                expert_of[list(wave.slots.values())] = [expert - self._first for expert in wave.slots]
                biases = _chosen(biases, self._device.upload(expert_of))
            h = self._act(self._gate_up(x, layer.gate_up.value, slots, biases[0]).flatten(0, 1))
            one: torch.Tensor = self._down(h, layer.down.value, slots.reshape(-1, 1), biases[1])
            total = one if total is None else total.add_(one)  # a pair's row is 0 in all waves but one
        if total is None:  # all are computed elsewhere
            return x.new_zeros(x.shape)
        if together:
            return total
        return self._mix(total.view(*numbers.shape, -1), weights)  # type: ignore[no-any-return]

    def _placed(self, w: MoEWeights) -> MoEWeights:
        """The weights of ``routed_experts``, whose stacks and biases are those in the slots."""
        slot_of, copies, expert_of = self._layer.places()
        if self._last is None or self._last[0] is not slot_of:
            biases = _chosen([w.gate_up_bias, w.down_bias], expert_of)
            self._last = slot_of, w._replace(
                gate_up=self._layer.gate_up.value, down=self._layer.down.value, slots=slot_of, copies=copies,
                gate_up_bias=biases[0], down_bias=biases[1],
            )  # fmt: skip
        return self._last[1]


def _chosen(biases: list[torch.Tensor | None], experts: torch.Tensor) -> list[torch.Tensor | None]:
    """The biases of these experts."""
    return [None if bias is None else bias.index_select(0, experts) for bias in biases]

