"""How a model's conversations become text: asks the installed packages."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from evener.contracts.checkpoint import ModelFiles
from evener.contracts.generation.chat import Chat, ImageMarks
from evener.errors import TemplateError
from evener.frontend.tokenizer import Tokenizer
from evener.plugins.discover import installed_catalog


def open_chat(
    files: ModelFiles, tokenizer: Tokenizer | None = None, images: Callable[[], ImageMarks] | None = None
) -> Chat:
    """What writes the conversations of a model.

    Args:
        files: of the model.
        tokenizer: has the special tokens.
        images: as ``Chat.images``.

    Raises:
        CheckpointError: a file is malformed.
    """
    special_tokens = {} if tokenizer is None else tokenizer.special_tokens
    answers = [*installed_catalog().answers("chat reader", files, special_tokens), _Unread()]
    found: Chat = next((chat for chat in answers if chat.available), answers[0])
    found.images = images
    return found


class _Unread(Chat):
    """Of a model whose files no installed package understands."""

    def __init__(self) -> None:
        self.templates = {}

    def template(self, with_tools: bool) -> str:
        raise TemplateError("no installed package knows how this model writes conversations; type: pip install "
                            "evener-formats, or send a prompt to completions instead", "messages")  # fmt: skip

    def render(self, messages: list[dict[str, Any]], **options: Any) -> str:
        return self.template(bool(options.get("tools")))
