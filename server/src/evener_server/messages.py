"""The messages of a chat, in OpenAI's format."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated, Any, Literal, TypeAlias

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Discriminator,
    Field,
    GetCoreSchemaHandler,
    GetJsonSchemaHandler,
    Tag,
)
from pydantic_core import CoreSchema, PydanticCustomError, core_schema


class Body(BaseModel):
    """Base of everything that a client sends: no unknown fields, no type conversions."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True, allow_inf_nan=False)


@dataclass(frozen=True, eq=False)
class AllowedValues:
    """See ``allowed_values``. The API's description lists the allowed values.

    Compared by identity: ``typing`` merges equal annotations, and 0 equals False.
    """

    allowed: tuple[object, ...]
    hint: str

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        return core_schema.no_info_after_validator_function(self._check, handler(source))

    def __get_pydantic_json_schema__(self, schema: CoreSchema, handler: GetJsonSchemaHandler) -> dict[str, Any]:
        return {"enum": [None, *self.allowed]}

    def _check(self, value: object) -> object:
        if value is None or any(_same(value, other) for other in self.allowed):
            return value
        choices = (
            f"; leave it out, or send {' or '.join(map(_format_value, self.allowed))}"
            if self.allowed
            else "; leave it out"
        )
        raise PydanticCustomError(
            "unsupported_parameter", "is not supported by this server{rest}", {"rest": self.hint or choices}
        )


def allowed_values(*allowed: object, hint: str = "") -> AllowedValues:
    """For a field that is not implemented: null and values without an effect are accepted, any other is refused.

    Args:
        allowed: the values without an effect, compared with their type (``0`` is not ``False``).
        hint: what to do instead.
    """
    return AllowedValues(allowed, hint)


def _same(value: object, other: object) -> bool:
    return value == other and isinstance(value, bool) == isinstance(other, bool)


def _format_value(value: object) -> str:
    return {"True": "true", "False": "false"}.get(str(value), str(value).replace("'", '"'))


def _as_parts(value: object) -> object:
    if isinstance(value, str):
        return [{"type": "text", "text": value}]
    return [_as_text(part) for part in value] if isinstance(value, list) else value


def _as_text(part: object) -> object:
    """A refusal as the text that it is."""
    if isinstance(part, dict) and part.get("type") == "refusal" and isinstance(part.get("refusal"), str):
        return {"type": "text", "text": part["refusal"]}
    return part


class TextPart(Body):
    """One part of a message's content."""

    type: Literal["text"]
    text: str


class ImageUrl(Body):
    """An image: a data: URL that contains the image. ``detail`` changes nothing: how many tokens an image has is up to
    the model."""

    url: str
    detail: Literal["auto", "low", "high", "original"] | None = None


class ImagePart(Body):
    """An image in a message's content, for multimodal models."""

    type: Literal["image_url"]
    image_url: ImageUrl


class RowsPart(Body):
    """Embeddings in a message's content, which the model reads in place of a text: see ``embedded_prompts``."""

    type: Literal["prompt_embeds"]
    data: Annotated[str, Field(min_length=1)]


class RefusalPart(Body):
    """A refusal of an earlier answer, which the model reads as a text: it is made a ``TextPart`` before all checks."""

    type: Literal["refusal"]
    refusal: str


ContentPart: TypeAlias = Annotated[TextPart | ImagePart | RowsPart | RefusalPart, Field(discriminator="type")]


def _reasoning_kind(value: object) -> str:
    return "rows" if isinstance(value, (dict, RowsPart)) else "text"


#: What the assistant thought: a text, or rows in place of one.
Reasoning: TypeAlias = Annotated[
    Annotated[str, Tag("text")] | Annotated[RowsPart, Tag("rows")], Discriminator(_reasoning_kind)
]


class ToolFunction(Body):
    """The function that an earlier answer called; ``arguments`` is JSON text."""

    model_config = ConfigDict(extra="ignore")

    name: str
    arguments: str


class ToolCall(Body):
    """A call in an earlier answer. Clients that have put it together from a stream send its ``index`` too."""

    model_config = ConfigDict(extra="ignore")

    id: str | None = None
    type: Literal["function"] = "function"
    function: ToolFunction


class Message(Body):
    """One message. Fields that templates can read are passed to them; others that the answer depends on must be empty.
    Any role is passed to the template, which may refuse it."""

    role: Annotated[str, Field(min_length=1, max_length=64)]
    content: Annotated[
        Annotated[list[ContentPart], Field(fail_fast=True)] | None,
        BeforeValidator(_as_parts),
    ] = None
    name: str | None = None
    reasoning_content: Reasoning | None = None
    #: The newer name of the same, which answers have too.
    reasoning: Reasoning | None = None
    tool_calls: Annotated[list[ToolCall], Field(fail_fast=True)] | None = None
    tool_call_id: str | None = None
    audio: Annotated[Any, allowed_values()] = None
    function_call: Annotated[Any, allowed_values()] = None

    @property
    def embedded(self) -> bool:
        """Whether a part of it is rows."""
        parts = (*(self.content or ()), self.reasoning, self.reasoning_content)
        return any(isinstance(part, RowsPart) for part in parts)

    def plain(self) -> dict[str, Any]:
        """The message as ``AsyncLLM.submit_chat`` takes it, with images still encoded: see ``images.decode_images``."""
        out = self.model_dump(
            include={"role", "content", "name", "reasoning_content", "reasoning", "tool_calls", "tool_call_id"},
            exclude_none=True,
        )
        if self.content is not None and len(self.content) == 1 and isinstance(self.content[0], TextPart):
            out["content"] = self.content[0].text
        if not self.tool_calls:
            out.pop("tool_calls", None)
        # Templates read either name.
        for name, other in ("reasoning", "reasoning_content"), ("reasoning_content", "reasoning"):
            if name in out:
                out.setdefault(other, out[name])
        return out


def replaced_parts(
    messages: list[dict[str, Any]], kind: str, replace: Callable[[dict[str, Any], str], dict[str, Any]]
) -> list[dict[str, Any]]:
    """Messages as ``Message.plain`` gives them, with ``replace(part, path)`` in place of each part of type ``kind`` of
    their contents, in order."""

    def content(given: Any, path: str) -> Any:
        if not isinstance(given, list):
            return given
        return [replace(p, f"{path}[{i}]") if p["type"] == kind else p for i, p in enumerate(given)]

    return [{**m, "content": content(m.get("content"), f"messages[{i}].content")} for i, m in enumerate(messages)]


#: ``fail_fast``: without it pydantic describes every wrong item, of which a body may have very many.
Messages = Annotated[list[Message], Field(min_length=1, fail_fast=True)]
