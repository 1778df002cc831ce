"""The tools of a chat request, in OpenAI's format, and which of them are called."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, ConfigDict, Field, WithJsonSchema
from pydantic_core import PydanticCustomError

from evener.errors import RequestError
from evener_server.messages import Body

#: A request may have so many tools.
MOST_TOOLS = 512


class Function(Body):
    """A function that the model may call; ``parameters`` is a JSON schema."""

    model_config = ConfigDict(extra="ignore")

    name: Annotated[str, Field(pattern=r"^[a-zA-Z0-9_.-]{1,128}$")]
    description: str | None = None
    parameters: dict[str, Any] | None = None
    #: Arguments are held to the schema. A forced call's always are.
    strict: bool | None = None


class Tool(Body):
    """One tool."""

    model_config = ConfigDict(extra="ignore")

    type: Literal["function"] = "function"
    function: Function

    def plain(self) -> dict[str, Any]:
        """The tool as chat templates read it."""
        return self.model_dump(exclude={"function": {"strict"}}, exclude_none=True)


Tools = Annotated[list[Tool], Field(max_length=MOST_TOOLS, fail_fast=True)]


@dataclass(frozen=True)
class ToolChoice:
    """Which tools an answer calls.

    Attributes:
        forced: it calls at least one.
        names: those that it may call; None: any.
        single: it makes one call.
        never: it calls none.
    """

    forced: bool = False
    names: frozenset[str] | None = None
    single: bool = False
    never: bool = False

    def check(self, tools: Sequence[Tool]) -> None:
        """Check it against the request's tools.

        Raises:
            RequestError: there are none, or none with such a name.
        """
        if self.forced and not tools:
            raise RequestError("tool_choice asks for a call, but tools is missing; send the tools", "tool_choice")
        lost = (self.names or frozenset()) - {tool.function.name for tool in tools}
        if lost:
            raise RequestError(f"tool_choice names {min(lost)[:64]!r}, which is not among the tools", "tool_choice")


_FORMS = (
    '"none", "auto", "required", {"type": "function", "function": {"name": …}} or {"type": "allowed_tools", '
    '"allowed_tools": {"mode": "auto" or "required", "tools": […]}}'
)


def _tool_choice(value: Any) -> Any:
    simple = {"none": ToolChoice(never=True), "auto": ToolChoice(), "required": ToolChoice(forced=True)}
    if isinstance(value, str) and value in simple:
        return simple[value]
    if isinstance(value, dict) and value.get("type") == "allowed_tools":
        allowed = value.get("allowed_tools")
        tools = allowed.get("tools") if isinstance(allowed, dict) else None
        mode = allowed.get("mode") if isinstance(allowed, dict) else None
        names = [_name(tool) for tool in tools] if isinstance(tools, list) else []
        if names and None not in names and mode in ("auto", "required"):
            return ToolChoice(forced=mode == "required", names=frozenset(filter(None, names)))
    elif (name := _name(value)) is not None:
        return ToolChoice(forced=True, names=frozenset([name]), single=True)
    raise PydanticCustomError("invalid_value", "must be {forms}", {"forms": _FORMS})


def _name(value: Any) -> str | None:
    """The name of the function in an object like a tool; None: it has none."""
    named = isinstance(value, dict) and value.get("type", "function") == "function"
    function = value.get("function") if named else None
    name = function.get("name") if isinstance(function, dict) else None
    return name if isinstance(name, str) else None


#: ``tool_choice`` of a request.
Choice = Annotated[
    ToolChoice | None,
    BeforeValidator(lambda value: None if value is None else _tool_choice(value)),
    WithJsonSchema({"anyOf": [{"enum": ["none", "auto", "required"]}, {"type": "object"}, {"type": "null"}]}),
]
