"""Checkpoints of models without a language model head: their tensors and classes have other names. Torch-free."""

from __future__ import annotations

import re
from collections.abc import Collection, Sequence

from evener.contracts.checkpoint import Checkpoint
from evener.loading.weight_map import RenamedCheckpoint


def registered_name(architecture: str, known: Collection[str]) -> str:
    """The name under which a class is registered that computes an ``architecture`` of transformers: of ``XModel``, the
    one with a head, ``XForCausalLM``."""
    full = re.sub(r"(Model|ForSequenceClassification)$", "ForCausalLM", architecture)
    return full if architecture not in known and full in known else architecture


def with_full_names(checkpoint: Checkpoint, names: Sequence[str]) -> Checkpoint:
    """A checkpoint that was saved without its outermost module ("model."), with the names that its class declares.

    Args:
        names: ``CausalLM.names``; empty for classes of another kind.
    """
    outer, _, embedding = f"{names[0]}.weight".partition(".") if names else ("", "", "")
    if f"{outer}.{embedding}" in checkpoint.headers or embedding not in checkpoint.headers:
        return checkpoint
    return RenamedCheckpoint(checkpoint, [(re.compile(r"(?!lm_head\.|score\.).*"), rf"{outer}.\g<0>")])
