"""The fields of a request to ``/v1/responses``."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Any, Literal

from pydantic import ConfigDict, Field

from evener.errors import RequestError
from evener_server.field_types import Likeliest
from evener_server.messages import Body, allowed_values
from evener_server.protocol import GenerationBody
from evener_server.tools import MOST_TOOLS
from evener_server.translated import TextOrList

#: Between the name of a namespace and that of a function in it.
SEPARATOR = "__"
_LOGPROBS = "message.output_text.logprobs"


class ReasoningOptions(Body):
    """``effort`` is a variable for the chat template. Reasoning is given out whole, so a summary is never made."""

    model_config = ConfigDict(extra="ignore")

    effort: Annotated[str | None, Field(max_length=32)] = None
    summary: Any = None
    generate_summary: Any = None


class TextFormat(Body):
    """The form of the answer: any text, or JSON of a schema."""

    model_config = ConfigDict(extra="ignore")

    type: Literal["text", "json_object", "json_schema"] = "text"
    name: str | None = None
    description: str | None = None
    json_schema: Annotated[dict[str, Any] | None, Field(alias="schema")] = None
    strict: bool | None = None

    def of_chat(self) -> dict[str, Any]:
        """As ``response_format`` of a chat completion."""
        if self.type != "json_schema":
            return {"type": self.type}
        schema = {
            "name": self.name, "description": self.description, "schema": self.json_schema, "strict": self.strict,
        }  # fmt: skip
        return {"type": "json_schema", "json_schema": {name: each for name, each in schema.items() if each is not None}}


class TextOptions(Body):
    """Options of the answer's text."""

    model_config = ConfigDict(extra="ignore")

    format: TextFormat | None = None
    #: It changes nothing.
    verbosity: Any = None


class ResponsesBody(GenerationBody):
    """POST /v1/responses. Sampling parameters besides OpenAI's are those of chat completions."""

    #: A text, or items: messages, calls and their outputs, reasoning.
    input: TextOrList
    instructions: str | None = None
    previous_response_id: Annotated[str | None, Field(max_length=64)] = None
    #: What was said before ``input``, as ``input_messages``, ``output_messages`` or a chat have it: see ``previous``.
    previous_input_messages: Annotated[list[dict[str, Any]] | None, Field(fail_fast=True)] = None
    max_output_tokens: Annotated[int | None, Field(ge=1)] = None
    top_logprobs: Likeliest | None = None
    include: Annotated[list[str] | None, Field(max_length=32)] = None
    #: Tools that are neither functions nor namespaces of functions run on OpenAI's servers; they are left out.
    tools: Annotated[list[dict[str, Any]] | None, Field(max_length=MOST_TOOLS, fail_fast=True)] = None
    tool_choice: Any = None
    parallel_tool_calls: bool | None = None
    reasoning: ReasoningOptions | None = None
    text: TextOptions | None = None
    #: False: no later request can go on from the answer.
    store: bool | None = None
    #: Answer at once, and generate behind that. Its stream can be read again.
    background: bool | None = None
    #: Show the messages of the prompt and of the answer, or their tokens: see ``shown_messages``.
    enable_response_messages: bool | None = None
    #: Returned as it came.
    metadata: Annotated[dict[str, str] | None, Field(max_length=16)] = None
    chat_template_kwargs: dict[str, Any] | None = None
    #: Tokens that the reasoning may have.
    thinking_token_budget: Annotated[int | None, Field(ge=0, lt=2**31)] = None

    #: auto: the oldest turns of a conversation that does not fit the context are left out.
    truncation: Literal["auto", "disabled"] | None = None
    conversation: Annotated[Any, allowed_values(hint="; send previous_response_id")] = None
    prompt: Annotated[Any, allowed_values(hint="; send input")] = None
    n: Annotated[Any, allowed_values(1)] = None
    max_tokens: Annotated[Any, allowed_values(hint="; send max_output_tokens")] = None

    def check(self) -> None:
        super().check()
        if self.background and self.store is False:
            raise RequestError("background can only be used when `store` is true", "background")
        if self.previous_input_messages and self.previous_response_id:
            message = "previous_input_messages cannot be used with previous_response_id; send one of them"
            raise RequestError(message, "previous_input_messages")
        if self.input is None:
            raise RequestError("input is missing; send it", "input", "missing_required_parameter")

    def requested_max_tokens(self) -> int | None:
        return self.max_output_tokens

    def num_logprobs(self) -> int | None:
        asked = self.top_logprobs is not None or _LOGPROBS in (self.include or ())
        return (self.top_logprobs or 0) if asked else None

    def chat_tools(self) -> Iterator[dict[str, Any]]:
        """The functions as tools of a chat completion."""
        for _, tool in self.functions():
            function = {name: tool[name] for name in ("name", "description", "parameters", "strict") if name in tool}
            yield {"type": "function", "function": function}

    def functions(self) -> Iterator[tuple[str, dict[str, Any]]]:
        """The tools that are functions, each with its path. Those of a namespace have its name before theirs."""
        for i, tool in enumerate(self.tools or ()):
            inner = tool.get("tools")
            if tool.get("type") == "function":
                yield f"tools[{i}]", tool
            elif _is_namespace(tool) and isinstance(inner, list):
                for k, each in enumerate(inner):
                    if isinstance(each, dict) and each.get("type", "function") == "function":
                        yield f"tools[{i}].tools[{k}]", {**each, "name": f"{tool['name']}{SEPARATOR}{each.get('name')}"}

    def namespaces(self) -> dict[str, tuple[str, str]]:
        """For each function of a namespace, the namespace and its name there."""
        found = (tool for tool in self.tools or () if _is_namespace(tool) and isinstance(tool.get("tools"), list))
        return {
            f"{tool['name']}{SEPARATOR}{each.get('name')}": (tool["name"], str(each.get("name")))
            for tool in found
            for each in tool["tools"]
            if isinstance(each, dict)
        }

    def without_effect(self) -> list[str]:
        inner = [(self.reasoning, "reasoning", "summary"), (self.reasoning, "reasoning", "generate_summary"),
                 (self.text, "text", "verbosity")]  # fmt: skip
        return [
            *super().without_effect(),
            *(f"tools[{i}]" for i, tool in enumerate(self.tools or ()) if _is_left_out(tool)), *self._chosen_in_vain(),
            *(f"include[{i}]" for i, each in enumerate(self.include or ()) if each != _LOGPROBS),
            *(f"{name}.{field}" for part, name, field in inner if getattr(part, field, None) is not None),
        ]  # fmt: skip

    def chat_tool_choice(self) -> Any:
        """``tool_choice`` of a chat completion.

        Raises:
            RequestError: it is none of the API's.
        """
        choice = self.tool_choice
        if not isinstance(choice, dict) or self._chosen_in_vain() == ["tool_choice"]:
            # Without functions there is nothing to choose from; of tools that are left out, none can be chosen.
            return (None if isinstance(choice, dict) else choice) if any(self.functions()) else None
        if (function := _chosen(choice)) is not None:
            return function
        kind, mode, allowed = choice.get("type"), choice.get("mode"), choice.get("tools")
        kept = [each for each in allowed if not self._is_in_vain(each)] if isinstance(allowed, list) else []
        functions = list(map(_chosen, kept))
        if kind == "allowed_tools" and mode in ("auto", "required") and functions and None not in functions:
            return {"type": kind, "allowed_tools": {"mode": mode, "tools": functions}}
        raise RequestError(
            'tool_choice must be "none", "auto", "required", {"type": "function", "name": …} or '
            '{"type": "allowed_tools", "mode": "auto" or "required", "tools": […]} with one or more functions',
            "tool_choice", "unsupported_parameter",
        )  # fmt: skip

    def _chosen_in_vain(self) -> list[str]:
        """The paths of what ``tool_choice`` says of tools that are left out."""
        choice = self.tool_choice
        if not isinstance(choice, dict) or choice.get("type") != "allowed_tools":
            return ["tool_choice"] * self._is_in_vain(choice)
        allowed = choice.get("tools")
        vain = list(map(self._is_in_vain, allowed)) if isinstance(allowed, list) else []
        if vain and all(vain):
            return ["tool_choice"]
        return [f"tool_choice.tools[{i}]" for i, each in enumerate(vain) if each]

    def _is_in_vain(self, choice: Any) -> bool:
        """Whether this names the type of a tool that is left out."""
        kind = choice.get("type") if isinstance(choice, dict) else None
        return kind is not None and any(tool.get("type") == kind for tool in self.tools or () if _is_left_out(tool))


def _chosen(value: Any) -> dict[str, Any] | None:
    """The function that an object names, as a chat completion names it."""
    if not isinstance(value, dict) or value.get("type") != "function" or not isinstance(value.get("name"), str):
        return None
    return {"type": "function", "function": {"name": value["name"]}}


def _is_left_out(tool: dict[str, Any]) -> bool:
    """Whether it would run on OpenAI's servers."""
    return tool.get("type") != "function" and not _is_namespace(tool)


def _is_namespace(tool: dict[str, Any]) -> bool:
    return tool.get("type") == "namespace" and isinstance(tool.get("name"), str)
