"""What a model calls its ops with: steps over made-up tokens, in which every op is taken apart into the smallest ones
that there are, and what each of them, and each composite around them, gets is kept."""

from __future__ import annotations

import math
import random
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from evener.contracts.ops import Bucket, OpCall, OpFunction, OpSchema
from evener.contracts.quant import PackedWeight
from evener.engine.messages import Sampling
from evener.engine.plan import Admission, Plan, TableUpdate
from evener.engine.worker import Worker
from evener.resolution.resolver import Market, Resolver
from evener.resolution.tuning import Tuned, call_key

#: Bytes of different layers' inputs that a timed run goes over: more than the caches of a device hold, so that weights
#: come from memory as they do in a step.
ENOUGH = 256 << 20
#: Calls that are kept at least, and at most: as many as make small ones long enough to be timed.
FEWEST, MOST = 4, 24
#: Tokens of one prompt.
PROMPT = 512


@dataclass
class Recorded:
    """One op with its static parameters in one bucket, and inputs of several of its calls."""

    schema: OpSchema
    path: str
    call: OpCall
    inputs: list[tuple[Any, ...]] = field(default_factory=list)
    nbytes: int = 0


class Recorder(Resolver):
    """Resolves every composite to its parts, and these to what serves them by priority; keeps what they are called
    with.

    Attributes:
        recorded: by what a tuning file looks up; parts before what is made of them.
    """

    def __init__(self, market: Market) -> None:
        parts = [o for o in market.kernels if o.value.op in market.schemas and not market.schemas[o.value.op].composite]
        super().__init__(replace(market, kernels=parts, tuned=Tuned()))
        self.recorded: dict[tuple[str, int, str], Recorded] = {}

    def resolve(
        self, op: str, path: str, static: Mapping[str, Any], bucket: Bucket, known: Mapping[str, int] | None = None
    ) -> OpFunction:
        run = super().resolve(op, path, static, bucket, known)
        if op.startswith("state."):
            return run
        schema = self.market.schemas[op]
        call = self.call(schema, static, bucket)
        key = call_key(call)

        def recording(*inputs: Any) -> Any:
            found = self.recorded.get(key)
            number = 0 if found is None else len(found.inputs)
            wanted = found is None or number < FEWEST or (number < MOST and found.nbytes < ENOUGH)
            kept = _kept(schema, inputs) if wanted else ()
            result = run(*inputs)
            if wanted:
                found = self.recorded.setdefault(key, Recorded(schema, path, call))
                found.inputs.append(kept)
                found.nbytes += sum(t.nbytes for t in tensors_in(kept))
            return result

        return recording


def _kept(schema: OpSchema, inputs: Sequence[Any]) -> tuple[Any, ...]:
    """Inputs as they are now: what a step makes is overwritten, weights are not."""
    rows = [declared.shape[:1] in (("T",), ("R",), ("…",)) for declared in schema.inputs]
    return tuple(
        value.clone() if grows and isinstance(value, torch.Tensor) else value
        for grows, value in zip(rows, inputs, strict=False)
    )


def tensors_in(value: Any) -> Iterator[torch.Tensor]:
    """Tensors of inputs, and of the weights among them; what state providers make is theirs."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, (tuple, list)):
        for inner in value:
            yield from tensors_in(inner)
    elif isinstance(value, PackedWeight):
        yield from tensors_in(value.data)


class Steps:
    """Runs steps of a model that is loaded.

    Args:
        context: earlier tokens of a request that adds one, where the state holds as many.
    """

    def __init__(self, worker: Worker, context: int) -> None:
        self._worker, self._facts = worker, worker.facts
        self._context = min(context, self._facts.step_tokens, self._facts.max_seq_len - 1)
        self._random = random.Random(0)

    def record(self, buckets: Iterable[Bucket]) -> dict[tuple[str, int, str], Recorded]:
        """Every call of steps with as many tokens as each bucket holds: requests that add one token each while there
        are so many of them, prompts above."""
        a, buckets = self._worker.assembly, sorted(buckets)
        market, most = a.resolver.market, self._facts.max_reqs
        decodes = [b.high for b in buckets if b.high <= most]
        context = self._room(max(decodes, default=1))
        at_once = max(1, self._facts.step_tokens // max(1, context))
        for first in range(0, max(decodes, default=0) if context else 0, at_once):
            self._run(range(first, min(first + at_once, max(decodes))), 0, context)
        recorder = Recorder(market)
        for site in a.build.sites:
            site.table = tuple(
                recorder.resolve(site.op, site.path, site.static, bucket) if bucket in buckets else known
                for bucket, known in zip(market.buckets, site.table, strict=True)
            )
        for bucket in buckets:
            if bucket.high <= most:
                self._run(range(bucket.high), context, 1)
            else:
                self._run(range(-(-bucket.high // min(PROMPT, self._facts.max_seq_len))), 0, 0, bucket.high)
        return recorder.recorded

    def _room(self, rows: int) -> int:
        """Earlier tokens for which the state has room."""
        return max(0, min(self._context, self._columns(rows) * self._facts.block_size - 1))

    def _columns(self, rows: int) -> int:
        return (self._facts.blocks - 1) // (rows * max(1, len(self._facts.specs)))

    def _run(self, slots: Sequence[int], before: int, count: int, tokens: int = 0) -> None:
        """A step in which ``slots`` have ``before`` tokens and compute ``count``, or ``tokens`` together."""
        rows = len(slots)
        counts = [tokens // rows + (i < tokens % rows) for i in range(rows)] if tokens else [count] * rows
        size, groups, slab = self._facts.block_size, len(self._facts.specs), math.lcm(*self._facts.cuts)
        columns = -(-(before + max(counts)) // size)
        # Where the pool is too small for all of them, requests share blocks, as their times allow.
        usable = max(1, self._facts.blocks - 1)
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
        self._worker.runner.execute(
            Plan(id=-1, admissions=admissions, updates=updates, slots=list(slots), starts=[before] * rows,
                 counts=counts, samples=list(range(rows)))
        ).wait()  # fmt: skip
