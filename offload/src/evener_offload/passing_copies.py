"""Copies of passing experts to their slots, as a part of captured steps (``captured_passing``).

They run on a stream of their own that branches off where the step begins: the host submits nothing more, and waits for
nothing more. There are a few sets of slots, which layers use in turn (``passing_slots``): a set is filled again as soon
as the products with it are done, so that the link goes on while the host computes, and while layers on the device run.
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
    """Submits them.

    Args:
        slots: to which is copied.
        part: says how many experts.
        own: has the embedding, where steps begin.
        stream: of the copies; None: the device has one queue, and nothing runs beside them.
        running: whether a step is submitted that is captured, now or next.
    """

    def __init__(
        self, slots: PassingSlots, part: PassingPart, own: Builder, device: Device, stream: Any,
        running: Callable[[], bool],
    ) -> None:  # fmt: skip
        self._slots, self._part, self._device, self._stream, self._running = slots, part, device, stream, running
        #: The embedding until it notes that a step begins.
        self._first = next((site for site in own.sites if site.op == "embedding"), None)
        #: Events: where the step that is submitted began, and after the copies of each layer.
        self._begun: Any = None
        self._copied: list[Any] = [None] * len(slots.order)

    def begin(self, bucket: Bucket) -> None:
        """Submit the first ones. They wait for the beginning of the step, not for the layers before."""
        begun, self._begun = self._begun or self._event(), None
        for number in range(self._slots.sets):
            self._copy(number, bucket, begun)
        if self._first is not None:
            self._first.table = tuple(map(self._noting, self._first.table))
            self._first = None

    def wait(self, number: int) -> None:
        """Let the current stream wait for those of a layer."""
        if (copied := self._copied[number]) is not None:
            copied.wait()

    def follow(self, number: int, bucket: Bucket) -> None:
        """Submit those of the layer that uses the slots after this one, whose products have been submitted."""
        if number + self._slots.sets < len(self._slots.order):
            self._copy(number + self._slots.sets, bucket, self._event())

    def _copy(self, number: int, bucket: Bucket, after: Any) -> None:
        """Submit the copies of a layer, which wait for an event."""
        layer = self._slots.order[number]
        if after is not None:
            after.wait(self._stream)
        with self._stream or nullcontext():
            layer.copy(self._part.count(layer, bucket))
            self._copied[number] = self._event()

    def _event(self) -> Any:
        """An event after what was submitted to the current stream; None if the device has one queue."""
        if self._stream is None:
            return None
        event = self._device.new_event()
        event.record()
        return event

    def _noting(self, embed: OpFunction) -> OpFunction:
        """The embedding; it notes that a captured step begins, before it is submitted."""

        def run(*inputs: Any) -> Any:
            self._begun = self._event() if self._running() else None
            return embed(*inputs)

        return run
