"""Checkpoints of models that were saved without their head, and so without their outermost module: ``layers.0…`` where
the class declares ``model.layers.0…``. Torch-free."""

from __future__ import annotations

import re
from typing import ClassVar

from evener.contracts.conversion.views import ViewRequest
from evener_convert.weight_map import RenamedCheckpoint


class BaseCheckpoint(RenamedCheckpoint):
    """Such a checkpoint, with the names that its class declares."""

    keys: ClassVar[frozenset[str]] = frozenset()

    @classmethod
    def of(cls, request: ViewRequest) -> BaseCheckpoint | None:
        """The view, if the checkpoint has the embedding that the class declares in its ``names``, but with that part
        of the name left out."""
        names, stored = getattr(request.architecture, "names", ()), request.checkpoint.headers
        whole = f"{names[0]}.weight" if names else ""
        outer, dot, inner = whole.partition(".")
        if not dot or whole in stored or inner not in stored:
            return None
        return cls(request.checkpoint, [(re.compile(r"(?!lm_head\.|score\.).*"), rf"{outer}.\g<0>")])
