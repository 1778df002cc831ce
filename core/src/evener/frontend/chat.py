"""How a model's conversations become text: asks the installed packages."""

from __future__ import annotations

from functools import partial
from typing import Any

from evener.contracts.checkpoint import ModelFiles
from evener.contracts.encoder import ImageInput
from evener.contracts.generation.chat import Chat, ChatSource
from evener.errors import TemplateError
from evener.frontend.tokenizer import Tokenizer
from evener.plugins.discover import installed_catalog


def open_chat(files: ModelFiles, tokenizer: Tokenizer | None = None, images: ImageInput | None = None) -> Chat:
    """What writes the conversations of a model.

    Args:
        files: of the model.
        tokenizer: of the model; None: it takes no images, and templates get no special tokens.
        images: how it takes images; None: it takes none.

    Raises:
        CheckpointError: a file is malformed.
    """
    source = ChatSource(files, {}) if tokenizer is None else ChatSource(
        files, tokenizer.special_tokens, images, partial(tokenizer.encode, add_special_tokens=False)
    )  # fmt: skip
    answers = [*installed_catalog().answers("chat reader", source), _Unread()]
    return next((chat for chat in answers if chat.available), answers[0])  # type: ignore[no-any-return]


class _Unread(Chat):
    """The chat of a model whose files no installed package can read."""

    def __init__(self) -> None:
        self.templates = {}

    def template(self, with_tools: bool) -> str:
        raise TemplateError("no installed package knows how this model writes conversations; type: pip install "
                            "evener-formats, or send a prompt to completions instead", "messages")  # fmt: skip

    def render(self, messages: list[dict[str, Any]], **options: Any) -> str:
        return self.template(bool(options.get("tools")))

    prompt = render
