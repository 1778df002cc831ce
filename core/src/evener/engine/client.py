"""The channel between a front end and one engine, seen from the front end.

An implementation is inline (the step runs inside ``receive``), a thread, or a process; nobody above this line can
tell which.
"""

from __future__ import annotations

from abc import ABC, abstractmethod

from evener.engine.messages import FromController, ToController


class EngineClient(ABC):
    """Sends requests to a controller and receives its events.

    The first event is ``Ready(info)`` (or ``Dead``). ``info`` has the keys ``model`` (path), ``served_name``,
    ``max_model_len``, ``vocab_size``, ``backend``, ``backend_reason`` and ``manifest`` (a dict). After ``Dead`` or
    ``close`` nothing more comes.
    """

    @abstractmethod
    def send(self, message: ToController) -> None:
        """Hand one message over, in order. Safe to call from any thread, also while ``receive`` blocks; returns
        without waiting for the engine. After ``Dead`` or ``close`` messages are dropped, because their requests have
        ended already."""

    @abstractmethod
    def receive(self, timeout: float | None) -> list[FromController]:
        """The events since the last call, in order. Blocks until there is one, until ``timeout`` seconds have passed
        (then ``[]``; None: no limit), or until ``close``. Called from one thread at a time."""

    @abstractmethod
    def close(self, drain: bool = False) -> None:
        """Stop the engine and free what it holds; with ``drain`` running requests finish first. Wakes a blocked
        ``receive``. Calling it again does nothing."""
