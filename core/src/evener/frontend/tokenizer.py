"""A model's tokenizer: text to token ids and back, and which texts are too long to be encoded."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence

from evener.contracts.checkpoint import ModelFiles
from evener.contracts.tokenizer import Vocabulary
from evener.errors import CheckpointError
from evener.frontend.detokenize import ByteDetokenizer, Detokenizer, WindowDetokenizer
from evener.plugins.discover import installed_catalog

#: Characters for each token of a context in which few texts of that length fit.
_SURELY_LONG = 8
#: Tokens that the cut end of a text may have and the whole text has not: a word, which is cut, may be one token.
_MOST_OF_A_CUT = 256


class Tokenizer:
    """A model's tokenizer. Safe to use from several threads.

    Args:
        vocabulary: the underlying library.
        special_tokens: ``bos_token`` and similar names with their text, and ``additional_special_tokens`` with a list;
            for templates.
    """

    def __init__(self, vocabulary: Vocabulary, special_tokens: Mapping[str, str | list[str]]) -> None:
        self.special_tokens = special_tokens
        self._vocabulary = vocabulary
        self._special_ids = vocabulary.special_ids()
        self._rule = vocabulary.byte_rule()
        self._bytes: dict[int, bytes] = {}

    @classmethod
    def of(cls, files: ModelFiles) -> Tokenizer | None:
        """The tokenizer that an installed package reads from a model's files; None if they have none, as in a folder
        with only ``config.json``.

        Raises:
            CheckpointError: the files cannot be used, or need a package that is not installed.
        """
        catalog = installed_catalog()
        if not catalog.lazy_imports("tokenizer reader") and files.text("tokenizer.json") is not None:
            raise CheckpointError(f"{files.path} has a tokenizer, and no installed package reads it; type: pip install "
                                  "evener-formats")  # fmt: skip
        found = next(catalog.answers("tokenizer reader", files), None)
        return None if found is None else cls(found.vocabulary, found.special_tokens)

    @property
    def vocab_size(self) -> int:
        """Number of tokens, added ones included; the model's own vocabulary may be larger."""
        return self._vocabulary.size()

    @property
    def eos_id(self) -> int | None:
        """The id of ``eos_token``; None if the tokenizer has none."""
        token = self.special_tokens.get("eos_token")
        return self._vocabulary.id(token) if isinstance(token, str) else None

    def encode(self, text: str | tuple[str, str], add_special_tokens: bool = True) -> list[int]:
        """Ids of ``text``, or of a pair of texts; ``add_special_tokens`` adds BOS and similar tokens as
        ``tokenizer.json`` says. Special tokens written in ``text`` always become their ids."""
        return self._vocabulary.encode(text, add_special_tokens)

    @functools.cached_property
    def most_bytes(self) -> float:
        """A text of more than that times n bytes has more than n tokens. Infinite if any text may have few."""
        longest = max((len((self._vocabulary.token(i) or "").encode()) for i in range(self.vocab_size)), default=1)
        return self._vocabulary.most_bytes(longest)

    def exceeds(self, text: str, limit: int) -> bool:
        """Whether ``text`` has more than ``limit`` tokens, found without encoding a text that is far longer. False: it
        must be encoded to know."""
        size = len(text.encode())
        if size <= limit or size > limit * self.most_bytes:
            return size > limit
        size = limit
        while len(text) > _SURELY_LONG * limit and size < len(text):
            # Spaces at the cut may belong to a special token that takes those before it.
            if len(self.encode(text[:size].rstrip(), False)) > limit + _MOST_OF_A_CUT:
                return True
            size *= 2
        return False

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """Text of ``ids``, the same as a detokenizer streams."""
        detokenizer = self.detokenizer(skip_special_tokens)
        return "".join([*(detokenizer.push(i) for i in ids), detokenizer.finish()])

    def detokenizer(self, skip_special_tokens: bool = True) -> Detokenizer:
        """A new detokenizer for one sample."""
        skipped = self._special_ids if skip_special_tokens else frozenset()
        if self._rule is None:
            return WindowDetokenizer(self._vocabulary.decode, lambda i: i not in skipped)
        return ByteDetokenizer(lambda i: b"" if i in skipped else self.token_bytes(i), self._rule.strip_first_space)

    def token(self, token_id: int) -> str | None:
        """The token as the vocabulary writes it, such as ``Ġis``; None for an unknown id."""
        return self._vocabulary.token(token_id)

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes of one token, special or not; empty for an unknown id. They may be part of a character."""
        found = self._bytes.get(token_id)
        if found is None:
            spelling = self._vocabulary.token(token_id)
            if spelling is None:
                found = b""
            elif self._rule is None:
                found = self._vocabulary.decode([token_id]).encode("utf-8")
            else:
                found = self._rule.to_bytes(spelling)
            self._bytes[token_id] = found
        return found
