"""Turns a conversation into the text that the model reads."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import PurePath
from typing import Any

from evener.contracts.checkpoint import ModelFiles
from evener.contracts.media import MediaPrompt
from evener.errors import CheckpointError, RequestError, TemplateError
from evener.frontend.images import ImageCollector
from evener.frontend.render import Renderer
from evener.frontend.tokenizer import Tokenizer

_MOST_CHARS = 1 << 20
#: Fields of a message that templates read; any other field with a value is refused, not ignored.
FIELDS = ("role", "content", "name", "tool_calls", "tool_call_id", "reasoning_content", "thinking", "reasoning")
_REASONING = ("reasoning_content", "thinking", "reasoning")
_DEFAULT, _TOOLS = "default", "tool_use"


class Chat:
    """The chat templates of a model.

    Args:
        templates: template sources by name; ``tool_use`` is used with tools, else ``default``. Empty: the model has no
            template.
        special_tokens: variables for the template.
        renderer: renders the templates.
        images: creates the collector for a conversation's images; None: the model takes no images.

    Attributes:
        templates: as above; they may be replaced before the first conversation.
    """

    def __init__(
        self, templates: dict[str, str], special_tokens: dict[str, str | list[str]] | None = None,
        renderer: Renderer | None = None, images: Callable[[], ImageCollector] | None = None,
    ) -> None:  # fmt: skip
        self.templates, self._special_tokens = templates, dict(special_tokens or {})
        self._renderer, self._images = renderer or Renderer(), images

    @classmethod
    def of(
        cls, files: ModelFiles, tokenizer: Tokenizer | None, images: Callable[[], ImageCollector] | None = None
    ) -> Chat:  # fmt: skip
        """Templates of a model: ``chat_template.jinja`` and ``additional_chat_templates/NAME.jinja``, else
        ``chat_template.json``, else ``tokenizer_config.json`` (one, or a list of named ones).

        Raises:
            CheckpointError: a file is malformed.
        """
        return cls(_find_templates(files), None if tokenizer is None else tokenizer.special_tokens, images=images)

    @property
    def available(self) -> bool:
        """Whether the model has a chat template."""
        return bool(self.templates)

    def prompt(self, messages: list[dict[str, Any]], **options: Any) -> str | MediaPrompt:
        """The result of ``render``; with images, its token ids and the images.

        Raises:
            RequestError, TemplateError: as ``render``, or the text itself contains the model's image marks.
        """
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
        """The text of a conversation including special tokens: encode it with ``add_special_tokens=False``.

        Args:
            messages: in OpenAI's format. Content is a string or a list of text parts, which are joined with newlines.
                Arguments of tool calls may be JSON text.
            tools: function schemas in OpenAI's format.
            add_generation_prompt: end with the beginning of the assistant's message.
            continue_final_message: end within the last message instead, so that the model continues it.
            template_kwargs: further variables for the template (``enable_thinking=False``).
            images: collects content parts that are Pillow images: ``{"type": "image", "image": …}``.

        Raises:
            RequestError: a message is invalid; ``param`` is its path.
            TemplateError: there is no template, or it refused the messages or took too long.
        """
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
        """Start the render process, if the model has a template.

        Raises:
            TemplateError: it does not start.
        """
        if self.templates:
            self._renderer.start()

    def interrupt(self) -> None:
        """End the rendering that runs now, from another thread; it raises ``TemplateError``."""
        self._renderer.interrupt()

    def close(self) -> None:
        """End the render process, if one was started."""
        self._renderer.close()

    def template(self, with_tools: bool) -> str:
        """The source of the template for a conversation with or without tools.

        Raises:
            TemplateError: there is none.
        """
        if not self.templates:
            raise TemplateError("this model has no chat template: send a prompt to completions instead", "messages")
        if with_tools and _TOOLS in self.templates:
            return self.templates[_TOOLS]
        if (found := self.templates.get(_DEFAULT)) is None:
            message = f"this model has chat templates {sorted(self.templates)}, none named 'default': use completions"
            raise TemplateError(message, "messages")
        return found


def normalize(
    messages: object, supports_developer_role: bool = False, images: ImageCollector | None = None
) -> list[dict[str, Any]]:
    """Messages as templates expect them: content as a string with the model's marks for ``images``, the role
    ``developer`` as ``system`` if the template does not know it, tool arguments as objects, no fields that are None.

    Raises:
        RequestError: a message is invalid; ``param`` is the path (``messages[2].content[0]``).
    """
    if not isinstance(messages, list) or not messages:
        raise RequestError("messages must be a list with at least one message", "messages")
    return [_message(message, f"messages[{i}]", supports_developer_role, images) for i, message in enumerate(messages)]


def _message(
    message: object, place: str, supports_developer_role: bool, images: ImageCollector | None
) -> dict[str, Any]:
    if not isinstance(message, dict):
        raise RequestError(f"{place} must be an object with role and content", place)
    role = message.get("role")
    if not (isinstance(role, str) and role):
        raise RequestError(f"{place}.role must be a string, as 'user'", f"{place}.role")
    for name, value in message.items():
        if name not in FIELDS and value not in (None, [], {}):
            where = f"{place}.{name}"
            raise RequestError(f"{where} is not supported by this server", where, "unsupported_parameter")
    plain = {name: message[name] for name in FIELDS if message.get(name) is not None}
    plain["role"] = "system" if role == "developer" and not supports_developer_role else role
    plain["content"] = _content(message.get("content"), f"{place}.content", role == "assistant", images)
    if "tool_calls" in plain:
        plain["tool_calls"] = _tool_calls(plain["tool_calls"], f"{place}.tool_calls")
    reasoning = next((plain[name] for name in _REASONING if name in plain), None)
    # Templates read it under the first or second name; clients send any of the three.
    return plain if reasoning is None else {"thinking": reasoning, **plain, "reasoning_content": reasoning}


def _content(content: object, place: str, optional: bool, images: ImageCollector | None) -> str:
    if isinstance(content, str) or (content is None and optional):
        return content or ""  # many templates add it to other text
    if not isinstance(content, list):
        raise RequestError(f"{place} must be a string or a list of parts", place)
    texts = []
    for i, part in enumerate(content):
        kind = part.get("type") if isinstance(part, dict) else None
        if kind == "image" and images is not None:
            texts.append(images.add(part["image"]))
            continue
        if kind != "text":
            message = f"{place}[{i}] is of type {kind!r}; this model takes parts of type 'text' only"
            raise RequestError(message, f"{place}[{i}].type", "unsupported_parameter")
        if not isinstance(part.get("text"), str):
            raise RequestError(f"{place}[{i}].text must be a string", f"{place}[{i}].text")
        texts.append(part["text"])
    return "\n".join(texts)


def _tool_calls(calls: object, place: str) -> list[dict[str, Any]]:
    if not isinstance(calls, list):
        raise RequestError(f"{place} must be a list", place)
    plain = []
    for i, call in enumerate(calls):
        function = call.get("function") if isinstance(call, dict) else None
        if not isinstance(function, dict) or not isinstance(function.get("name"), str):
            raise RequestError(f"{place}[{i}] must have a function with a name", f"{place}[{i}].function")
        arguments = function.get("arguments")
        if isinstance(arguments, str):
            # OpenAI's API has JSON text; templates need an object.
            try:
                arguments = json.loads(arguments or "{}")
            except (ValueError, RecursionError) as error:  # also a number of very many digits
                where = f"{place}[{i}].function.arguments"
                raise RequestError(f"{where} is not valid JSON: {error}", where) from error
        plain.append({**call, "function": {**function, "arguments": arguments}})
    return plain


def _find_templates(files: ModelFiles) -> dict[str, str]:
    main = files.text("chat_template.jinja")
    if main is not None:
        more = {name: files.text(name) or "" for name in files.names("additional_chat_templates/*.jinja")}
        return {PurePath(name).stem: text for name, text in more.items()} | {_DEFAULT: main}
    for name in ("chat_template.json", "tokenizer_config.json"):
        found = files.json(name).get("chat_template")
        if isinstance(found, str):
            return {_DEFAULT: found}
        if isinstance(found, list):
            try:
                return {entry["name"]: entry["template"] for entry in found}
            except (TypeError, KeyError) as error:
                where = files.where(name)
                raise CheckpointError(f"{where}: every chat template must have a name and a template") from error
    return {}
