"""What a configuration needs to know of a checkpoint, read from its ``config.json``."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, kw_only=True)
class ModelFacts:
    """Facts of one checkpoint.

    Attributes:
        path: its folder or file.
        model_type: the family, as the file spells it; "" if the file does not say.
        architectures: class names that it asks for.
        dtype: the type its weights were saved in, torch's name; None if the file does not say.
        max_positions: the longest sequence that it was made for; None if the file does not say.
    """

    path: str
    model_type: str = ""
    architectures: tuple[str, ...] = ()
    dtype: str | None = None
    max_positions: int | None = None


def read_model_facts(model: str) -> ModelFacts:
    """Read the configuration of the checkpoint ``model``.

    Raises:
        CheckpointError: there is none, or it cannot be read.
    """
    from evener.loading.checkpoint import open_checkpoint

    return facts_of(model, open_checkpoint(model).config)


def facts_of(model: str, table: Mapping[str, Any]) -> ModelFacts:
    """The facts in a parsed ``config.json``. A multi-modal one keeps its language model's under ``text_config``."""
    inner = table.get("text_config")
    layers = [table, inner] if isinstance(inner, dict) else [table]
    dtype = _first(layers, "dtype", "torch_dtype")
    positions = _first(layers, "max_position_embeddings")
    return ModelFacts(
        path=model,
        model_type=str(_first(layers, "model_type") or ""),
        architectures=tuple(table.get("architectures") or ()),
        dtype=dtype.removeprefix("torch.") if isinstance(dtype, str) else None,
        max_positions=positions if isinstance(positions, int) else None,
    )


def _first(layers: list[Mapping[str, Any]], *names: str) -> Any:
    return next((layer[name] for layer in layers for name in names if layer.get(name) is not None), None)
