"""The chat contract: a conversation as the text that a model reads. Torch-free.

A package announces a reader in ``Descriptor.chat_readers``: a function ``(source: ChatSource) -> Chat | None``. It
returns None if the files say nothing in its format, and raises ``CheckpointError`` if they say it wrongly. Core asks
every installed reader, in the front end; the first answer that is ``available`` counts, else the first.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from evener.contracts.checkpoint import ModelFiles
from evener.contracts.encoder import ImageInput
from evener.contracts.media import MediaPrompt
from evener.errors import TemplateError

#: Names of templates that core knows: for every conversation, and for one with tools.
DEFAULT, TOOLS = "default", "tool_use"


@dataclass(frozen=True)
class ChatSource:
    """What a reader is asked.

    Attributes:
        files: of the model.
        special_tokens: as in ``ReadTokenizer``.
        images: how the model takes images; None: it takes none.
        encode: text to token ids, without more special tokens than are in it.
    """

    files: ModelFiles
    special_tokens: Mapping[str, str | list[str]]
    images: ImageInput | None = None
    encode: Callable[[str], list[int]] | None = None


class Chat(ABC):
    """Writes the conversations of one model. Only ``interrupt`` may be called while another thread is in a method.

    Attributes:
        templates: sources by name; ``tool_use`` is used with tools, else ``default``. Empty: the model takes no
            conversations. They may be replaced before the first conversation; parsers recognize a model by them.
    """

    templates: dict[str, str]

    @property
    def available(self) -> bool:
        """Whether the model takes conversations."""
        return bool(self.templates)

    @abstractmethod
    def render(
        self, messages: list[dict[str, Any]], *, tools: list[dict[str, Any]] | None = None,
        add_generation_prompt: bool = True, continue_final_message: bool = False,
        template_kwargs: dict[str, Any] | None = None,
    ) -> str:  # fmt: skip
        """The text of a conversation including special tokens: encode it with ``add_special_tokens=False``.

        Args:
            messages: in OpenAI's format. Content is a string or a list of text parts, which are joined with newlines.
                Arguments of tool calls may be JSON text.
            tools: function schemas in OpenAI's format.
            add_generation_prompt: end with the beginning of the assistant's message.
            continue_final_message: end within the last message instead, so that the model continues it.
            template_kwargs: further variables for the template (``enable_thinking=False``).

        Raises:
            RequestError: a message is invalid; ``param`` is its path.
            TemplateError: there is no template, or it refused the messages or took too long.
        """

    @abstractmethod
    def prompt(self, messages: list[dict[str, Any]], **options: Any) -> str | MediaPrompt:
        """The result of ``render`` with these ``options``. Content parts may be Pillow images, ``{"type": "image",
        "image": …}``, if the model takes images; with any, its token ids and the images.

        Raises:
            RequestError, TemplateError: as ``render``, or the text itself contains the model's image marks.
        """

    def template(self, with_tools: bool) -> str:
        """The source of the template for a conversation with or without tools.

        Raises:
            TemplateError: there is none.
        """
        if not self.templates:
            raise TemplateError("this model has no chat template: send a prompt to completions instead", "messages")
        if with_tools and TOOLS in self.templates:
            return self.templates[TOOLS]
        if (found := self.templates.get(DEFAULT)) is None:
            message = f"this model has chat templates {sorted(self.templates)}, none named 'default': use completions"
            raise TemplateError(message, "messages")
        return found

    def warm_up(self) -> None:  # noqa: B027  # optional
        """(optional) Start what ``render`` needs, so that the first chat does not wait for it. Default: nothing.

        Raises:
            TemplateError: it does not start.
        """

    def interrupt(self) -> None:  # noqa: B027  # optional
        """(optional) End the ``render`` that runs now, from another thread; it raises ``TemplateError``. Default:
        nothing, so it must end by itself."""

    def close(self) -> None:  # noqa: B027  # optional
        """(optional) Free what was started. Default: nothing."""
