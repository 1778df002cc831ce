"""Which experts are in slots that several layers share, one layer after the other. Does not import torch."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence

from evener_offload.residents import Residents, Wave


class PassingExperts(Residents):
    """``Residents`` for layers that share ``count`` slots, and that a step reaches in turn. An expert that was copied
    ahead stays until its layer is reached. Experts of layers that were reached leave first: a step needs each once.

    Args:
        experts: experts of a layer. Those of layer i are numbered from ``i * experts``.
    """

    def __init__(self, count: int, experts: int) -> None:
        super().__init__(count)
        self._experts = experts
        #: Experts that were copied ahead, and whose layer has not been reached since.
        self._coming: set[int] = set()

    def waves(
        self, needed: Iterable[int], late: Collection[int] = (), elsewhere: Collection[int] = (), together: bool = False
    ) -> Sequence[Wave]:
        """``Residents.waves`` for one layer's experts. If there are too few slots, experts of later layers leave."""
        found = super().waves(needed, late, elsewhere, together)
        self._coming.intersection_update(self._slot)
        for expert in [expert for expert in self._slot if expert in self._coming]:
            self._slot.move_to_end(expert)  # behind those that have just been used
        return found

    def ahead(self, guessed: Sequence[int]) -> Wave:
        """Give at most half of the slots to experts that the next layer will probably need, the likeliest first."""
        return self.further(guessed, max(1, self.count // 2))

    def further(self, guessed: Sequence[int], most: int) -> Wave:
        """Give slots to at most ``most`` experts that a later layer will probably need, the likeliest first."""
        here = [expert for expert in guessed if expert in self._slot]
        self._coming.update(here)
        for expert in here:
            self._slot.move_to_end(expert)
        ahead = self._place_ahead(guessed, most, self._coming)
        self._coming.update(ahead)
        self.guesses += len(ahead)
        return Wave.of_copies(ahead)

    def _judge(self, needed: Sequence[int]) -> None:
        if not needed:
            return
        layer = needed[0] // self._experts
        reached = {expert for expert in self._coming if expert // self._experts == layer}
        self._coming -= reached
        wrong = reached.difference(needed)
        self.right, self.wasted = self.right + len(reached) - len(wrong), self.wasted + len(wrong)
        for expert in sorted(wrong):
            self._slot.move_to_end(expert, last=False)
