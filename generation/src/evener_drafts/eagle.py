"""Drafts by a head of EAGLE-3; ``chain`` says when it runs."""

from __future__ import annotations

import torch

from evener.engine.worker.assembly import Assembly
from evener.engine.worker.runner import ForwardStep, Runner
from evener.layers import CausalLM
from evener_drafts.chain import ChainDrafter
from evener_drafts.eagle_head import EagleHead
from evener_drafts.model import own_geometry


class EagleDrafter(ChainDrafter):
    """Runs the head of ``a.draft``."""

    def __init__(self, a: Assembly, runner: Runner) -> None:
        assert a.draft is not None and isinstance(a.draft.model, EagleHead) and isinstance(a.model, CausalLM)
        assert a.draft.model.layers is not None, "they were chosen with the model"
        self._head, self._layers, self._taps = a.draft.model, a.draft.model.layers, a.model.stack.taps
        geometry = own_geometry(a)
        own = Runner(a.device, self._head, a.draft.sampler, runner.tables, geometry, a.adapters)
        groups = [index for index, group in enumerate(geometry.groups) if group.slots]
        super().__init__(a, runner, own, self._head.hidden_size, groups)
        self._taps |= dict.fromkeys(self._layers)
        embedding = a.model.embedding if self._head.embedding is None else self._head.embedding
        assert embedding is not None, "there are no pipeline stages"
        self._embedding = embedding
        self._ids = a.device.upload(self._head.ids.to(torch.int32).numpy())

    def _follow(self, hidden: torch.Tensor, step: ForwardStep) -> torch.Tensor:
        del hidden  # those of other layers are read
        return self._go_on(self._head.join([self._taps[layer] for layer in self._layers], step.bucket), step)

    def _go_on(self, states: torch.Tensor, step: ForwardStep) -> torch.Tensor:
        return self._head.extend(states, self._embedding(step), step)

    def _likeliest(self, states: torch.Tensor, step: ForwardStep) -> torch.Tensor:
        return self._ids[self._alone.sampler.likeliest(self._alone.logits(states, step))]
