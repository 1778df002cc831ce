"""The model's own layer for multi-token prediction (MTP) as a drafter: it proposes one token (DeepSeek-AI 2024).

The layer takes the hidden state of a token and the token behind it, and predicts the one behind that. So it runs after
each step, over the same tokens, once the last of each request was sampled. It has state of each token that the model
has state of, in the same blocks. Behind proposed tokens that were wrong, this state is that of wrong tokens, as the
model's own is, and is computed again with it.

The last token of a cached prefix or of a fork's shared tokens was computed with the token that followed it there. Where
another one follows, one token's state is that of the other text. It can make a proposal worse, and no answer wrong.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import torch

from evener.config.resolve import ResolvedConfig
from evener.contracts.architecture import Architecture
from evener.engine.sampling.pending import Draw, PendingStep
from evener.engine.wire.plan import Plan, StepMasks
from evener.engine.worker.assembly import Assembly
from evener.engine.worker.graphs import StepGraphs
from evener.engine.worker.runner import ForwardStep, Runner
from evener.errors import ConfigError
from evener.resolution.buckets import bucket_index


class Prediction:
    """Runs the layer after each step of ``runner``."""

    graphs: StepGraphs | None = None

    def __init__(self, a: Assembly, runner: Runner) -> None:
        del a
        self._runner, runner.after = runner, self._after

    @staticmethod
    def declare(config: ResolvedConfig, loaded: object, device: object, ranks: object, model: Architecture,
                build: object) -> dict[str, Any]:  # fmt: skip
        """Nothing more than the model has declared.

        Raises:
            ConfigError: it has no such layer.
        """
        del loaded, device, ranks, build
        if not model.predicts:
            raise ConfigError(f"infer.drafter=mtp needs a model with a layer for multi-token prediction, and "
                              f"{config.config.model} has none that is read; leave it out")  # fmt: skip
        return {}

    def run(self, plan: Plan) -> tuple[Plan, Callable[[], list[list[int]]] | None]:
        """Before a step there is nothing to do."""
        return plan, None

    def _after(
        self, plan: Plan, done: PendingStep | Draw, hidden: torch.Tensor, step: ForwardStep,
        parts: Mapping[str, torch.Tensor],
    ) -> PendingStep | Draw:  # fmt: skip
        if isinstance(done, PendingStep):
            return self._predict(plan, done, hidden, step, parts)

        def draw(masks: StepMasks | None) -> PendingStep:
            return self._predict(plan, done(masks), hidden, step, parts)

        return draw

    def _predict(
        self, plan: Plan, done: PendingStep, hidden: torch.Tensor, step: ForwardStep, parts: Mapping[str, torch.Tensor]
    ) -> PendingStep:  # fmt: skip
        model, runner = self._runner.model, self._runner
        following = runner.tables.tokens[parts["token_slots"], parts["positions"] + 1]
        step = replace(step, token_ids=following, embedding_overrides=None)
        states = model.predict(hidden, step)
        if plan.predict and plan.samples:
            rows = states.index_select(0, parts["last"])
            logits = model.predicted(rows, replace(step, bucket=bucket_index(rows.shape[0])))
            done.predicted = runner.device.readback(runner.sampler.likeliest(logits))
        return done
