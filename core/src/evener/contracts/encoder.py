"""The encoder contract: what a model reads beside text, as rows in place of embeddings.

An architecture that sees has two parts more. ``Architecture.encoders`` run in the worker: declared through the builder
like every layer, run when a step first needs an item, their rows kept while requests read them. ``Architecture.images``
runs in the front end, without a model: it says how an image is written in a prompt, and what the encoder gets of it.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import numpy as np
    import torch
    from PIL import Image


class Encoder(ABC):
    """Makes rows of one kind of media; a member of ``Architecture.encoders``.

    Attributes:
        rows: that one item gives.
        tokens: rows of its largest call site, so that resolution has a bucket for them.
        shape, dtype: of what ``encode`` takes, as numpy names it.
    """

    rows: int
    tokens: int
    shape: tuple[int, ...]
    dtype: str

    @abstractmethod
    def encode(self, value: torch.Tensor) -> torch.Tensor:
        """The rows [rows, hidden] of one item, on its device. They are as long as embeddings after their scale."""


class ImageInput(ABC):
    """How a model takes images; made by ``Architecture.images`` in the front end.

    Attributes:
        encoder: which of the model's encoders reads them; rows: tokens that one stands for.
    """

    encoder: str
    rows: int

    @abstractmethod
    def text(self, number: int) -> str:
        """How image ``number`` of a conversation, from 1 on, is written in a message, without the tokens that it
        stands for."""

    @abstractmethod
    def place(self, ids: list[int]) -> tuple[list[int], list[int]]:
        """A prompt's ids with as many tokens put in for each image as it has rows, and where the first of each is."""

    @abstractmethod
    def prepare(self, image: Image.Image) -> np.ndarray[Any, Any]:
        """What the encoder takes, of the encoder's ``shape`` and ``dtype``."""
