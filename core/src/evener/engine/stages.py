"""Pipeline stages: what a rank passes on in a step, and what comes back.

The stream goes from each stage to the next: float32 [T, hidden], the sum that a layer takes as ``x + residual``, so
that stages compute bit for bit what one rank would. The last stage samples and sends the ids, not the logits, to the
first, which puts them where the next embedding reads them. Nobody waits to send; the first stage takes ids in when a
plan builds on them, which the scheduler keeps as many plans apart as there are stages. It expects them from the plan's
own step on: a device may hold up whoever sends until somebody receives, and then its next synchronization, so what a
plan sends must wait for no later plan.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping

import torch

from evener.contracts.communicator import Communicator
from evener.distributed.world import Ranks
from evener.engine.device_tables import DeviceTables
from evener.engine.plan import Plan


class Stages:
    """One rank's ends of the pipe.

    Args:
        ranks: of a world with stages.
        hidden: width of the stream; dtype: compute type.
        tables: where sampled ids go.
    """

    def __init__(self, ranks: Ranks, hidden: int, dtype: str, tables: DeviceTables) -> None:
        assert ranks.pp is not None and ranks.ids is not None, "a world with stages has groups for them"
        self.world, self._hidden, self._dtype, self._tables = ranks.world, hidden, getattr(torch, dtype), tables
        self._stream, self._ids = ranks.pp, ranks.ids
        self._sending: deque[Callable[[], object]] = deque()
        self._owed: deque[tuple[frozenset[int], torch.Tensor, torch.Tensor, Callable[[], torch.Tensor]]] = deque()

    def room(self, tokens: int) -> torch.Tensor | None:
        """Where a step's stream can arrive; None on the first stage."""
        where = self._tables.tokens.device
        return None if self.world.first_stage else torch.zeros(tokens, self._hidden, dtype=torch.float32, device=where)

    def take(self, room: torch.Tensor) -> torch.Tensor:
        """Let what the stage before has left of a step arrive in ``room``."""
        return self._stream.receive(room, self.world.pp_rank - 1)

    def entry(self, stream: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """What has arrived, as a layer takes it."""
        return torch.zeros_like(stream, dtype=self._dtype), stream

    def pass_on(self, stream: torch.Tensor, plan: Plan, parts: Mapping[str, torch.Tensor]) -> None:
        """Send a step's stream, which must not change any more, to the next stage. The first expects ids back."""
        self._post(self._stream, stream, self.world.pp_rank + 1)
        if self.world.first_stage and plan.samples:
            slots, where = frozenset(plan.slots[row] for row in plan.samples), parts["sample_slots"]
            ids = torch.empty(len(where), dtype=torch.int32, device=where.device)
            arrived = self._ids.expect(ids, self.world.pp_size - 1)
            self._owed.append((slots, where, parts["sample_positions"], arrived))

    def give_ids(self, ids: torch.Tensor) -> None:
        """On the last stage: send what was sampled, which must not change any more."""
        self._post(self._ids, ids.to(torch.int32), 0)

    def take_ids(self, plan: Plan) -> None:
        """On the first stage, before a plan is applied: take in what was sampled for requests that it names, and for
        those whose slots it gives to others."""
        named = {*plan.slots, *(admission.slot for admission in plan.admissions)}
        last = max((at for at, (slots, *_) in enumerate(self._owed, 1) if slots & named), default=0)
        for _ in range(last):
            _, slots, positions, arrived = self._owed.popleft()
            self._tables.tokens[slots, positions] = arrived()

    def _post(self, group: Communicator, tensor: torch.Tensor, target: int) -> None:
        self._sending.append(group.post(tensor, target))
        # Not every library says that something has gone out before it is waited for; what is this old has.
        if len(self._sending) > self.world.pp_size + 1:
            self._sending.popleft()()
