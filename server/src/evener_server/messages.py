"""The messages of a chat, as OpenAI has them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, GetCoreSchemaHandler, GetJsonSchemaHandler
from pydantic_core import CoreSchema, PydanticCustomError, core_schema


class Body(BaseModel):
    """Base of everything a client sends: no unknown fields, no conversions."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True, allow_inf_nan=False)


@dataclass(frozen=True, eq=False)
class Only:
    """See ``only``. The API's description lists the values that pass.

    Compared by identity: ``typing`` keeps one of equal annotations, and 0 equals False.
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
            f"; leave it out, or send {' or '.join(map(_shown, self.allowed))}" if self.allowed else "; leave it out"
        )
        raise PydanticCustomError(
            "unsupported_parameter", "is not supported by this server{rest}", {"rest": self.hint or choices}
        )


def only(*allowed: object, hint: str = "") -> Only:
    """For a field that is not implemented: null and the values that ask for nothing pass, any other is refused.

    Args:
        allowed: those values, compared with their type (``0`` is not ``False``).
        hint: what to do instead.
    """
    return Only(allowed, hint)


def _same(value: object, other: object) -> bool:
    return value == other and isinstance(value, bool) == isinstance(other, bool)


def _shown(value: object) -> str:
    return {"True": "true", "False": "false"}.get(str(value), str(value).replace("'", '"'))


def _as_parts(value: object) -> object:
    return [{"type": "text", "text": value}] if isinstance(value, str) else value


class TextPart(Body):
    """One part of a message's content."""

    type: Literal["text"]
    text: str


class ImageUrl(Body):
    """An image: a data: URL with the image itself in it. ``detail`` is the model's own affair."""

    url: str
    detail: Annotated[Any, only("auto")] = None


class ImagePart(Body):
    """An image in a message's content, for models that see."""

    type: Literal["image_url"]
    image_url: ImageUrl


class ToolFunction(Body):
    """The function that an earlier answer called; ``arguments`` is JSON text."""

    name: str
    arguments: str


class ToolCall(Body):
    """A call in an earlier answer."""

    id: str
    type: Literal["function"]
    function: ToolFunction


class Message(Body):
    """One message. What a template may read is passed on to it; the rest must be empty."""

    role: Literal["developer", "system", "user", "assistant", "tool"]
    content: Annotated[
        list[Annotated[TextPart | ImagePart, Field(discriminator="type")]] | None, BeforeValidator(_as_parts)
    ] = None
    name: str | None = None
    reasoning_content: str | None = None
    tool_calls: list[ToolCall] | None = None
    tool_call_id: str | None = None
    refusal: Annotated[Any, only()] = None
    annotations: Annotated[Any, only([])] = None
    audio: Annotated[Any, only()] = None
    function_call: Annotated[Any, only()] = None

    def plain(self) -> dict[str, Any]:
        """The message as ``AsyncLLM.submit_chat`` takes it, but for its images: see ``images.decoded``."""
        out = self.model_dump(
            include={"role", "content", "name", "reasoning_content", "tool_calls", "tool_call_id"}, exclude_none=True
        )
        if self.content is not None and len(self.content) == 1 and isinstance(self.content[0], TextPart):
            out["content"] = self.content[0].text
        if not self.tool_calls:
            out.pop("tool_calls", None)
        return out


Messages = Annotated[list[Message], Field(min_length=1)]
