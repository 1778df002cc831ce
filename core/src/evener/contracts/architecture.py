"""The architecture contract: a model family as a thin file over ``evener.layers``.

An architecture is *declared* from the checkpoint's own ``config.json`` through a ``Builder``: which weights, which ops,
which state. Declaring imports no torch, so ``evener config`` and the memory estimate work before a weight is read.
Register it lazily in a descriptor::

    Descriptor(name="my-models", architectures={"MyForCausalLM": "my_models.mine:MyForCausalLM"}, …)
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    import torch

    from evener.contracts.checkpoint import ModelFiles
    from evener.contracts.encoder import Encoder, ImageInput
    from evener.layers.builder import Builder


class Step(Protocol):
    """What a forward pass sees of a step.

    Attributes:
        bucket: index into every call site's table.
        token_ids: int32 [T]; positions: int32 or int64 [T].
        metas: for each state group its provider's metadata; None where this stage has no layer of the group.
        overlay: which rows of the step, int64 [N], do not stand for their tokens' embeddings but for these rows [N,
            hidden] in the compute type; None: all stand for embeddings.
        stream: behind the first pipeline stage, ``x`` [T, hidden] in the compute type (zeros) and the residual, float32
            [T, hidden], of which the sum is what the stage before gave; None in the first.
    """

    bucket: int
    token_ids: torch.Tensor
    positions: torch.Tensor
    metas: tuple[Any, ...]

    @property
    def overlay(self) -> tuple[torch.Tensor, torch.Tensor] | None: ...
    @property
    def stream(self) -> tuple[torch.Tensor, torch.Tensor] | None: ...


class Architecture(ABC):
    """One model family. Construct declares; ``forward`` runs a step.

    Attributes:
        vocab_size: width of the logits.
        max_positions: longest context that its position encoding was made for.
        hidden_size: width of the hidden states, which pipeline stages pass on.
        encoders: (optional) what it reads beside text, by name; in the first pipeline stage.
        oracle: (optional) what its tests compare it with, for ``evener models``: "transformers", or "own", an
            implementation that was written for that from the published facts.
    """

    vocab_size: int
    max_positions: int
    hidden_size: int
    encoders: Mapping[str, Encoder] = {}
    oracle: str = ""

    @abstractmethod
    def __init__(self, config: Mapping[str, Any], build: Builder) -> None:
        """Declare everything from ``config`` (the parsed ``config.json``), for pipeline stages what the builder's
        ``layers``, ``first_stage`` and ``last_stage`` say.

        Raises:
            ArchitectureError: the config asks for a variant that the class does not implement; says which key.
        """

    @abstractmethod
    def forward(self, step: Step) -> torch.Tensor:
        """Hidden states float32 [T, hidden] of the step's tokens, before the head's norm."""

    @abstractmethod
    def logits(self, hidden: torch.Tensor, step: Step) -> torch.Tensor:
        """Logits float32 [R, vocab_size] of the rows ``hidden`` [R, hidden], picked from ``forward``'s result."""

    def greedy(self, hidden: torch.Tensor, step: Step) -> torch.Tensor | None:
        """(optional) Ids int32 [R] of the largest logits, the first of equal ones, where that takes less than all
        logits. ``hidden`` as for ``logits``. Default: None, take the logits."""
        del hidden, step
        return None

    @classmethod
    def images(cls, config: Mapping[str, Any]) -> ImageInput | None:
        """(optional) How a model of this ``config`` takes images. Default: it takes none."""
        del config
        return None

    @classmethod
    def text_files(cls, files: ModelFiles) -> ModelFiles:
        """(optional) The text files of a model whose folder has no ``tokenizer.json``, with what the family's
        published code makes of the files that it has instead. Default: ``files``."""
        return files

    @classmethod
    def tiny_config(cls) -> dict[str, Any]:
        """(optional) A small random config for tests and ``evener models``. Default: none, an empty dict."""
        return {}
