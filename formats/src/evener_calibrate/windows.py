"""Runs a loaded model over windows of tokens, one after another, and hands out the keys and values of each."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import cast

import torch

from evener.contracts.declared import StateSlot
from evener.contracts.state import StoredStateProvider
from evener.engine.sampling.pending import PendingStep
from evener.engine.wire.messages import Sampling
from evener.engine.wire.plan import Admission, Plan, TableUpdate
from evener.engine.worker.worker import Worker
from evener.errors import ConfigError

#: Gets a layer's state, and its keys and values of one window: [tokens, heads, dim] each.
See = Callable[[StateSlot, torch.Tensor, torch.Tensor], None]
_KINDS = ("full", "window", "chunk")


class Windows:
    """One window at a time, in the state of one request.

    Args:
        worker: a loaded model on one device.
        length: tokens of a window.

    Raises:
        ConfigError: the state has no room for a window, or there are no keys and values, or they are quantized.
    """

    def __init__(self, worker: Worker, length: int) -> None:
        self._worker, self._assembly, self._facts = worker, worker.assembly, worker.facts
        geometry = self._assembly.geometry
        self.slots = [slot for group in geometry.groups for slot in group.slots if group.spec.kind in _KINDS]
        if not self.slots:
            raise ConfigError("this model keeps no keys and values, so it needs no scales of them")
        if any(slot.scales for slot in self.slots):
            raise ConfigError(
                "the checkpoint asks for a KV cache in eight bits, which would hide how large its keys and values are; "
                "add infer.kv_dtype=bfloat16 and dtype=bfloat16"
            )
        self.length = min(length, self._facts.max_seq_len)
        self._columns = -(-self.length // self._facts.block_size)
        groups = len(geometry.groups)
        if 1 + self._columns * groups > self._facts.slabs:
            raise ConfigError(
                f"a window of {self.length} tokens needs {1 + self._columns * groups} blocks of state, and there are "
                f"{self._facts.slabs}; set --window to less, or infer.kv_memory to more"
            )
        # The slab of each column of each group; slab 0 is the null block's.
        self._slabs = [[1 + column * groups + g for column in range(self._columns)] for g in range(groups)]

    def run(self, tokens: Sequence[int], see: See) -> None:
        """Compute ``tokens``, at most ``length``, and show all keys and values."""
        pages = math.lcm(*self._facts.cuts)
        first = Plan(
            id=-1, admissions=[Admission(0, list(tokens), Sampling(temperature=0.0))],
            updates=[TableUpdate(0, 0, [[slab * pages for slab in slabs] for slabs in self._slabs])],
        )  # fmt: skip
        for start in range(0, len(tokens), self._facts.step_tokens):
            count = min(self._facts.step_tokens, len(tokens) - start)
            more = (first.admissions, first.updates) if start == 0 else ([], [])
            # A token that is sampled takes the place of the next one, which only the last step may do.
            last = start + count == len(tokens)
            step = self._worker.execute(Plan(
                id=-1, admissions=more[0], updates=more[1], slots=[0], starts=[start], counts=[count],
                samples=[0] if last else [],
            ))  # fmt: skip
            if isinstance(step, PendingStep):
                step.wait()
        with torch.inference_mode():
            self._show(len(tokens), see)

    def _show(self, count: int, see: See) -> None:
        where, ids = self._assembly.device.torch_device, torch.int32
        for number, group in enumerate(self._assembly.geometry.groups):
            if group.spec.kind not in _KINDS:
                continue
            used = self._slabs[number][: -(-count // self._facts.block_size)]
            blocks = torch.tensor([slab * group.cut for slab in used], dtype=ids).to(where)
            provider = cast(StoredStateProvider, group.provider)
            for slot in group.slots:
                parts = provider.export_blocks(slot.views, blocks)
                key, value = (part.flatten(0, 1)[:count] for part in parts)
                see(slot, key, value)
