"""A communicator for a model that is declared and not run."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NoReturn

from evener.contracts.communicator import Communicator, CommunicatorCapabilities
from evener.errors import EngineError

if TYPE_CHECKING:
    import torch


class ExplainCommunicator(Communicator):
    """Rank 0 of ``size`` ranks that do not exist: with it ``evener explain`` declares and resolves the model.
    ``all_gather`` takes all ranks to give what this one gives: so they settle what they settle before they run. Every
    other collective raises ``EngineError``."""

    def __init__(self, name: str, size: int) -> None:
        self.name, self.rank, self.size = name, 0, size
        self.capabilities = CommunicatorCapabilities(capturable=True)

    def _absent(self, *_: Any, **__: Any) -> NoReturn:
        raise EngineError(f"group {self.name!r} of {self.size} ranks is only planned; start the ranks to run a step")

    def all_gather(self, tensor: torch.Tensor, dim: int = -1) -> torch.Tensor:
        import torch

        return torch.cat([tensor] * self.size, dim)

    all_reduce = reduce_scatter = all_to_all = broadcast = send = receive = barrier = _absent
