"""One request to ``/v1/responses``."""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator, AsyncIterator, Iterator
from functools import partial
from typing import Any

from evener.errors import RequestError
from evener_server.errors import ApiError
from evener_server.generation import Generation
from evener_server.logprobs import TokenNames, beside, chat_logprobs
from evener_server.protocol import ChatBody
from evener_server.responses.body import ResponsesBody
from evener_server.responses.conversation import Conversation
from evener_server.responses.output import Event, ResponseOutput
from evener_server.responses.previous import add_previous
from evener_server.responses.references import References
from evener_server.responses.shown_messages import shown_messages
from evener_server.responses.store import ResponseStore
from evener_server.service import Service
from evener_server.streaming import named_event, to_json
from evener_server.tokens import TokenService
from evener_server.translated import Names, TranslatedJob, chat_body, sampling_fields

_CUT_OFF = ("function_call", "incomplete")
#: Fields of a chat completion, and what they are called here.
_FIELDS = {"response_format": "text.format", "max_completion_tokens": "max_output_tokens", "messages": "input"}


class ResponseJob(TranslatedJob):
    """One response.

    Raises:
        RequestError: a field or an item is wrong.
        ApiError: the previous response is not known.
    """

    def __init__(self, service: Service, store: ResponseStore, body: ResponsesBody) -> None:
        said, chat, names = _translated(service, store, body)
        super().__init__(service, chat, names)
        self._body, self._said, self._store, self._top = body, said, store, body.num_logprobs()
        self._service, self._tokenizer = service, service.llm.tokenizer
        self._names_of_tokens = TokenNames(self._tokenizer)
        self._reasoning_tokens, self._sent, self._ids = 0, 0, list[int]()
        self._id, self._created = self.chat.request_id.replace("chatcmpl-", "resp_"), int(time.time())
        self._output = ResponseOutput(self._id.removeprefix("resp_"), body.namespaces())
        self._model = service.adapter(body.model) or service.model_name

    async def start(self) -> Generation:
        if self._body.truncation == "auto":
            await self._drop_turns()
        return await super().start()

    async def full_response(self, generation: Generation) -> bytes:
        async for _ in self._events(generation):
            continue
        return self._finished(generation)

    async def events(self, generation: Generation) -> AsyncGenerator[bytes]:
        begun = False
        async for events in self._events(generation):
            if not begun:
                begun = True
                first = self._response("in_progress", [])
                if self._body.enable_response_messages:
                    # The answer is shown by the last event alone.
                    first |= {**self._shown_messages(generation), "output_messages": []}
                yield self._write({"type": "response.created", "response": first})
                yield self._write({"type": "response.in_progress", "response": first})
            if events:
                yield b"".join(map(self._write, events))
        self._finished(generation)
        status = self._status(generation)
        last = self._response(status, self._output.items, generation)
        yield self._write({"type": f"response.{status}", "response": last})

    def error_event(self, error: ApiError) -> bytes:
        fields = {"code": error.code or error.type, "message": error.message, "param": error.param}
        return self._write({"type": "error", **fields})

    def _write(self, value: Event) -> bytes:
        self._sent += 1
        return named_event({**value, "sequence_number": self._sent - 1})

    async def _events(self, generation: Generation) -> AsyncIterator[list[Event]]:
        """The events of each delta."""
        (message,) = self.chat.messages(generation)
        async for _, delta in generation:
            if self._body.enable_response_messages:
                self._ids += delta.token_ids
            parts = message.feed(delta.text, last=delta.finish_reason is not None)
            logprobs: list[dict[str, Any]] = []
            if self._top is not None:
                given = self._names_of_tokens, delta.token_ids, delta.logprobs or [], self._top
                logprobs = await beside(self._top, partial(chat_logprobs, *given))
            events = list(self._read(parts, logprobs))
            if delta.finish_reason is not None:
                events += self._output.finish(self._status(generation) == "completed")
                self._reasoning_tokens = await self._service.count_tokens(message.reasoned or "")
            yield events

    def _read(self, parts: list[dict[str, Any]], logprobs: list[dict[str, Any]]) -> Iterator[Event]:
        for part in parts or [{}]:
            yield from self._output.add(part, logprobs)
            logprobs = []

    def _finished(self, generation: Generation) -> bytes:
        """The complete answer, which is kept if it may be."""
        answer = to_json(self._response(self._status(generation), self._output.items, generation))
        if self._body.store is not False:
            # A call that was cut off has no arguments that a template could read.
            whole = [item for item in self._output.items if (item["type"], item["status"]) != _CUT_OFF]
            self._said.add(whole, "output")
            self._store.add(self._id, answer, self._said.messages)
        return answer

    def state(self, status: str, error: ApiError | None = None) -> bytes:
        """The response while it has no answer; ``error``: why it will have none."""
        found = self._response(status, [])
        if error is not None:
            found["error"] = {"code": "server_error", "message": error.message}
        return to_json(found)

    @property
    def id(self) -> str:
        """The response's id."""
        return self._id

    def _shown_messages(self, generation: Generation) -> Event:
        """Fields of vLLM's API."""
        ids = generation.streams[0].prompt_token_ids
        return dict(shown_messages(self.chat.reasoning, self._tokenizer, ids, self._ids))

    def _status(self, generation: Generation) -> str:
        return "completed" if generation.finish_reasons.get(0) == "stop" else "incomplete"

    def _response(self, status: str, items: list[dict[str, Any]], generation: Generation | None = None) -> Event:
        """The response object; ``generation``: it has ended."""
        body = self._body
        why = {"length": "max_output_tokens"}.get(reason := generation.finish_reasons.get(0, "") if generation else "")
        return {
            "id": self._id, "object": "response", "created_at": self._created, "status": status,
            "background": bool(body.background),
            "completed_at": int(time.time()) if generation and status == "completed" else None,
            "error": None, "incomplete_details": {"reason": why or reason} if status == "incomplete" else None,
            **(self._shown_messages(generation) if generation and body.enable_response_messages else {}),
            "instructions": body.instructions, "max_output_tokens": body.max_output_tokens, "model": self._model,
            "output": items, "parallel_tool_calls": body.parallel_tool_calls is not False,
            "previous_response_id": body.previous_response_id,
            "reasoning": {"effort": body.reasoning and body.reasoning.effort, "summary": None},
            "store": body.store is not False, "temperature": body.temperature, "top_p": body.top_p,
            "text": {"format": _text_format(body)}, "tool_choice": body.tool_choice or "auto",
            "tools": [{"parameters": None, "strict": None, **tool} if tool.get("type") == "function" else tool
                      for i, tool in enumerate(body.tools or ()) if f"tools[{i}]" not in body.without_effect()],
            "top_logprobs": body.top_logprobs or 0, "truncation": body.truncation or "disabled",
            "metadata": body.metadata or {},
            # OpenAI's document has no null for these.
            **({} if body.user is None else {"user": body.user}),
            **({} if generation is None else {"usage": _usage(generation, self._reasoning_tokens)}),
        }  # fmt: skip


class InputCounter:
    """Counts the tokens of what the model reads of a request."""

    def __init__(self, service: Service, store: ResponseStore) -> None:
        self._service, self._store, self._tokens = service, store, TokenService(service)

    async def count(self, body: ResponsesBody) -> bytes:
        """The answer of ``/v1/responses/input_tokens``.

        Raises:
            RequestError: as ``ResponseJob``, or the template refuses the messages, or they are far longer than the
                context, or the model has no tokenizer.
        """
        _, chat, names = _translated(self._service, self._store, body)
        try:
            count = await self._tokens.count(chat)
        except RequestError as error:
            names.translate(error)
            raise
        return to_json({"object": "response.input_tokens", "input_tokens": count})


def _translated(service: Service, store: ResponseStore, body: ResponsesBody) -> tuple[Conversation, ChatBody, Names]:
    """The conversation that a request goes on with, and the chat completion that answers it."""
    before = store.messages(body.previous_response_id) if body.previous_response_id else None
    said = Conversation(before, References(store, service.limits.max_bytes))
    add_previous(said, body.previous_input_messages or ())
    if isinstance(body.input, str):
        said.add_text("user", body.input, "input")
    else:
        said.add(body.input, "input")
    # Instructions are this request's alone: those of earlier ones do not go on.
    system = [] if body.instructions is None else [{"role": "system", "content": body.instructions}]
    origins = [*(["instructions"] if system else []), *said.origins]
    # The API's tools have no inner object "function".
    tools = {f"tools[{i}].function": place for i, (place, _) in enumerate(body.functions())}
    names = Names(origins, {**tools, **_FIELDS})
    return said, chat_body(_chat_fields(body, [*system, *said.messages]), names), names


def _chat_fields(body: ResponsesBody, messages: list[dict[str, Any]]) -> dict[str, Any]:
    top, form = body.num_logprobs(), body.text and body.text.format
    return {
        **sampling_fields(body, "n", "max_tokens", "stream_options"),
        "messages": messages, "max_completion_tokens": body.max_output_tokens,
        "logprobs": None if top is None else True, "top_logprobs": top or None,
        "tools": list(body.chat_tools()) or None, "tool_choice": body.chat_tool_choice(),
        "parallel_tool_calls": body.parallel_tool_calls, "reasoning_effort": body.reasoning and body.reasoning.effort,
        "response_format": form and form.of_chat(), "chat_template_kwargs": body.chat_template_kwargs,
        "thinking_token_budget": body.thinking_token_budget,
    }  # fmt: skip


def _text_format(body: ResponsesBody) -> dict[str, Any]:
    if body.text is None or body.text.format is None:
        return {"type": "text"}
    return body.text.format.model_dump(by_alias=True, exclude_none=True)


def _usage(generation: Generation, reasoning_tokens: int) -> dict[str, Any]:
    usage = generation.usage()
    return {
        "input_tokens": usage["prompt_tokens"],
        # Nothing is charged for writing to the cache.
        "input_tokens_details": {"cached_tokens": generation.shown_cached_tokens or 0, "cache_write_tokens": 0},
        "output_tokens": usage["completion_tokens"],
        "output_tokens_details": {"reasoning_tokens": reasoning_tokens},
        "total_tokens": usage["total_tokens"],
    }
