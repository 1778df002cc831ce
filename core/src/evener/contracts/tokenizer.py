"""The tokenizer contract: text to token ids and back, and who reads that from a model's files. Torch-free.

A package announces a reader in ``Descriptor.tokenizer_readers``: a function ``(files: ModelFiles) -> ReadTokenizer |
None``. It returns None if the files have no tokenizer of its format, and raises ``CheckpointError`` if they have one
that cannot be used. Core asks every installed reader, in the front end; the first answer counts. Streaming, limits on
length and stop strings are core's.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class ByteRule:
    """A decoder in which each token has fixed bytes.

    Attributes:
        to_bytes: from a token's entry in the vocabulary to its bytes.
        strip_first_space: the decoder removes one space at the beginning of the text.
    """

    to_bytes: Callable[[str], bytes]
    strip_first_space: bool = False


class Vocabulary(ABC):
    """The tokens of a model, and a library that encodes with them. Safe to use from several threads."""

    @abstractmethod
    def encode(self, text: str | tuple[str, str], add_special_tokens: bool) -> list[int]:
        """Ids of ``text``; with ``add_special_tokens`` also BOS and similar tokens, if the model has them. Two texts
        are a pair, joined as the model was trained with pairs."""

    @abstractmethod
    def decode(self, ids: Sequence[int]) -> str:
        """Text of ``ids``, special tokens included."""

    @abstractmethod
    def token(self, token_id: int) -> str | None:
        """The token's entry in the vocabulary; None for an unknown id."""

    @abstractmethod
    def id(self, token: str) -> int | None:
        """The id of an entry in the vocabulary; None if there is none."""

    @abstractmethod
    def special_ids(self) -> frozenset[int]:
        """Ids of special tokens, which are not text."""

    @abstractmethod
    def size(self) -> int:
        """Number of tokens, added ones included."""

    def byte_rule(self) -> ByteRule | None:
        """(optional) How a token becomes bytes. Default: None, tokens have no fixed bytes."""
        return None

    def most_bytes(self, longest: int) -> float:
        """(optional) The most bytes of text that a token stands for. Default: infinite, there is no limit.

        Args:
            longest: bytes of the longest entry of the vocabulary.
        """
        del longest
        return math.inf


@dataclass(frozen=True)
class ReadTokenizer:
    """What a reader found.

    Attributes:
        vocabulary: the tokens.
        special_tokens: ``bos_token`` and similar names with their text, and ``additional_special_tokens`` with a list;
            for chat templates.
    """

    vocabulary: Vocabulary
    special_tokens: Mapping[str, str | list[str]]
