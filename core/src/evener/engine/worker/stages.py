"""Pipeline stages: the tensors that a rank sends to and receives from other stages in a step.

Each stage sends the residual stream to the next: float32 [T, hidden], the sum that a layer takes as ``x + residual``.
So stages compute bit for bit what one rank would. The last stage samples and sends the ids, not the logits, back to the
first stage, which writes them where the next step's embedding reads them.

No send waits for its receiver. The first stage starts to receive the ids in the step that samples them, and waits for
them in the step that uses them; the scheduler keeps as many plans between the two as there are stages. The receive must
start that early: on some devices a send holds up its sender's next synchronization until it is received, so a send must
never wait for a later plan.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import NamedTuple

import torch

from evener.contracts.communicator import Communicator
from evener.distributed.world import RankGroups
from evener.engine.inputs.device_tables import DeviceTables
from evener.engine.wire.plan import Plan


class _ExpectedIds(NamedTuple):
    """The ids of one step that are being received: for which slots, on the host and on the device (int32 [R]), and for
    which positions (int32 [R]). ``wait`` returns the ids, int32 [R]."""

    slots: frozenset[int]
    device_slots: torch.Tensor
    positions: torch.Tensor
    wait: Callable[[], torch.Tensor]


class PipelineChannel:
    """One rank's end of the pipeline.

    Args:
        ranks: this rank's groups; its world has several stages.
        hidden: width of the stream.
        dtype: the compute dtype.
        tables: receive the sampled ids.
    """

    def __init__(self, ranks: RankGroups, hidden: int, dtype: str, tables: DeviceTables) -> None:
        assert ranks.pp is not None and ranks.ids is not None, "a world with stages has groups for them"
        self.world, self._hidden, self._dtype, self._tables = ranks.world, hidden, getattr(torch, dtype), tables
        self._stream, self._ids = ranks.pp, ranks.ids
        self._sending: deque[Callable[[], object]] = deque()
        self._expected_ids: deque[_ExpectedIds] = deque()

    def stream_buffer(self, tokens: int) -> torch.Tensor | None:
        """A zeroed buffer, float32 [tokens, hidden], for a step's stream; None on the first stage."""
        where = self._tables.tokens.device
        return None if self.world.first_stage else torch.zeros(tokens, self._hidden, dtype=torch.float32, device=where)

    def receive_stream(self, buffer: torch.Tensor) -> torch.Tensor:
        """Receive a step's stream from the stage before into ``buffer``."""
        return self._stream.receive(buffer, self.world.pp_rank - 1)

    def layer_input(self, stream: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """A received stream as the pair that a layer takes: zeros in the compute dtype, and the stream as residual."""
        return torch.zeros_like(stream, dtype=self._dtype), stream

    def send_stream(
        self, stream: torch.Tensor, plan: Plan, sample_slots: torch.Tensor, sample_positions: torch.Tensor
    ) -> None:
        """Send a step's stream to the next stage; no tensor may change afterwards. The first stage also starts to
        receive the step's ids: for which slots and positions, int32 [S]."""
        self._isend(self._stream, stream, self.world.pp_rank + 1)
        if self.world.first_stage and plan.samples:
            ids = torch.empty(len(sample_slots), dtype=torch.int32, device=sample_slots.device)
            wait = self._ids.irecv(ids, self.world.pp_size - 1)
            slots = frozenset(plan.slots[row] for row in plan.samples)
            self._expected_ids.append(_ExpectedIds(slots, sample_slots, sample_positions, wait))

    def send_ids(self, ids: torch.Tensor) -> None:
        """On the last stage: send the sampled ids [R] to the first stage; they must not change afterwards."""
        self._isend(self._ids, ids.to(torch.int32), 0)

    def receive_ids(self, plan: Plan) -> None:
        """On the first stage, before a plan is applied: wait for the ids of all earlier steps whose slots this plan
        uses or gives to other requests, and write them into the tables."""
        named = {*plan.slots, *(admission.slot for admission in plan.admissions)}
        last = max((at for at, expected in enumerate(self._expected_ids, 1) if expected.slots & named), default=0)
        for _ in range(last):
            expected = self._expected_ids.popleft()
            self._tables.tokens[expected.device_slots, expected.positions] = expected.wait().to(self._tables.tokens)

    def _isend(self, group: Communicator, tensor: torch.Tensor, target: int) -> None:
        self._sending.append(group.isend(tensor, target))
        # Not every library completes a send before somebody waits for it. One this old has been received, so its wait
        # returns at once.
        if len(self._sending) > self.world.pp_size + 1:
            self._sending.popleft()()
