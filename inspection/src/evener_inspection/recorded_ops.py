"""The inputs that a model calls its ops with: steps over random tokens run with every composite expanded into its
parts, and the inputs of each part and of each composite are kept."""

from __future__ import annotations

import math
import random
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from evener.contracts.ops import Bucket, OpCall, OpFunction, OpSchema
from evener.contracts.quant import PackedWeight
from evener.engine.sampling.pending import PendingStep
from evener.engine.wire.messages import Sampling
from evener.engine.wire.plan import Admission, Plan, TableUpdate
from evener.engine.worker.worker import Worker
from evener.resolution.candidates import Candidates, op_call
from evener.resolution.resolver import Resolver
from evener.tuning_files.measurements import TuningTable, call_key

#: Bytes of inputs, of different layers, that a timed run reads: more than a device's caches hold, so that weights come
#: from memory as they do in a step.
MIN_COLD_BYTES = 256 << 20
#: The least and the most calls that are kept: several, so that a run of small ones is long enough to be timed.
MIN_CALLS, MAX_CALLS = 4, 24
#: Tokens of one prompt in a recorded prefill step.
PROMPT = 512


@dataclass
class RecordedOp:
    """One op with its static parameters in one bucket, and inputs of several of its calls."""

    schema: OpSchema
    path: str
    call: OpCall
    inputs: list[tuple[Any, ...]] = field(default_factory=list)
    nbytes: int = 0


class RecordingResolver(Resolver):
    """Expands every composite into its parts, chooses kernels for these by priority, and records their inputs.

    Attributes:
        recorded: by the key of a tuning file; parts come before composites.
    """

    def __init__(self, available: Candidates) -> None:
        single = {name for name, schema in available.schemas.items() if not schema.composite}
        parts = [each for each in available.kernels if each.value.op in single]
        super().__init__(replace(available, kernels=parts, tuned=TuningTable()))
        self.recorded: dict[tuple[str, int, str], RecordedOp] = {}

    def resolve(
        self, op: str, path: str, static: Mapping[str, Any], bucket: Bucket, known: Mapping[str, int] | None = None
    ) -> OpFunction:
        run = super().resolve(op, path, static, bucket, known)
        if op.startswith("state."):
            return run
        schema = self.available.schemas[op]
        call = op_call(self.available, schema, static, bucket)
        key = call_key(call)

        def recording(*inputs: Any) -> Any:
            found = self.recorded.get(key)
            number = 0 if found is None else len(found.inputs)
            wanted = found is None or number < MIN_CALLS or (number < MAX_CALLS and found.nbytes < MIN_COLD_BYTES)
            kept = _kept(schema, inputs) if wanted else ()
            result = run(*inputs)
            if wanted:
                found = self.recorded.setdefault(key, RecordedOp(schema, path, call))
                found.inputs.append(kept)
                found.nbytes += sum(t.nbytes for t in tensors_in(kept))
            return result

        return recording


def _kept(schema: OpSchema, inputs: Sequence[Any]) -> tuple[Any, ...]:
    """The inputs, activations copied: a step overwrites them; weights stay."""
    rows = [declared.shape[:1] in (("T",), ("R",), ("…",)) for declared in schema.inputs]
    return tuple(
        value.clone() if grows and isinstance(value, torch.Tensor) else value
        for grows, value in zip(rows, inputs, strict=False)
    )


def tensors_in(value: Any) -> Iterator[torch.Tensor]:
    """The tensors among inputs, those of packed weights too; objects of state providers are left out."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, (tuple, list)):
        for inner in value:
            yield from tensors_in(inner)
    elif isinstance(value, PackedWeight):
        yield from tensors_in(value.data)


class Steps:
    """Runs steps of a loaded model.

    Args:
        context: earlier tokens of a decoding request, if the state holds as many.
    """

    def __init__(self, worker: Worker, context: int) -> None:
        self._worker, self._facts = worker, worker.facts
        self._context = min(context, self._facts.step_tokens, self._facts.max_seq_len - 1)
        self._random = random.Random(0)

    def record(self, buckets: Iterable[Bucket]) -> dict[tuple[str, int, str], RecordedOp]:
        """The calls of one step for each bucket, with as many tokens as it holds: up to ``max_reqs`` tokens a decode
        step of so many requests, above that a prefill step."""
        a, buckets = self._worker.assembly, sorted(buckets)
        available, most = a.resolver.available, self._facts.max_reqs
        decodes = [b.high for b in buckets if b.high <= most]
        context = self._room(max(decodes, default=1))
        at_once = max(1, self._facts.step_tokens // max(1, context))
        for first in range(0, max(decodes, default=0) if context else 0, at_once):
            self._run(range(first, min(first + at_once, max(decodes))), 0, context)
        recorder = RecordingResolver(available)
        for site in a.build.sites:
            site.table = tuple(
                recorder.resolve(site.op, site.path, site.static, bucket) if bucket in buckets else known
                for bucket, known in zip(available.buckets, site.table, strict=True)
            )
        for bucket in buckets:
            if bucket.high <= most:
                self._run(range(bucket.high), context, 1)
            else:
                self._run(range(-(-bucket.high // min(PROMPT, self._facts.max_seq_len))), 0, 0, bucket.high)
        return recorder.recorded

    def _room(self, rows: int) -> int:
        """How many earlier tokens of each row the state can hold."""
        return max(0, min(self._context, self._columns(rows) * self._facts.block_size - 1))

    def _columns(self, rows: int) -> int:
        return (self._facts.slabs - 1) // (rows * max(1, len(self._facts.specs)))

    def _run(self, slots: Sequence[int], before: int, count: int, tokens: int = 0) -> None:
        """A step in which each slot has ``before`` tokens and computes ``count``, or all together ``tokens``."""
        rows = len(slots)
        counts = [tokens // rows + (i < tokens % rows) for i in range(rows)] if tokens else [count] * rows
        size, groups, slab = self._facts.block_size, len(self._facts.specs), math.lcm(*self._facts.cuts)
        columns = -(-(before + max(counts)) // size)
        # If the pool is too small, requests share blocks: their numbers are wrong then, but not their times.
        usable = max(1, self._facts.slabs - 1)
        vocabulary = self._worker.assembly.model.vocab_size
        admissions, updates = [], []
        for slot, n in zip(slots, counts, strict=True):
            ids = [self._random.randrange(vocabulary) for _ in range(before + n)]
            admissions.append(Admission(slot, ids, Sampling(temperature=0.0)))
            blocks = [
                [(1 + ((slot * columns + c) * groups + g) % usable) * slab for c in range(columns)]
                for g in range(groups)
            ]
            updates.append(TableUpdate(slot, 0, blocks))
        step = self._worker.runner.execute(
            Plan(id=-1, admissions=admissions, updates=updates, slots=list(slots), starts=[before] * rows,
                 counts=counts, samples=list(range(rows)))
        )  # fmt: skip
        if isinstance(step, PendingStep):
            step.wait()
