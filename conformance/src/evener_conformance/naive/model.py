"""The naive engine: one sequence, reference ops, keys and values in plain lists. An oracle small enough to trust.

It shares only the models, the loader and the reference ops with the engine. It has no scheduler, resolver or buckets,
and for the built-in kinds of state (``naive.state``) no blocks and no state provider. Ops and kinds of state that
packages add come from those packages (``naive.packages``).
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from evener.config.checkpoint import facts_of
from evener.contracts.architecture import Architecture
from evener.contracts.checkpoint import Checkpoint
from evener.contracts.declared import LinearWeight
from evener.contracts.ops import OpFunction, OpSchema
from evener.contracts.quant import QuantScheme
from evener.contracts.state import StateProvider
from evener.errors import UnknownNameError
from evener.layers.builder import Builder
from evener.loading.checkpoint import open_checkpoint
from evener.loading.loader import WeightBytes, load_weights
from evener.loading.scheme import pick_scheme
from evener.ops.reference.linear import PLAIN
from evener.ops.schemas import BUILTIN
from evener.resolution.resolver import plain_parts
from evener_conformance.naive.packages import find_architecture, find_provider, find_schema
from evener_conformance.naive.state import NAIVE_PROVIDER, ProviderPages, make_naive_state
from evener_inspection.dummy_weights import load_dummy

__all__ = ["NaiveModel", "NaiveStep", "find_architecture"]

CPU = torch.device("cpu")


@dataclass
class NaiveStep:
    """The step of a forward pass: one sequence, one bucket."""

    token_ids: torch.Tensor
    positions: torch.Tensor
    bucket: int = 0
    metas: tuple[Any, ...] = (None,)
    stream: None = None
    embedding_overrides: tuple[torch.Tensor, torch.Tensor] | None = None


class NaiveModel:
    """A model that runs one sequence at a time on reference ops.

    Args:
        source: a model folder, or a config, for which dummy weights are made.
        dtype: dtype of weights and activations.
        architecture: the model's class; default: the one that an installed package registered for the config.
        max_positions: longest sequence; default: the config's ``max_position_embeddings``.
        schemas, schemes, providers: for ops, checkpoints and kinds of state that are not built in; those of installed
            packages are found automatically.
        seed: seed of dummy weights.
        builder: what is constructed in place of a ``Builder``.
        choices: further arguments of the ``Builder`` (``absorb``, ``index_top``, ``state_dtype``).

    Attributes:
        config, build, model: the config, the declared weights and state, and the model.
        given: (position, rows [n, hidden]): embedding rows that replace tokens of the next sequences.
        bytes: bytes of the weights.
    """

    def __init__(
        self, source: str | Path | Mapping[str, Any], dtype: str = "float32",
        architecture: type[Architecture] | None = None, *, max_positions: int | None = None,
        schemas: Sequence[OpSchema] = (), schemes: Sequence[QuantScheme] = (),
        providers: Sequence[StateProvider] = (), seed: int = 0,
        builder: Callable[..., Builder] = Builder, **choices: Any,
    ) -> None:  # fmt: skip
        checkpoint: Checkpoint | None = None
        if isinstance(source, Mapping):
            self.config: Mapping[str, Any] = source
        else:
            checkpoint = open_checkpoint(source)
            self.config = checkpoint.config
        scheme = pick_scheme(self.config, schemes, checkpoint=checkpoint)
        made = architecture or find_architecture(self.config["architectures"][0])
        length = max_positions or facts_of("", self.config).max_positions
        assert length is not None, "config.json gives max_position_embeddings"
        self.build = builder(
            dtype, length, (lambda name: scheme.part(name, checkpoint.headers)) if checkpoint else None, **choices
        )
        self.model = made(self.config, self.build)
        self.given: list[tuple[int, torch.Tensor]] = []
        self._schemas = {schema.name: schema for schema in (*BUILTIN, *schemas)}
        for weight in self.build.weights:
            if isinstance(weight, LinearWeight):
                weight.layout, weight.parts = PLAIN.layout, plain_parts(weight)
        self.bytes = self._load(checkpoint, scheme, seed)
        for group in self.build.groups:
            group.bind()
        self._length = length
        for number, slot in enumerate(self.build.slots):
            own = make_naive_state(slot.spec, slot.attention) is not None
            slot.provider = NAIVE_PROVIDER if own else find_provider(slot.spec, slot.attention, tuple(providers))
            slot.group = number
        for site in self.build.sites:
            site.table = (self._resolve(site.op, site.static),)
        self.reset()

    def _load(self, checkpoint: Checkpoint | None, scheme: Any, seed: int) -> WeightBytes:
        packings = {PLAIN.layout: PLAIN}
        if checkpoint is None:
            return load_dummy(self.build.weights, packings, CPU, seed)
        return load_weights(self.build.weights, checkpoint, scheme, packings, CPU, [self.build])

    def _resolve(self, op: str, static: Mapping[str, Any]) -> OpFunction:
        if op.startswith("state."):
            return getattr(static["state"].provider, op.removeprefix("state."))  # type: ignore[no-any-return]
        if op not in self._schemas:
            found = find_schema(op)
            if found is None:
                hint = "Install the package that announces it in op_schemas, or give NaiveModel(…, schemas=[…])."
                raise UnknownNameError("op", op, self._schemas, hint)
            self._schemas[op] = found
        module, _, name = self._schemas[op].reference.partition(":")
        reference = getattr(importlib.import_module(module), name)

        def use(inner: str, /, *, any_rows: bool = False, sizes: Any = None, **params: Any) -> OpFunction:
            return self._resolve(inner, params)

        return reference(static, use)  # type: ignore[no-any-return]

    def reset(self) -> None:
        """Forget the sequence."""
        self.length = 0
        self._pages: list[ProviderPages | None] = []
        for slot in self.build.slots:
            slot.views, pages = make_naive_state(slot.spec, slot.attention, slot.scales), None
            if slot.views is None:
                assert slot.provider is not None, "found above"
                pages = ProviderPages(slot.spec, slot.attention, slot.provider, self._length)
                slot.views = pages.views
            self._pages.append(pages)

    @torch.inference_mode()
    def feed(self, token_ids: Sequence[int]) -> torch.Tensor:
        """Append tokens to the sequence; returns their logits, [tokens, vocab] of ``dtype``."""
        ids = torch.tensor(list(token_ids), dtype=torch.int32)
        positions = torch.arange(self.length, self.length + len(ids))
        metas = tuple(None if pages is None else pages.metadata(positions) for pages in self._pages)
        step = NaiveStep(ids, positions, metas=metas, embedding_overrides=self._overlay(len(ids)))
        self.length += len(ids)
        return self.model.logits(self.model.forward(step), step)

    def _overlay(self, count: int) -> tuple[torch.Tensor, torch.Tensor] | None:
        places = [(start + i - self.length, row) for start, rows in self.given for i, row in enumerate(rows)]
        here = [(at, row) for at, row in places if 0 <= at < count]
        return (torch.tensor([at for at, _ in here]), torch.stack([row for _, row in here])) if here else None

    def logits(self, token_ids: Sequence[int], chunk: int | None = None) -> torch.Tensor:
        """Logits [tokens, vocab] of a new sequence, computed at once or in chunks of ``chunk`` tokens."""
        self.reset()
        size = chunk or len(token_ids)
        return torch.cat([self.feed(token_ids[i : i + size]) for i in range(0, len(token_ids), size)])

    def greedy(
        self, prompt: Sequence[int], count: int, stop: Sequence[int] = (),
        adjust: Callable[[list[int], torch.Tensor], torch.Tensor] | None = None,
    ) -> list[int]:  # fmt: skip
        """Up to ``count`` greedy tokens; ends early after one of ``stop``. ``adjust`` is given the tokens so far and
        the logits [vocab] of the next one, and returns the logits to use."""
        self.reset()
        rows, found = self.feed(prompt), list[int]()
        while True:
            logits = rows[-1] if adjust is None else adjust(found, rows[-1].float().clone())
            found.append(int(logits.argmax()))
            if len(found) == count or found[-1] in stop:
                return found
            rows = self.feed(found[-1:])

    def greedy_gaps(self, prompt: Sequence[int], answer: Sequence[int]) -> list[float]:
        """For each token of ``answer``, the largest logit less its own; 0 means greedy."""
        rows = self.logits([*prompt, *answer])[len(prompt) - 1 : -1].float()
        return (rows.max(-1).values - rows.gather(1, torch.tensor(list(answer))[:, None]).squeeze(1)).tolist()
