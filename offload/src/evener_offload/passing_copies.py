"""Copies of the experts that pass to their slots, as a part of captured steps (``captured_passing``).

The copies run on a stream of their own, which branches off where the step begins. In a replay the host submits none of
them, and waits for none. Layers use a few sets of slots in turn (``passing_slots``). A set is filled again as soon as
the products with it are done. So the link is busy while the host computes, and while the device's own layers run.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

from evener.contracts.device import Device
from evener.contracts.ops import Bucket, OpFunction
from evener.layers.builder import Builder
from evener_offload.passing_part import PassingPart
from evener_offload.passing_slots import PassingSlots


class PassingCopies:
    """Submits the copies.

    Args:
        slots: the targets of the copies.
        part: says how many experts pass.
        own: has the embedding, with which steps begin.
        stream: for the copies; None: the device has only one queue, and nothing runs beside the copies.
        running: whether the step being submitted is captured, now or on its next run.
    """

    def __init__(
        self, slots: PassingSlots, part: PassingPart, own: Builder, device: Device, stream: Any,
        running: Callable[[], bool],
    ) -> None:  # fmt: skip
        self._slots, self._part, self._device, self._stream, self._running = slots, part, device, stream, running
        #: The embedding; None once its functions have been replaced by those of ``_noting``.
        self._first = next((site for site in own.sites if site.op == "embedding"), None)
        #: Events: at the beginning of the step being submitted, and after the copies of each layer.
        self._begun: Any = None
        self._copied: list[Any] = [None] * len(slots.order)

    def begin(self, bucket: Bucket) -> None:
        """Submit the copies of the first layers, one for each set. They wait only for the beginning of the step."""
        begun, self._begun = self._begun or self._event(), None
        for number in range(self._slots.sets):
            self._copy(number, bucket, begun)
        if self._first is not None:
            self._first.table = tuple(map(self._noting, self._first.table))
            self._first = None

    def wait(self, number: int) -> None:
        """Let the current stream wait for the copies of a layer."""
        if (copied := self._copied[number]) is not None:
            copied.wait()

    def follow(self, number: int, bucket: Bucket) -> None:
        """Submit the copies of the layer that uses the slots after layer ``number``. The products of layer ``number``
        have been submitted."""
        if number + self._slots.sets < len(self._slots.order):
            self._copy(number + self._slots.sets, bucket, self._event())

    def _copy(self, number: int, bucket: Bucket, after: Any) -> None:
        """Submit the copies of a layer. They wait for the event ``after``, if there is one."""
        layer = self._slots.order[number]
        if after is not None:
            after.wait(self._stream)
        with self._stream or nullcontext():
            layer.copy(self._part.count(layer, bucket))
            self._copied[number] = self._event()

    def _event(self) -> Any:
        """A new event, recorded on the current stream; None if the device has only one queue."""
        if self._stream is None:
            return None
        event = self._device.new_event()
        event.record()
        return event

    def _noting(self, embed: OpFunction) -> OpFunction:
        """``embed`` that, before it is submitted, records the event at which a captured step begins."""

        def run(*inputs: Any) -> Any:
            self._begun = self._event() if self._running() else None
            return embed(*inputs)

        return run
