"""The architecture contract: a model family, as a short file over ``evener.layers``.

An architecture *declares* its weights, ops and state through a ``Builder``, from the checkpoint's own ``config.json``.
Declaring does not import torch, so ``evener config`` and the memory estimate work before any weight is read. Register
the class by name in a descriptor; it is imported when a checkpoint needs it::

    Descriptor(name="my-models", architectures={"MyForCausalLM": "my_models.mine:MyForCausalLM"}, …)
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    import torch

    from evener.contracts.builder import ModelBuilder
    from evener.contracts.checkpoint import ModelFiles
    from evener.contracts.encoder import Encoder, ImageInput


class Step(Protocol):
    """One step, as a forward pass gets it. T is the number of tokens.

    Attributes:
        bucket: index into the table of every call site.
        token_ids: int32 [T].
        positions: int32 or int64 [T].
        metas: for each state group the metadata of its provider; None if this stage has no layer of the group.
        embedding_overrides: int64 [N], rows of the step, and [N, hidden] in the compute dtype, what replaces the
            embeddings of their tokens; None: nothing is replaced.
        stream: the input of a later pipeline stage: ``x`` [T, hidden] in the compute dtype (zeros) and the residual,
            float32 [T, hidden]; their sum is the output of the stage before. None in the first stage.
    """

    bucket: int
    token_ids: torch.Tensor
    positions: torch.Tensor
    metas: tuple[Any, ...]

    @property
    def embedding_overrides(self) -> tuple[torch.Tensor, torch.Tensor] | None: ...
    @property
    def stream(self) -> tuple[torch.Tensor, torch.Tensor] | None: ...


class Architecture(ABC):
    """One model family. The constructor declares the model; ``forward`` runs a step.

    Attributes:
        vocab_size: width of the logits.
        max_positions: the longest context that its position encoding supports. A class whose checkpoints do not say may
            set it as a class attribute.
        hidden_size: width of the hidden states that pipeline stages pass on.
        takes_head: (optional) whether it declares the builder's ``head`` in place of its own, if there is one: then it
            can embed texts.
        encoders: (optional) its encoders of other inputs than text, by name; only in the first pipeline stage.
        predicts: (optional) whether it declared a layer that predicts the token after the next one; see ``predict``.
        oracle: (optional) the implementation that its tests compare it with, shown by ``evener models``:
            "transformers", or "own" for one that was written from the published description.
    """

    vocab_size: int
    max_positions: int = 0
    hidden_size: int
    takes_head: bool = False
    encoders: Mapping[str, Encoder] = {}
    predicts: bool = False
    oracle: str = ""

    @abstractmethod
    def __init__(self, config: Mapping[str, Any], build: ModelBuilder) -> None:
        """Declare everything from ``config`` (the parsed ``config.json``), for pipeline stages what the builder's
        ``layers``, ``first_stage`` and ``last_stage`` say.

        Raises:
            ArchitectureError: the config asks for a variant that the class does not implement; names the key.
        """

    @abstractmethod
    def forward(self, step: Step) -> torch.Tensor:
        """Hidden states of the step's tokens before the final norm, float32 [T, hidden]."""

    @abstractmethod
    def logits(self, hidden: torch.Tensor, step: Step) -> torch.Tensor:
        """Logits float32 [R, vocab_size] for ``hidden`` [R, hidden], rows of the result of ``forward``. With the
        builder's ``head``, what that makes of them: float32 [R, width]."""

    def normed(self, hidden: torch.Tensor) -> torch.Tensor:
        """(optional) Hidden states after the final norm, float32 [R, hidden]; ``hidden`` as for ``logits``. Only for
        requests that want them: a head computes the norm itself. Default: such requests are refused."""
        raise NotImplementedError(f"{type(self).__name__} has no method normed()")

    def greedy(self, hidden: torch.Tensor, step: Step) -> torch.Tensor | None:
        """(optional) Token ids with the largest logit, int32 [R], for a model that finds them faster than all logits;
        of equal logits the lowest id. ``hidden`` as for ``logits``. Default: None; ``logits`` is called instead."""
        del hidden, step
        return None

    def predict(self, hidden: torch.Tensor, step: Step, own: bool = False) -> torch.Tensor:
        """(optional) Run the layer for multi-token prediction, which a model declares if its builder's ``predicts`` is
        set. It has state like any layer. Returns its hidden states, float32 [T, hidden].

        Args:
            hidden: what ``forward`` returned for this step.
            step: the same step, but each of ``token_ids`` is the token after that of ``forward``, one position later.
            own: the model has not computed these tokens, and ``hidden`` are the states that this method returned for
                the tokens one position before, in place of the model's.
        """
        raise NotImplementedError(f"{type(self).__name__} has no method predict()")

    def predicted(self, hidden: torch.Tensor, step: Step) -> torch.Tensor:
        """(optional) Logits float32 [R, vocab_size] of the tokens after ``step.token_ids``; ``hidden`` [R, hidden] are
        rows of the result of ``predict``."""
        raise NotImplementedError(f"{type(self).__name__} has no method predicted()")

    @classmethod
    def images(cls, config: Mapping[str, Any]) -> ImageInput | None:
        """(optional) How a model with this ``config`` takes images. Default: None, it takes no images."""
        del config
        return None

    @classmethod
    def longest_text(cls, config: Mapping[str, Any]) -> int | None:
        """(optional) For an encoder of texts, which generates none and computes each text in one step: the tokens of
        the longest text. Default: None, the class generates text."""
        del config
        return None

    @classmethod
    def text_files(cls, files: ModelFiles) -> ModelFiles:
        """(optional) Called for a model without ``tokenizer.json``: its text files, with those that the family's
        published code makes from other files of the folder. Default: ``files`` unchanged."""
        return files

    @classmethod
    def tiny_config(cls) -> dict[str, Any]:
        """(optional) A config with small sizes, for tests and ``evener models``. Default: an empty dict."""
        return {}
