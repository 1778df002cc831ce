"""The naive engine: one sequence, reference ops, keys and values in plain lists. An oracle small enough to trust.

It shares the models, the loader and the reference ops with the engine, and nothing else: no scheduler, blocks, state
provider, resolver or buckets. Attention is computed here, from the whole sequence's keys and values, in float32.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from evener.contracts.architecture import Architecture
from evener.contracts.checkpoint import Checkpoint
from evener.contracts.ops import OpFunction, OpSchema
from evener.contracts.state import AttentionSpec, StateSpec
from evener.errors import ArchitectureError, UnknownNameError
from evener.layers.builder import Builder
from evener.layers.declared import LinearWeight, StateSlot
from evener.loading.checkpoint import open_checkpoint
from evener.loading.dummy import load_dummy
from evener.loading.loader import WeightBytes, load_weights
from evener.loading.scheme import pick_scheme
from evener.ops.reference.linear import PLAIN
from evener.ops.schemas import BUILTIN

CPU = torch.device("cpu")


@dataclass
class Memory:
    """What one layer remembers of one sequence: each state tensor as [tokens, *shape]."""

    spec: StateSpec
    attention: AttentionSpec
    tensors: list[torch.Tensor] = field(default_factory=list)

    def write(self, *values: torch.Tensor) -> None:
        """Append this step's tokens."""
        self.tensors = (
            [torch.cat(pair) for pair in zip(self.tensors, values, strict=True)] if self.tensors else list(values)
        )

    def attend(self, query: torch.Tensor, sinks: torch.Tensor | None = None) -> torch.Tensor:
        """Attention of the last tokens' queries [T, heads, dim] over everything written."""
        keys, values = (t.float().transpose(0, 1) for t in self.tensors)  # [kv_heads, tokens, dim]
        group = query.shape[1] // keys.shape[0]
        keys, values = keys.repeat_interleave(group, 0), values.repeat_interleave(group, 0)
        scores = query.float().transpose(0, 1) @ keys.transpose(1, 2) * self.attention.scale  # [heads, T, tokens]
        if self.attention.softcap is not None:
            scores = self.attention.softcap * torch.tanh(scores / self.attention.softcap)
        tokens, count = keys.shape[1], query.shape[0]
        distance = torch.arange(tokens - count, tokens)[:, None] - torch.arange(tokens)
        seen = (distance >= 0) & (distance < (self.spec.window or tokens))
        scores = scores.masked_fill(~seen, float("-inf"))
        if sinks is not None:
            scores = torch.cat((scores, sinks.float().view(-1, 1, 1).expand(-1, count, 1)), dim=-1)
        weights = scores.softmax(-1)[..., :tokens]
        return (weights @ values).transpose(0, 1).to(query.dtype)


@dataclass
class NaiveStep:
    """A step as a forward pass sees it: one sequence, one bucket."""

    token_ids: torch.Tensor
    positions: torch.Tensor
    bucket: int = 0
    metas: tuple[Any, ...] = (None,)


class NaiveModel:
    """A model that runs one sequence at a time on reference ops.

    Args:
        source: a model folder, or a config, which gets dummy weights.
        dtype: of weights and activations.
        architecture: its class; default: what an installed package registered under the config's name.
        max_positions: longest sequence; default: the config's ``max_position_embeddings``.
        schemas: of added ops, beside the built-in ones.
        seed: of dummy weights.

    Attributes:
        config, build, model: as read, declared and made.
        bytes: what the weights hold.
    """

    def __init__(
        self, source: str | Path | Mapping[str, Any], dtype: str = "float32",
        architecture: type[Architecture] | None = None, *, max_positions: int | None = None,
        schemas: Sequence[OpSchema] = (), seed: int = 0,
    ) -> None:  # fmt: skip
        checkpoint: Checkpoint | None = None
        if isinstance(source, Mapping):
            self.config: Mapping[str, Any] = source
        else:
            checkpoint = open_checkpoint(source)
            self.config = checkpoint.config
        scheme = pick_scheme(self.config, ())
        made = architecture or find_architecture(self.config["architectures"][0])
        length = max_positions or self.config["max_position_embeddings"]
        self.build = Builder(
            dtype, length, (lambda name: scheme.part(name, checkpoint.headers)) if checkpoint else None
        )
        self.model = made(self.config, self.build)
        self._schemas = {schema.name: schema for schema in (*BUILTIN, *schemas)}
        for weight in self.build.weights:
            if isinstance(weight, LinearWeight):
                weight.layout = PLAIN.layout
        self.bytes = self._load(checkpoint, scheme, seed)
        for group in self.build.groups:
            group.bind()
        for site in self.build.sites:
            site.table = (self._resolve(site.op, site.static),)
        for slot in self.build.slots:
            slot.group = 0
        self.reset()

    def _load(self, checkpoint: Checkpoint | None, scheme: Any, seed: int) -> WeightBytes:
        packings = {PLAIN.layout: PLAIN}
        if checkpoint is None:
            return load_dummy(self.build.weights, packings, CPU, seed)
        return load_weights(
            self.build.weights, checkpoint, scheme, packings, CPU, ignored=self.build.ignored, ties=self.build.ties
        )

    def _resolve(self, op: str, static: Mapping[str, Any]) -> OpFunction:
        if op == "state.write":
            return lambda views, meta, *values: views.write(*values)
        if op == "state.attend":
            return lambda views, meta, query, sinks=None: views.attend(query, sinks)
        if op not in self._schemas:
            raise UnknownNameError("op", op, self._schemas)
        module, _, name = self._schemas[op].reference.partition(":")
        reference = getattr(importlib.import_module(module), name)
        return reference(static, lambda inner, /, **params: self._resolve(inner, params))  # type: ignore[no-any-return]

    def reset(self) -> None:
        """Forget the sequence."""
        self.length = 0
        for slot in self.build.slots:
            slot.views = _memory(slot)

    @torch.inference_mode()
    def feed(self, token_ids: Sequence[int]) -> torch.Tensor:
        """Append tokens to the sequence; returns their logits, [tokens, vocab] in ``dtype``."""
        ids = torch.tensor(list(token_ids), dtype=torch.int32)
        step = NaiveStep(ids, torch.arange(self.length, self.length + len(ids)))
        self.length += len(ids)
        return self.model.logits(self.model.forward(step), step)

    def logits(self, token_ids: Sequence[int], chunk: int | None = None) -> torch.Tensor:
        """Logits [tokens, vocab] of a new sequence, fed at once or ``chunk`` tokens at a time."""
        self.reset()
        size = chunk or len(token_ids)
        return torch.cat([self.feed(token_ids[i : i + size]) for i in range(0, len(token_ids), size)])

    def greedy(self, prompt: Sequence[int], count: int, stop: Sequence[int] = ()) -> list[int]:
        """The ``count`` likeliest next tokens, one after another; ends early after one of ``stop``."""
        self.reset()
        rows, found = self.feed(prompt), []
        while True:
            found.append(int(rows[-1].argmax()))
            if len(found) == count or found[-1] in stop:
                return found
            rows = self.feed(found[-1:])

    def greedy_gaps(self, prompt: Sequence[int], answer: Sequence[int]) -> list[float]:
        """For each token of ``answer``, how far the likeliest logit is above its own; 0 is greedy."""
        rows = self.logits([*prompt, *answer])[len(prompt) - 1 : -1].float()
        return (rows.max(-1).values - rows.gather(1, torch.tensor(list(answer))[:, None]).squeeze(1)).tolist()


def _memory(slot: StateSlot) -> Memory:
    if slot.spec.kind not in ("full", "window"):
        raise ArchitectureError(
            f"the naive engine has no state of kind {slot.spec.kind!r} ({slot.name}); use the engine"
        )
    return Memory(slot.spec, slot.attention)


def find_architecture(name: str) -> type[Architecture]:
    """The class that an installed package registered under ``name``, read from entry points without the plugin manager.

    Raises:
        UnknownNameError: nobody registered it.
    """
    from importlib_metadata import entry_points

    known: dict[str, str] = {}
    for entry in entry_points(group="evener.plugins"):
        known.update(entry.load().architectures)
    if name not in known:
        raise UnknownNameError("architecture", name, known)
    module, _, attribute = known[name].partition(":")
    return getattr(importlib.import_module(module), attribute)  # type: ignore[no-any-return]
