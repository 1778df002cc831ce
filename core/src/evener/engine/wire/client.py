"""The interface through which a front end uses one engine.

The engine may run inline (steps run inside ``receive``), in a thread, or in a process. The front end need not know
which.
"""

from __future__ import annotations

from abc import ABC, abstractmethod

from evener.engine.wire.messages import FromController, ToController


class EngineClient(ABC):
    """Sends requests to a controller and receives its events.

    The first event is ``Ready(info)`` with the engine's ``EngineInfo``, or ``Dead``. After ``Dead`` or ``close``
    nothing more comes.
    """

    @abstractmethod
    def send(self, message: ToController) -> None:
        """Queue one message; messages keep their order. Safe to call from any thread, also while ``receive`` blocks.
        Does not wait for the engine. After ``Dead`` or ``close`` messages are dropped: their requests have ended."""

    @abstractmethod
    def receive(self, timeout: float | None) -> list[FromController]:
        """The events since the last call, in order. Blocks until there is one, until ``timeout`` seconds have passed
        (then ``[]``; None: no limit), or until ``close``. Called from one thread at a time."""

    @abstractmethod
    def close(self, drain: bool = False) -> None:
        """Stop the engine and free its resources; with ``drain`` open requests finish first. Wakes a blocked
        ``receive``. Calling it again does nothing."""
