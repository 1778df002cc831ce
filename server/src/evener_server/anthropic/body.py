"""The fields of a request to ``/v1/messages``."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Any, Literal

from pydantic import ConfigDict, Field

from evener_server.field_types import MAX_STOPS
from evener_server.messages import Body, allowed_values
from evener_server.protocol import GenerationBody
from evener_server.tools import MOST_TOOLS
from evener_server.translated import TextOrList

#: ``tool_choice`` of a chat completion.
_CHOICES = {"auto": "auto", "any": "required", "none": "none"}


class Metadata(Body):
    """``user_id`` appears in the request's log line."""

    model_config = ConfigDict(extra="ignore")

    user_id: str | None = None


class Thinking(Body):
    """Whether the model reasons before it answers, if its chat template has a switch."""

    model_config = ConfigDict(extra="ignore")

    type: Literal["enabled", "disabled", "adaptive"]
    #: Tokens that the reasoning may have.
    budget_tokens: Annotated[int | None, Field(ge=0, lt=2**31)] = None


class ToolChoice(Body):
    """Which tools are called."""

    model_config = ConfigDict(extra="ignore")

    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None
    disable_parallel_tool_use: bool | None = None

    def of_chat(self) -> Any:
        """As ``tool_choice`` of a chat completion."""
        if self.type == "tool":
            return {"type": "function", "function": {"name": self.name or ""}}
        return _CHOICES[self.type]


class OutputConfig(Body):
    """``effort`` is a variable for the chat template."""

    model_config = ConfigDict(extra="ignore")

    effort: Annotated[str | None, Field(max_length=32)] = None
    format: dict[str, Any] | None = None


class ConversationBody(GenerationBody):
    """POST /v1/messages/count_tokens: what the model reads."""

    messages: Annotated[list[Any], Field(min_length=1)]
    system: TextOrList = None
    #: Tools that Anthropic's servers run are left out.
    tools: Annotated[list[dict[str, Any]] | None, Field(max_length=MOST_TOOLS, fail_fast=True)] = None
    tool_choice: ToolChoice | None = None
    #: Default: disabled, and reasoning is not given out.
    thinking: Thinking | None = None
    output_config: OutputConfig | None = None
    metadata: Metadata | None = None
    stop_sequences: Annotated[list[str] | None, Field(max_length=MAX_STOPS)] = None
    mcp_servers: Annotated[Any, allowed_values([])] = None
    container: Annotated[Any, allowed_values()] = None
    n: Annotated[Any, allowed_values(1)] = None
    stop: Annotated[Any, allowed_values(hint="; send stop_sequences")] = None

    def num_logprobs(self) -> int | None:
        return None

    @property
    def thinks(self) -> bool:
        """Whether reasoning is wanted."""
        return self.thinking is not None and self.thinking.type != "disabled"

    def chat_tools(self) -> Iterator[dict[str, Any]]:
        """The functions as tools of a chat completion."""
        names = {"name": "name", "description": "description", "input_schema": "parameters", "strict": "strict"}
        for tool in self.tools or ():
            if _is_function(tool):
                function = {theirs: tool[ours] for ours, theirs in names.items() if ours in tool}
                yield {"type": "function", "function": function}

    def places(self) -> list[int]:
        """Where the functions stand among the tools."""
        return [i for i, tool in enumerate(self.tools or ()) if _is_function(tool)]

    def without_effect(self) -> list[str]:
        tools = [f"tools[{i}]" for i, tool in enumerate(self.tools or ()) if not _is_function(tool)]
        contents = ((f"messages[{i}]", each.get("content")) for i, each in _objects(self.messages))
        return tools + [place for where, content in contents for place in _citations(where, content)]


class MessagesBody(ConversationBody):
    """POST /v1/messages."""

    max_tokens: Annotated[int, Field(ge=1)]


def _objects(values: Any) -> Iterator[tuple[int, dict[str, Any]]]:
    """The objects in a list, with their indices; ``blocks`` refuses everything else."""
    return ((i, each) for i, each in enumerate(values if isinstance(values, list) else ()) if isinstance(each, dict))


def _citations(where: str, content: Any) -> Iterator[str]:
    """The blocks of a message that ask for citations, also within results of tools: answers have none."""
    for i, block in _objects(content):
        within = block.get("content") if block.get("type") == "tool_result" else None
        if any(map(_asks_for_citations, [block, *(each for _, each in _objects(within))])):
            yield f"{where}.content[{i}].citations"


def _asks_for_citations(block: dict[str, Any]) -> bool:
    asked = block.get("citations")
    return isinstance(asked, dict) and bool(asked.get("enabled"))


def _is_function(tool: dict[str, Any]) -> bool:
    return tool.get("type") in (None, "custom")
