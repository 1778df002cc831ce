"""Drafts by the model's own layer for multi-token prediction (MTP; DeepSeek-AI 2024); ``chain`` says when it runs.

The layer was trained for one token. For more it goes on from its own states, as it would from a model's.
"""

from __future__ import annotations

import torch

from evener.config.resolve import ResolvedConfig
from evener.contracts.architecture import Architecture
from evener.engine.worker.assembly import Assembly
from evener.engine.worker.runner import ForwardStep, Runner
from evener.errors import ConfigError
from evener_drafts.chain import ChainDrafter


class Prediction(ChainDrafter):
    """Runs the layer of ``a.model``."""

    def __init__(self, a: Assembly, runner: Runner) -> None:
        super().__init__(a, runner, runner, a.model.hidden_size, range(len(a.geometry.groups)))

    @staticmethod
    def declare(config: ResolvedConfig, loaded: object, device: object, ranks: object, model: Architecture,
                build: object) -> None:  # fmt: skip
        """Nothing more than the model has declared.

        Raises:
            ConfigError: it has no such layer, or the run names a folder of something else that proposes.
        """
        del loaded, device, ranks, build
        if config.config.infer.draft_model is not None:
            raise ConfigError("infer.drafter=mtp proposes tokens without infer.draft_model; leave one of the two out")
        if not model.predicts:
            raise ConfigError(f"infer.drafter=mtp needs a model with a layer for multi-token prediction, and "
                              f"{config.config.model} has none that is read; leave it out")  # fmt: skip

    def _follow(self, hidden: torch.Tensor, step: ForwardStep) -> torch.Tensor:
        return self.runner.model.predict(hidden, step)

    def _go_on(self, states: torch.Tensor, step: ForwardStep) -> torch.Tensor:
        return self.runner.model.predict(states, step, own=True)

    def _likeliest(self, states: torch.Tensor, step: ForwardStep) -> torch.Tensor:
        return self.runner.sampler.likeliest(self.runner.model.predicted(states, step))
