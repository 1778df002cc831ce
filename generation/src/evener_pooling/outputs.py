"""Rows of numbers for tokens of a step, which ``Plan.outputs`` asks for; ``rows`` reads them in the front end."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from itertools import accumulate

import torch

from evener.contracts.device import Readback
from evener.engine.wire.plan import Plan
from evener.engine.worker.runner import ForwardStep, Runner


def wanted_rows(runner: Runner, plan: Plan, hidden: torch.Tensor, step: ForwardStep) -> list[Sequence[Readback]]:
    """The rows of each of ``plan.outputs``, float32, in parts: at most as many rows have logits at the same time as
    requests run, because the memory plan has no room for more.

    Args:
        hidden: hidden states of the step's tokens, [T, hidden].
    """
    logits = partial(runner.logits, step=step)
    make: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {"hidden": torch.clone, "normed": runner.model.normed}
    starts, most = list(accumulate(plan.counts, initial=0)), max(1, runner.tables.tokens.shape[0] - 1)
    kinds = [make.get(each.kind, logits) for each in plan.outputs]
    wanted = zip(kinds, (hidden[starts[w.row] + w.first :][: w.count] for w in plan.outputs), strict=True)
    return [[runner.device.readback(function(some)) for some in rows.split(most)] for function, rows in wanted]
