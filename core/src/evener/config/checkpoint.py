"""What a configuration needs to know about a checkpoint, read from its ``config.json``."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

#: Names of the maximum sequence length in such files. With two of them, the smaller is the length of training.
_LENGTHS = ("max_position_embeddings", "seq_length", "max_seq_len", "model_max_length")


@dataclass(frozen=True, kw_only=True)
class ModelFacts:
    """Facts of one checkpoint.

    Attributes:
        path: its folder or file.
        model_type: the family as in the file; "" if the file does not say.
        dtype: the dtype of the saved weights, torch's name; None if the file does not say.
        max_positions: the maximum sequence length in tokens; None if neither the file nor the architecture says.
        trained_positions: the sequence length of training, if the file has it too and it is smaller.
    """

    path: str
    model_type: str = ""
    dtype: str | None = None
    max_positions: int | None = None
    trained_positions: int | None = None


def read_model_facts(model: str) -> ModelFacts:
    """Read the configuration of the checkpoint ``model``.

    Raises:
        CheckpointError: the file does not exist or cannot be read.
    """
    from evener.loading.checkpoint import open_checkpoint

    return facts_of(model, open_checkpoint(model).config)


def facts_of(model: str, table: Mapping[str, Any], positions: int = 0) -> ModelFacts:
    """The facts in a parsed ``config.json``. Multimodal models keep those of the language model in ``text_config``.
    ``positions``: the maximum sequence length of the architecture, for a file without one; 0: it has none."""
    inner = table.get("text_config")
    layers = [table, inner] if isinstance(inner, dict) else [table]
    dtype = _first(layers, "dtype", "torch_dtype")
    lengths = sorted(n for n in (_first(layers, name) for name in _LENGTHS) if type(n) is int and n > 0)
    return ModelFacts(
        path=model,
        model_type=str(_first(layers, "model_type") or ""),
        dtype=dtype.removeprefix("torch.") if isinstance(dtype, str) else None,
        max_positions=lengths[-1] if lengths else positions or None,
        trained_positions=lengths[0] if lengths and lengths[0] < lengths[-1] else None,
    )


def _first(layers: list[Mapping[str, Any]], *names: str) -> Any:
    return next((layer[name] for layer in layers for name in names if layer.get(name) is not None), None)
