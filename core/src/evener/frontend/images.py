"""Images of a conversation, put into its prompt as the model writes them."""

from __future__ import annotations

from typing import Any

from evener.contracts.encoder import ImageInput
from evener.contracts.media import MediaPrompt, make_item
from evener.errors import RequestError
from evener.frontend.tokenizer import Tokenizer


class Images:
    """Those of one conversation, of a model that takes them as ``how`` says. What comes from outside is decoded and
    judged before."""

    def __init__(self, how: ImageInput, tokenizer: Tokenizer) -> None:
        self._how, self._tokenizer = how, tokenizer
        self.found: list[Any] = []

    def add(self, image: Any) -> str:
        """Take one of Pillow's images; returns what stands for it in the text."""
        self.found.append(self._how.prepare(image))
        return self._how.text(len(self.found))

    def prompt(self, text: str) -> MediaPrompt:
        """The rendered conversation with what stands for its images.

        Raises:
            RequestError: its text marks images of its own.
        """
        ids, starts = self._how.place(self._tokenizer.encode(text, add_special_tokens=False))
        if len(starts) != len(self.found):
            raise RequestError(
                f"the conversation has {len(self.found)} images and its text {len(starts)} marks of images: leave the "
                "model's marks out of texts, and use a chat template that shows every message", "messages",
            )  # fmt: skip
        both = zip(starts, self.found, strict=True)
        return MediaPrompt(ids, [make_item(at, each, self._how.rows, self._how.encoder) for at, each in both])
