"""One request to ``/v1/messages``, and the count of its tokens."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Mapping
from typing import Any

from evener import logs
from evener.engine.facts.engine_info import EngineInfo
from evener.errors import RequestError
from evener_server.anthropic.blocks import Conversation
from evener_server.anthropic.body import ConversationBody, MessagesBody
from evener_server.anthropic.output import Event, MessageOutput
from evener_server.chat import finish_reason
from evener_server.errors import ApiError
from evener_server.generation import Generation
from evener_server.protocol import ChatBody
from evener_server.router_info import setting
from evener_server.service import Service
from evener_server.streaming import named_event, to_json
from evener_server.tokens import TokenService
from evener_server.translated import Names, TranslatedJob, chat_body, sampling_fields

_STOP_REASONS = {"length": "max_tokens", "timeout": "max_tokens", "tool_calls": "tool_use"}
_ERROR_TYPES = {
    401: "authentication_error", 403: "permission_error", 404: "not_found_error", 413: "request_too_large",
    429: "rate_limit_error", 503: "overloaded_error", 504: "timeout_error",
}  # fmt: skip

#: What the API says of every message, and of its usage, and this server has nothing of.
_NONE: Mapping[str, Any] = {"stop_details": None, "container": None}
_NONE_OF_USAGE: Mapping[str, Any] = {
    "cache_creation": None, "inference_geo": None, "server_tool_use": None, "service_tier": None,
}  # fmt: skip

#: The body of every error, for the API's description.
ERROR_SCHEMA: Mapping[str, Any] = {
    "type": "object", "required": ["type", "error", "request_id"],
    "properties": {
        "type": {"enum": ["error"]}, "request_id": {"type": ["string", "null"]},
        "error": {
            "type": "object", "required": ["type", "message"],
            "properties": {"type": {"type": "string"}, "message": {"type": "string"}},
        },
    },
}  # fmt: skip


def error_body(error: ApiError) -> bytes:
    """An error in Anthropic's format; ASCII, so that it can quote whatever a client sent."""
    default = "api_error" if error.status >= 500 else "invalid_request_error"
    found = {"type": _ERROR_TYPES.get(error.status, default), "message": error.message}
    body = {"type": "error", "error": found, "request_id": logs.request_id.get()}
    return json.dumps(body, separators=(",", ":")).encode("ascii")


class MessageJob(TranslatedJob):
    """One message.

    Raises:
        RequestError: a field or a block is wrong.
    """

    def __init__(self, service: Service, body: MessagesBody) -> None:
        budget = body.thinking.budget_tokens if body.thinking is not None and body.thinks else None
        held = budget is not None and service.reasons(bool(body.places()))
        super().__init__(service, *_translated(body, budget if held else None))
        if budget is not None and not held:
            self.without_effect = [*self.without_effect, "thinking.budget_tokens"]
        self._id = self.chat.request_id.replace("chatcmpl-", "msg_")
        self._model, self._output = service.adapter(body.model) or service.model_name, MessageOutput()
        self._stop_reason, self._info = "", service.info
        self._stop_sequence: str | None = None
        self._service, self._thought = service, 0

    async def full_response(self, generation: Generation) -> bytes:
        async for _ in self._events(generation):
            continue
        found = self._message(generation, self._output.blocks)
        found["stop_reason"], found["stop_sequence"] = self._stop_reason, self._stop_sequence
        return to_json(found)

    async def events(self, generation: Generation) -> AsyncIterator[bytes]:
        begun = False
        async for events in self._events(generation):
            if not begun:
                begun = True
                # As in vLLM's API: the whole prompt first, and its parts at the end.
                known = {"input_tokens": generation.prompt_tokens, "output_tokens": 0}
                begin = dict.fromkeys(self._usage(generation)) | known
                message = {**self._message(generation, []), "usage": begin}
                yield named_event({"type": "message_start", "message": message})
            if events:
                yield b"".join(map(named_event, events))
        delta = {**_NONE, "stop_reason": self._stop_reason, "stop_sequence": self._stop_sequence}
        yield named_event({"type": "message_delta", "delta": delta, "usage": self._usage(generation)})
        yield named_event({"type": "message_stop"})

    def error_event(self, error: ApiError) -> bytes:
        return b"event: error\ndata: " + error_body(error) + b"\n\n"

    async def _events(self, generation: Generation) -> AsyncIterator[list[Event]]:
        """The events of each delta."""
        (message,) = self.chat.messages(generation)
        async for _, delta in generation:
            last = delta.finish_reason is not None
            events = [each for part in message.feed(delta.text, last=last) for each in self._output.add(part)]
            if delta.finish_reason is not None:
                events += self._output.finish()
                reason = finish_reason(delta.finish_reason, message)
                self._stop_reason = _STOP_REASONS.get(reason, "end_turn")
                if reason == "stop" and isinstance(delta.stop_reason, str):
                    self._stop_reason, self._stop_sequence = "stop_sequence", delta.stop_reason
                self._thought = await self._service.count_tokens(message.reasoned or "")
            yield events

    def _message(self, generation: Generation, blocks: list[dict[str, Any]]) -> dict[str, Any]:
        return {
            "id": self._id, "type": "message", "role": "assistant", "model": self._model, "content": blocks,
            "stop_reason": None, "stop_sequence": None, **_NONE, "usage": self._usage(generation),
        }  # fmt: skip

    def _usage(self, generation: Generation) -> dict[str, Any]:
        thought = {"output_tokens_details": {"thinking_tokens": self._thought}}
        return {**_NONE_OF_USAGE, **_usage(generation, self._info), **thought}


class TokenCounter:
    """Counts tokens of conversations."""

    def __init__(self, service: Service) -> None:
        self._tokens = TokenService(service)

    async def count(self, body: ConversationBody) -> bytes:
        """The answer of ``/v1/messages/count_tokens``.

        Raises:
            RequestError: a field is wrong, the template refuses the messages, they are far longer than the context, or
                the model has no tokenizer.
        """
        chat, names = _translated(body)
        try:
            return to_json({"input_tokens": await self._tokens.count(chat)})
        except RequestError as error:
            names.translate(error)
            raise


def _translated(body: ConversationBody, budget: int | None = None) -> tuple[ChatBody, Names]:
    said = Conversation(body.system, body.messages)
    places = body.places()
    schemas = {f"tools[{i}].function.parameters": f"tools[{place}].input_schema" for i, place in enumerate(places)}
    functions = {f"tools[{i}].function": f"tools[{place}]" for i, place in enumerate(places)}
    names = Names(said.origins, {
        **schemas, **functions, "stop": "stop_sequences", "response_format": "output_config.format",
        "max_completion_tokens": "max_tokens",
    })  # fmt: skip
    choice, config = body.tool_choice, body.output_config
    fields = {
        **sampling_fields(body, "n", "stop", "stream_options"), "messages": said.messages,
        "stop": body.stop_sequences, "tools": list(body.chat_tools()) or None,
        "tool_choice": choice.of_chat() if choice and places else None,
        "parallel_tool_calls": False if choice and choice.disable_parallel_tool_use else None,
        "include_reasoning": body.thinks, "reasoning_effort": config and config.effort,
        "response_format": _response_format(config.format) if config and config.format else None,
        # The names of the switch in templates; those of Qwen and GLM have the first, of DeepSeek the second.
        "chat_template_kwargs": {"enable_thinking": body.thinks, "thinking": body.thinks},
        "user": body.metadata and body.metadata.user_id, "thinking_token_budget": budget,
    }  # fmt: skip
    return chat_body(fields, names), names


def _response_format(form: dict[str, Any]) -> dict[str, Any]:
    """As chat completions have it."""
    if form.get("type") != "json_schema" or not isinstance(form.get("schema"), dict):
        where = "output_config.format"
        raise RequestError(f'{where} must be {{"type": "json_schema", "schema": …}}', where)
    return {"type": "json_schema", "json_schema": {"name": "answer", "schema": form["schema"], "strict": True}}


def _usage(generation: Generation, info: EngineInfo) -> dict[str, int | None]:
    """Tokens of the prompt that were in the cache, and those that this request put there, are counted apart from the
    others. The cache keeps whole blocks."""
    usage = generation.usage()
    prompt, cached = usage["prompt_tokens"], generation.shown_cached_tokens
    if cached is None:
        return {"input_tokens": prompt, "cache_read_input_tokens": None, "cache_creation_input_tokens": None,
                "output_tokens": usage["completion_tokens"]}  # fmt: skip
    size = setting(info, "infer.block_size", None) if setting(info, "infer.prefix_cache", True) else None
    created = max(prompt - prompt % size - cached, 0) if size else 0
    return {
        "input_tokens": prompt - cached - created, "cache_read_input_tokens": cached,
        "cache_creation_input_tokens": created, "output_tokens": usage["completion_tokens"],
    }  # fmt: skip
