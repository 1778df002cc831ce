"""The encoder contract: inputs other than text, as rows that replace token embeddings.

An architecture that takes images has two more parts. ``Architecture.encoders`` run in the worker. They are declared
through the builder like layers, run when a step first needs an item, and their rows are kept while requests read them.
``Architecture.images`` runs in the front end, without a model: it says how an image is written in a prompt and prepares
the encoder's input.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import numpy as np
    import torch
    from PIL import Image


class Encoder(ABC):
    """Encodes one kind of media to rows; a value of ``Architecture.encoders``.

    Attributes:
        rows: number of rows per item.
        tokens: rows of its largest call site; resolution makes a bucket for them.
        shape, dtype: of the input of ``encode``, by numpy's names.
    """

    rows: int
    tokens: int
    shape: tuple[int, ...]
    dtype: str

    @abstractmethod
    def encode(self, value: torch.Tensor) -> torch.Tensor:
        """The rows [rows, hidden] of one item, on the device of ``value``. They replace embeddings after the model's
        scale of embeddings, if it has one."""


class ImageInput(ABC):
    """How a model takes images; made by ``Architecture.images`` in the front end.

    Attributes:
        encoder: name of the model's encoder for them.
        rows: number of tokens that one image takes in a prompt.
    """

    encoder: str
    rows: int

    @abstractmethod
    def text(self, number: int) -> str:
        """The text of image ``number`` of a conversation (the first is 1) in a message, without its placeholder
        tokens."""

    @abstractmethod
    def expand_placeholders(self, ids: list[int]) -> tuple[list[int], list[int]]:
        """A prompt's ids with ``rows`` placeholder tokens inserted for each image, and the index of each image's first
        placeholder."""

    @abstractmethod
    def prepare(self, image: Image.Image) -> np.ndarray[Any, Any]:
        """The encoder's input for ``image``, of the encoder's ``shape`` and ``dtype``."""
