"""Puts the images of a conversation into its prompt, in the model's own format."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from evener.contracts.encoder import ImageInput
from evener.contracts.media import MediaPrompt, make_item
from evener.errors import RequestError


class ImageCollector:
    """The images of one conversation, in the format ``how`` of the model. Images are already decoded and checked;
    ``encode`` as in ``ChatSource``."""

    def __init__(self, how: ImageInput, encode: Callable[[str], list[int]]) -> None:
        self._how, self._encode = how, encode
        self.found: list[Any] = []

    def add(self, image: Any) -> str:
        """Add a Pillow image; returns its placeholder in the text."""
        self.found.append(self._how.prepare(image))
        return self._how.text(len(self.found))

    def prompt(self, text: str) -> MediaPrompt:
        """The token ids of the rendered conversation, with its images.

        Raises:
            RequestError: the number of image marks in the text is not the number of images.
        """
        ids, starts = self._how.expand_placeholders(self._encode(text))
        if len(starts) != len(self.found):
            raise RequestError(
                f"the conversation has {len(self.found)} images, but its text has {len(starts)} image marks: leave the "
                "model's image marks out of texts, and use a chat template that shows every message", "messages",
            )  # fmt: skip
        both = zip(starts, self.found, strict=True)
        return MediaPrompt(ids, [make_item(at, each, self._how.rows, self._how.encoder) for at, each in both])
