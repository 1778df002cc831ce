"""What the device computes with experts in slots.

A step is computed in waves if it needs more experts than there are slots, or if it is large. The results of the waves
are equal to those of one product with all experts: each (token, expert) pair is computed in one wave, with all pairs of
its expert. The pairs of a token are summed at the end, in the order in which the token chose them.

A small step whose experts all have slots is one call of ``routed_experts`` with a map from experts to slots. Where
layers share slots, a large step is one call, too: copies take longer than products there, and the time to submit
products would delay them. But a step that needs most of the slots is computed in waves, because the next layer's
copies would have to wait for its products.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import Any

import numpy as np
import torch

from evener.contracts.device import Device
from evener.contracts.ops import Bucket, OpFunction, Static
from evener.contracts.weights import MoEWeights
from evener.errors import EngineError
from evener.ops.composites import linear_static
from evener.resolution.resolver import Resolver
from evener_offload.resident_layer import ResidentLayer
from evener_offload.residents import Wave

#: Tokens of the largest step that is one call if its experts have slots. In larger steps products with the experts in
#: slots take long enough to be worth launches of their own while others are copied.
MOST_TOKENS = 64
#: One call uses at most this part of shared slots, so that the other slots can be filled for the next layer.
_SHARED_PART = 0.75


class SlotProducts:
    """The experts of one layer, at one bucket.

    Args:
        number: of the layer, among those that share the slots.
        resolver: the device's.
        shared: whether other layers use the same slots.
    """

    def __init__(
        self, layer: ResidentLayer, number: int, device: Device, resolver: Resolver, path: str, static: Static,
        bucket: Bucket, shared: bool,
    ) -> None:  # fmt: skip
        self._layer, self._first, self._device = layer, number * layer.experts, device
        top = static["top"]

        def use(part: str, sizes: dict[str, int], **inner: Any) -> OpFunction:
            return resolver.resolve(part, path, inner, bucket, sizes)

        self._whole: OpFunction | None = None
        stacks = {"gate_up": layer.gate_up.weight, "down": layer.down.weight}
        self._shared = shared
        if shared or bucket.high <= MOST_TOKENS:
            self._whole = use("routed_experts", {}, **{**static, **stacks, "placement": None})
        self._gate_up = use("grouped_linear", {"K": top}, **linear_static(layer.gate_up.weight))
        self._act = use("act_and_mul", {"T": top}, inner=static["inner"],
                        **{k: static[k] for k in ("activation", "alpha", "limit", "dtype")})  # fmt: skip
        self._down = use("grouped_linear", {"T": top}, **linear_static(layer.down.weight))
        self._mix = use("mix_experts", {"K": top}, hidden=static["hidden"], dtype=static["dtype"])
        #: The map and the weights of the last step. Often the next step can use them again.
        self._last: tuple[torch.Tensor, MoEWeights] | None = None

    def __call__(
        self, x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor, w: MoEWeights,
        numbers: np.ndarray[Any, np.dtype[np.int32]], elsewhere: Collection[int] = (),
        before: Callable[[Wave | None], None] | None = None,
    ) -> torch.Tensor:  # fmt: skip
        """The weighted sum of the experts, [T, hidden].

        Args:
            x, ids, weights: the op's inputs.
            w: the layer's weights; its stacks are not read.
            numbers: ``ids`` on the host, [T, k].
            elsewhere: experts that the host computes; they are left out.
            before: called once, before the last wave's products are submitted, with that wave (None: there is none).
        """
        layer, biases = self._layer, [w.gate_up_bias, w.down_bias]
        total: torch.Tensor | None = None
        needed = (np.flatnonzero(np.bincount(numbers.ravel(), minlength=layer.experts)) + self._first).tolist()
        most = layer.residents.count * (_SHARED_PART if self._shared else 1)
        together = self._whole is not None and len(needed) - len(elsewhere) <= most
        waves = layer.waves(needed, elsewhere, together)
        if not waves:  # all are computed elsewhere
            if before is not None:
                before(None)
            return x.new_zeros(x.shape)
        # One upload, before the experts' copies are submitted: a later upload would wait for all these copies.
        if together and self._shared:
            placed = self._placed_in(waves[0], w)
        elif not together:
            slots_of, experts_of = self._maps(waves)
            places = self._device.upload(slots_of[:, numbers])
            others = None if biases == [None, None] else self._device.upload(experts_of)
        for number, wave in enumerate(layer.filled(waves)):
            if before is not None and number == len(waves) - 1:
                before(wave)
            if together and self._whole is not None:
                total = self._whole(x, ids, weights, placed if self._shared else self._placed(w))
                continue
            slots = places[number]
            if others is not None:
                biases = _chosen([w.gate_up_bias, w.down_bias], others[number])
            h = self._act(self._gate_up(x, layer.gate_up.value, slots, biases[0]).flatten(0, 1))
            one: torch.Tensor = self._down(h, layer.down.value, slots.reshape(-1, 1), biases[1])
            total = one if total is None else total.add_(one)  # a pair's row is 0 in all other waves
        assert total is not None, "there is a wave"
        if together:
            return total
        return self._mix(total.view(*numbers.shape, -1), weights)  # type: ignore[no-any-return]

    def at_once(
        self, x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor, w: MoEWeights,
        places: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
    ) -> torch.Tensor:  # fmt: skip
        """The weighted sum of the experts in slots, [T, hidden], in one call that can be captured.

        Args:
            places: see ``ResidentLayer.places``; experts without a slot are left out.

        Raises:
            EngineError: a step of so many rows is not one call.
        """
        if self._whole is None:
            raise EngineError(f"experts in slots are computed at once in steps of up to {MOST_TOKENS} rows")
        return self._whole(x, ids, weights, self._weights(w, *places))  # type: ignore[no-any-return]

    def _maps(self, waves: Sequence[Wave]) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
        """The maps of the waves, int32: [waves, experts], the slot of each expert, -1 if it is not in the wave; and
        [waves, slots], the expert in each slot, any number if the slot is not the wave's."""
        slots_of = np.full((len(waves), self._layer.experts), -1, dtype=np.int32)
        experts_of = np.zeros((len(waves), self._layer.residents.count), dtype=np.int32)
        for number, wave in enumerate(waves):
            experts = np.fromiter(wave.slots, np.int32, len(wave.slots)) - self._first
            slots = np.fromiter(wave.slots.values(), np.int32, len(wave.slots))
            slots_of[number, experts], experts_of[number, slots] = slots, experts
        return slots_of, experts_of

    def _placed(self, w: MoEWeights) -> MoEWeights:
        """The weights for ``routed_experts``, with the stacks, biases and map of the slots."""
        places = self._layer.places()
        if self._last is None or self._last[0] is not places[0]:
            self._last = places[0], self._weights(w, *places)
        return self._last[1]

    def _placed_in(self, wave: Wave, w: MoEWeights) -> MoEWeights:
        """As ``_placed``, with only the slots of ``wave``: other slots have experts of other layers."""
        (slots_of,), (experts_of,) = self._maps([wave])
        maps, count = self._device.upload(np.concatenate([slots_of, slots_of >= 0, experts_of])), len(slots_of)
        return self._weights(w, maps[:count].view(-1, 1), maps[count : 2 * count], maps[2 * count :])

    def _weights(
        self, w: MoEWeights, slot_of: torch.Tensor, copies: torch.Tensor, expert_of: torch.Tensor
    ) -> MoEWeights:
        biases = _chosen([w.gate_up_bias, w.down_bias], expert_of)
        return w._replace(
            gate_up=self._layer.gate_up.value, down=self._layer.down.value, slots=slot_of, copies=copies,
            gate_up_bias=biases[0], down_bias=biases[1],
        )  # fmt: skip


def _chosen(biases: list[torch.Tensor | None], experts: torch.Tensor) -> list[torch.Tensor | None]:
    """The biases of these experts."""
    return [None if bias is None else bias.index_select(0, experts) for bias in biases]
