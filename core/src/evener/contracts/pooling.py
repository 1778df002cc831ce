"""The pooling contract: models that turn a text into a vector or a score instead of generating tokens.

Such a model's head is not that of a language model. It computes a row of numbers for tokens of the text, and the
engine pools the rows. What a model's files say about that is read by a package that announces a function::

    Descriptor(name="my-package", pooling_readers={"my_files": "my_package.pooling:read"}, …)

When a model is loaded, every installed reader is asked, unless ``infer.task=generate``. The first answer counts.

The readers are asked, and rows are pooled, by a package that is pinned to its core's version. It announces the parts
(``Descriptor.pooling_parts``):

- ``choose``: takes a ``PoolingRequest`` and the model's class, and returns a ``PoolingAnswer``, or None for a model
  that generates text.
- ``limits``: takes the configuration and ``Architecture.longest_text`` of an encoder, and returns the configuration
  with room for a whole text in a step, and the reasons for the keys that it has changed.
- ``outputs``: for models that generate text: takes the worker's ``Runner``, a plan with ``Plan.outputs``, the hidden
  states of its tokens and the step, and returns the rows of each output, as read-backs of parts.
- ``pooler``: constructed with the model's settings, the number of requests that run at a time, and the worker's
  ``Runner``; it takes the place of sampling (``Runner.instead``).
- ``rows``: for models that generate text: the rows of numbers that one request wants for its tokens, and those in which
  the log-probabilities of the whole vocabulary are found. Constructed with its ``SamplingParams``, how many of the
  likeliest tokens it wants of samples and of the prompt, the numbers of these tokens, the size of the vocabulary, and
  whether there is a final norm; raises RequestError. ``read`` makes of ``Tokens`` what belongs in a ``Delta``.
- ``vectors``: constructed with the model's settings, the width of its rows, and the numbers that a vector is to have.
  ``params`` are what the engine is asked for, and ``of_output`` makes an ``Embedding`` of what it sends.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import msgspec

from evener.contracts.checkpoint import Checkpoint
from evener.errors import RequestError

#: What a model does, for messages.
_DOES = {"generate": "generates text", "embed": "embeds texts (/v1/embeddings)", "score": "scores texts (/v1/rerank)"}
#: Of which of a text's tokens the row is taken: the last, the first, or the mean of all.
Pooling = Literal["last", "mean", "cls"]


class PoolingSettings(msgspec.Struct, frozen=True, kw_only=True):
    """How a model makes the vector or the score of a text.

    Attributes:
        task: "embed" or "score".
        pooling: of which tokens: the last, the first, or the mean of all.
        normalize: whether a vector is divided by its length.
        sizes: numbers that a shorter vector may have (Kusupati et al. 2022); empty: any.
        tokens: for a score of logits, the id of the token for yes, and that for no, if there is one. Empty: the score
            is of a head for one label.
        sigmoid: whether a score is the probability, and not the log-odds.
        pairs: whether the tokenizer joins the two texts of a pair, with the model's own tokens between them.
    """

    task: str = "embed"
    pooling: Pooling = "last"
    normalize: bool = True
    sizes: list[int] = []
    tokens: list[int] = []
    sigmoid: bool = True
    pairs: bool = False


@dataclass(frozen=True)
class PoolingRequest:
    """What a reader is asked.

    Attributes:
        checkpoint: the model's, as it is stored.
        task, pooling: the configuration keys ``infer.task`` ("auto", "embed" or "score") and ``infer.pooling``
            ("auto" or a way to pool).
        generates: whether the class that the checkpoint names is registered, as one that generates text. One that is
            not, as ``XModel``, has no head for that.
        longest: ``Architecture.longest_text``; None: the model is no encoder of texts.
    """

    checkpoint: Checkpoint
    task: str
    pooling: str
    generates: bool
    longest: int | None = None

    @property
    def wanted(self) -> bool:
        """Whether the configuration or the files want more than text to be generated, as far as core can see."""
        may = self.task == "auto" and (not self.generates or self.checkpoint.text("modules.json") is not None)
        return may or self.task not in ("auto", "generate")


@dataclass(frozen=True)
class PoolingAnswer:
    """How a model embeds or scores a text.

    Attributes:
        settings: how the rows of its tokens become a vector or a score.
        head: declares what computes a row from the last hidden states, for ``Builder.head``; None: the head of a
            language model.
    """

    settings: PoolingSettings
    head: Callable[..., Any] | None


@dataclass(frozen=True)
class Embedding:
    """The vector of a text, a numpy array float32 [numbers]; its tokens, and how many of them were in the prefix
    cache."""

    vector: Any
    prompt_token_ids: list[int]
    num_cached_tokens: int = 0


def check_task(wanted: str, settings: PoolingSettings | None) -> None:
    """Raises:
    RequestError: the model does not do what is ``wanted``: "generate", "embed" or "score".
    """
    if wanted != (task := "generate" if settings is None else settings.task):
        message = f"this model {_DOES[task]}; to have one that {_DOES[wanted]}, start it with infer.task={wanted}"
        raise RequestError(message, "model", "unsupported_task")


#: A function of ``Descriptor.pooling_readers``. It returns None for a model that generates text, and raises
#: ArchitectureError, CheckpointError or ConfigError for one that wants what cannot be computed.
PoolingReader = Callable[[PoolingRequest], PoolingAnswer | None]
