"""The chat templates of a model folder: which there are, and the text that they make of a conversation."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from pathlib import PurePath
from typing import Any

from evener.contracts.checkpoint import ModelFiles
from evener.contracts.generation.chat import DEFAULT, Chat, ChatSource
from evener.contracts.media import MediaPrompt
from evener.errors import CheckpointError, RequestError, TemplateError
from evener_formats.chat.images import ImageCollector
from evener_formats.chat.messages import normalize
from evener_formats.chat.render import Renderer

_MOST_CHARS = 1 << 20


def read_chat(source: ChatSource) -> TemplateChat:
    """The templates of a model: ``chat_template.jinja`` and ``additional_chat_templates/NAME.jinja``, else
    ``chat_template.json``, else ``tokenizer_config.json`` (one, or a list of named ones).

    Raises:
        CheckpointError: a file is malformed.
    """
    images = None
    if source.images is not None and source.encode is not None:
        images = partial(ImageCollector, source.images, source.encode)
    return TemplateChat(_find_templates(source.files), source.special_tokens, images=images)


class TemplateChat(Chat):
    """Conversations as jinja templates write them.

    Args:
        templates: as ``Chat.templates``.
        special_tokens: variables for the templates.
        renderer: renders them.
        images: creates the collector for a conversation's images; None: the model takes no images.
    """

    def __init__(
        self, templates: dict[str, str], special_tokens: Mapping[str, str | list[str]] | None = None,
        renderer: Renderer | None = None, images: Callable[[], ImageCollector] | None = None,
    ) -> None:  # fmt: skip
        self.templates, self._special_tokens = templates, dict(special_tokens or {})
        self._renderer, self._images = renderer or Renderer(), images

    def prompt(self, messages: list[dict[str, Any]], **options: Any) -> str | MediaPrompt:
        images = self._images() if self._images is not None else None
        text = self.render(messages, images=images, **options)
        return text if images is None or not images.found else images.prompt(text)

    def render(
        self,
        messages: list[dict[str, Any]],
        *,
        tools: list[dict[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        template_kwargs: dict[str, Any] | None = None,
        images: ImageCollector | None = None,
    ) -> str:
        if len(template := self.template(bool(tools))) > _MOST_CHARS:  # compiling it takes a hundred times its size
            raise TemplateError(f"the model's chat template has {len(template):,} characters, too many", "messages")
        plain = normalize(messages, supports_developer_role="developer" in template, images=images)
        if continue_final_message:
            add_generation_prompt = False
            if not plain[-1]["content"]:
                raise RequestError("continue_final_message needs a last message with text", "messages")
        variables = {
            **self._special_tokens, "tools": tools, "documents": None, "add_generation_prompt": add_generation_prompt,
            **(template_kwargs or {}),
        }  # fmt: skip
        taken = {"messages", "tools", "add_generation_prompt", "continue_final_message"} & set(template_kwargs or {})
        if taken:
            message = f"template_kwargs must not have {min(taken)!r}, which has its own parameter"
            raise RequestError(message, "template_kwargs")
        return self._renderer.render(template, plain, continue_final_message, variables)

    def warm_up(self) -> None:
        if self.templates:
            self._renderer.start()

    def interrupt(self) -> None:
        self._renderer.interrupt()

    def close(self) -> None:
        self._renderer.close()


def _find_templates(files: ModelFiles) -> dict[str, str]:
    main = files.text("chat_template.jinja")
    if main is not None:
        more = {name: files.text(name) or "" for name in files.names("additional_chat_templates/*.jinja")}
        return {PurePath(name).stem: text for name, text in more.items()} | {DEFAULT: main}
    for name in ("chat_template.json", "tokenizer_config.json"):
        found = files.json(name).get("chat_template")
        if isinstance(found, str):
            return {DEFAULT: found}
        if isinstance(found, list):
            try:
                return {entry["name"]: entry["template"] for entry in found}
            except (TypeError, KeyError) as error:
                where = files.where(name)
                raise CheckpointError(f"{where}: every chat template must have a name and a template") from error
    return {}
