"""A communicator for a rank that is planned and never runs: ``evener explain`` declares rank 0's part with it."""

from __future__ import annotations

from typing import Any, NoReturn

from evener.contracts.communicator import Communicator, CommunicatorCapabilities
from evener.errors import EngineError


class Planned(Communicator):
    """Rank 0 of ``size`` ranks, of which none is there: every call is an error."""

    def __init__(self, name: str, size: int) -> None:
        self.name, self.rank, self.size = name, 0, size
        self.capabilities = CommunicatorCapabilities(capturable=True)

    def _absent(self, *_: Any, **__: Any) -> NoReturn:
        raise EngineError(f"group {self.name!r} of {self.size} ranks is planned; start them to run a step")

    all_reduce = all_gather = reduce_scatter = all_to_all = broadcast = send = receive = barrier = _absent
