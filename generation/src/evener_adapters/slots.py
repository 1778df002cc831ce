"""Which adapters (LoRA) are loaded, and which of them have a place on the device."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from typing import TypeVar

from evener.contracts.adapters import AdaptedRequest, AdapterSlots
from evener.engine.wire.messages import LoadAdapter, UnloadAdapter
from evener.engine.wire.plan import AdapterWrite

R = TypeVar("R", bound=AdaptedRequest)


class LoraSlots(AdapterSlots):
    """The adapters of an engine with ``slots`` places for them on the device.

    The ranks keep every loaded adapter in host memory. One gets a place when a request with it starts; if none is free,
    it takes that of the adapter without running requests that was used longest ago. An adapter that was unloaded stays
    until the last of its requests has ended.
    """

    def __init__(self, slots: int) -> None:
        self._loaded: set[str] = set()
        #: Those that the ranks still keep in vain.
        self._unneeded: list[str] = []
        #: The slot of each adapter that has one; the one used longest ago is first.
        self._slots: dict[str, int] = {}
        self._free = list(range(slots - 1, -1, -1))
        self._open, self._running = Counter[str](), Counter[str]()
        self._leaving: set[str] = set()
        self._unwritten: dict[int, str] = {}

    def handle(self, message: LoadAdapter | UnloadAdapter) -> Sequence[LoadAdapter | UnloadAdapter]:
        if isinstance(message, UnloadAdapter):
            self.unload(message.id)
            return self.forgotten()
        if message.last:
            self.load(message.id)
        return [message]

    def load(self, adapter: str) -> None:
        """Requests may name an adapter: the ranks have all its tensors."""
        self._loaded.add(adapter)
        self._leaving.discard(adapter)
        self._unneeded = [each for each in self._unneeded if each != adapter]

    def unload(self, adapter: str) -> None:
        """Forget an adapter when its requests have ended."""
        self._leaving.add(adapter)
        self._forget(adapter)

    def _forget(self, adapter: str) -> None:
        if adapter in self._leaving and not self._open[adapter]:
            self._leaving.remove(adapter)
            if adapter in self._loaded:
                self._loaded.remove(adapter)
                self._unneeded.append(adapter)
            if adapter in self._slots:
                self._free.append(slot := self._slots.pop(adapter))
                self._unwritten.pop(slot, None)

    def open(self, adapter: str) -> bool:
        if adapter:
            if adapter not in self._loaded or adapter in self._leaving:
                return False
            self._open[adapter] += 1
        return True

    def close(self, adapter: str) -> None:
        if adapter:
            self._open[adapter] -= 1
            self._forget(adapter)

    def startable(self, requests: Iterable[R]) -> R | None:
        # One that waits for a place lets only requests without an adapter pass, or it might wait for ever.
        blocked = False
        for request in requests:
            adapter = request.message.adapter
            if not adapter or (not blocked and self._has_place(adapter)):
                return request
            blocked = True
        return None

    def _has_place(self, adapter: str) -> bool:
        return adapter in self._slots or bool(self._free) or not all(self._running[each] for each in self._slots)

    def start(self, adapter: str) -> int:
        if not adapter:
            return -1
        slot = self._slots.pop(adapter, None)
        if slot is None:
            if not self._free:
                self._free.append(self._slots.pop(next(each for each in self._slots if not self._running[each])))
            slot = self._free.pop()
            self._unwritten[slot] = adapter
        self._slots[adapter] = slot
        self._running[adapter] += 1
        return slot

    def stop(self, adapter: str) -> None:
        self._running[adapter] -= 1

    def writes(self) -> list[AdapterWrite]:
        found = [AdapterWrite(slot, adapter) for slot, adapter in self._unwritten.items()]
        self._unwritten.clear()
        return found

    def forgotten(self) -> list[UnloadAdapter]:
        found, self._unneeded = self._unneeded, []
        return [UnloadAdapter(adapter) for adapter in found]
