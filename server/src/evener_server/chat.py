"""POST /v1/chat/completions."""

from __future__ import annotations

import asyncio
import functools
import time
from collections.abc import AsyncIterator
from dataclasses import replace
from typing import Any

from evener.contracts.generation.parsers import ReasoningParser, ToolParser
from evener.contracts.media import MediaPrompt
from evener.contracts.outputs import Delta
from evener.contracts.writing import ReasoningFormat, ReasoningWriter
from evener.errors import ContextLengthError, RequestError
from evener.frontend.capacity import Reservation
from evener.sampling_params import SamplingParams
from evener_server.beams import check_beams, start_beams
from evener_server.generation import Generation, Stream, Submit
from evener_server.held import Held, before, held_to
from evener_server.images import decode_images
from evener_server.logprobs import TokenNames, beside, chat_logprobs, prompt_logprobs
from evener_server.message_parts import MessageParts
from evener_server.messages import TextPart
from evener_server.prompt_tokens import left_of
from evener_server.protocol import ChatBody
from evener_server.service import Service
from evener_server.streaming import DONE, ChunkEnd, Job, event, to_json
from evener_server.transfers import asked_transfer, transfer_answer, unused_fields
from evener_server.turns import newest_turns

#: So many characters at a prompt's end are enough to see whether a template opened the reasoning there.
PROMPT_END = 256


class ChatJob(Job):
    """One chat completion."""

    def __init__(self, service: Service, body: ChatBody) -> None:
        self.stream = bool(body.stream)
        self._service, self._body = service, body
        self._params, self._top = service.sampling(body), body.shown_logprobs()
        self._params = replace(self._params, transfer=asked_transfer(service, body))
        self._chat = service.prompts.chat(body)
        self._reasoning, self._tools = self._parsers()
        self._held = self._held_to()
        self.without_effect = [*self._held.loose, *unused_fields(service, body)]
        if any(each and each.special_tokens for each in (self._reasoning, self._tools)):
            # Marks of the format are among them.
            self._params = replace(self._params, skip_special_tokens=False)
        self._names = service.token_names(body.return_tokens_as_token_ids)
        self._echoed = _last_answer(body) if body.echo else ""
        kind = "chat.completion.chunk" if self.stream else "chat.completion"
        self._head = service.head("chatcmpl", kind, body.model)

    def _parsers(self) -> tuple[type[ReasoningParser] | None, type[ToolParser] | None]:
        chat, called = self._chat, self._body.calls_tools
        if chat is None or not self._params.detokenize:
            return None, None  # the request fails for it
        tools = self._service.parsers.tool(chat) if called else None
        reasoning = self._service.parsers.reasoning(chat, called)
        # An answer that follows a grammar has reasoning before it only if a grammar can say so.
        free = self._params.grammar is None and not self._body.choice.forced
        return reasoning if free or (reasoning and issubclass(reasoning, ReasoningWriter)) else None, tools

    @property
    def params(self) -> SamplingParams:
        """The sampling parameters for the engine."""
        return self._params

    @property
    def reasoning(self) -> type[ReasoningParser] | None:
        """The parser of the answer's reasoning."""
        return self._reasoning

    def _held_to(self) -> Held:
        body, chat, params = self._body, self._chat, self._params
        budget = body.thinking_token_budget
        if budget is not None and (self._reasoning is None or not issubclass(self._reasoning, ReasoningWriter)):
            message = "thinking_token_budget was sent, but this model is not known to reason; leave it out"
            raise RequestError(message, "thinking_token_budget", "unsupported_parameter")
        if budget is None and self._reasoning is not None and issubclass(self._reasoning, ReasoningWriter):
            budget = self._service.options.thinking_budget
        if chat is None or self._tools is None:
            return Held(answer=params.grammar, budget=budget)
        several = body.parallel_tool_calls is not False
        template = chat.template(with_tools=True)
        return held_to(body.tools or (), body.choice, self._tools, template, several, params.grammar, budget)

    async def start(self) -> Generation:
        service, body = self._service, self._body
        with service.llm.reserve(body.samples) as room:
            try:
                submit = await self.submit(room)
                return await service.running.start([submit], body.samples, body.requested_max_tokens())
            except RequestError as error:
                if error.param == "template_kwargs":
                    error.param = "chat_template_kwargs"
                raise

    async def drop_turns(self) -> None:
        """Leave out the oldest turns if the conversation does not fit the context.

        Raises:
            RequestError: as ``newest_turns``.
        """
        self._body = await newest_turns(self._service.prompts, self._body)

    async def submit(self, room: Reservation) -> Submit:
        """What sends the conversation to the engine.

        Raises:
            RequestError: the messages or what the answer is held to cannot be used.
        """
        llm, body = self._service.llm, self._body
        cut = body.truncate_prompt_tokens is not None
        if not cut and body.prompt_ids is None:
            self._check_length()
        # What stands before the answer depends on the prompt's end.
        reasons = self._reasoning is not None and not self._held.anything
        if not reasons:
            await self._hold(None)
        if body.prompt_ids is not None or body.own_prompt_tokens or reasons:
            prompts, began = self._service.prompts, time.monotonic()
            prompt = body.prompt_ids or await prompts.conversation(body, bool(body.add_special_tokens), any_length=cut)
            if cut and isinstance(prompt, MediaPrompt):
                message = "truncate_prompt_tokens cannot be used with images; leave it out"
                raise RequestError(message, "truncate_prompt_tokens")
            given = prompt if isinstance(prompt, MediaPrompt) else prompts.cut(prompt, body)
            if reasons:
                await self._hold(before(self._reasoning, self._end_of(given)))
            params = left_of(self._params, began)
            if body.beams is not None:
                if isinstance(given, MediaPrompt):
                    message = "beam search cannot be used with images and prompt_embeds; leave it out"
                    raise RequestError(message, "use_beam_search")
                check_beams(params, self.stream)
                return functools.partial(start_beams, llm, given, params, body.beams, body.choices, self.request_id)
            return functools.partial(
                llm.submit, given, params, request_id=self.request_id, kind="chat", reservation=room
            )
        messages = [message.plain() for message in body.messages]
        if self._service.info.encoders:
            messages = await asyncio.to_thread(decode_images, messages)
        template = body.template(self._service.prompts.keeps_tools)
        return functools.partial(
            llm.submit_chat, messages, self._params, request_id=self.request_id, reservation=room, **template
        )

    async def _hold(self, reasoning: ReasoningFormat | None) -> None:
        """Hold the answer to its grammar.

        Raises:
            RequestError: the grammar cannot be used.
        """
        self._params = replace(self._params, grammar=self._held.spec(reasoning))
        field = "tools" if self._held.calls is not None else self._body.grammar_field
        await self._service.check_grammar(self._params, field)
        self._params = await self._service.without_words(self._params, self._body.bad_words)

    def _end_of(self, prompt: list[int] | MediaPrompt) -> str:
        ids, tokenizer = prompt.ids if isinstance(prompt, MediaPrompt) else prompt, self._service.llm.tokenizer
        assert tokenizer is not None, "the conversation was tokenized"
        return tokenizer.decode(ids[-PROMPT_END:], skip_special_tokens=False)[-PROMPT_END:]

    def _check_length(self) -> None:
        """Refuse texts that cannot fit before the template is rendered: rendering megabytes takes seconds. The front
        end checks the rendered prompt.

        Raises:
            ContextLengthError: the texts alone do not fit the context.
        """
        tokenizer, limit = self._service.llm.tokenizer, self._service.max_model_len
        parts = (part for message in self._body.messages for part in message.content or ())
        size = sum(len(part.text) for part in parts if isinstance(part, TextPart))
        if tokenizer is not None and size > limit and size > limit * tokenizer.most_bytes:
            raise ContextLengthError(
                f"the messages have {size} characters of text, which do not fit the context of {limit} tokens: "
                "shorten them"
            )

    @property
    def request_id(self) -> str:
        """The request's id in the engine and in a response of chat completions."""
        return str(self._head["id"])

    def messages(self, generation: Generation, place: int = 0) -> list[MessageParts]:
        """Readers of the generated messages, one for each sample of the generation's prompt with this place."""
        body, prompt = self._body, self._prompt_end(generation.streams[place])
        tools = [tool.plain() for tool in body.tools or ()]
        return [
            MessageParts(
                None if self._reasoning is None else self._reasoning(prompt),
                None if self._tools is None else self._tools(tools),
                show_reasoning=body.include_reasoning is not False,
                several_calls=body.parallel_tool_calls is not False,
                only_calls=self._held.forced,
            )
            for _ in range(generation.n)
        ]

    def _prompt_end(self, stream: Stream) -> str:
        tokenizer = self._service.llm.tokenizer
        if stream.prompt is not None or tokenizer is None:
            return (stream.prompt or "")[-PROMPT_END:]
        return self._end_of(stream.prompt_token_ids)

    def thinks_first(self, generation: Generation, place: int = 0) -> bool:
        """Whether the prompt with this place ends inside the reasoning, of which the first token is part then."""
        found = before(self._reasoning, self._prompt_end(generation.streams[place]))
        return found is not None and not found.begin

    def choices(self, generation: Generation, place: int = 0) -> list[ChatChoice]:
        """The choices of a response in one piece, still empty, of the prompt with this place."""
        token_ids, messages = bool(self._body.return_token_ids), self.messages(generation, place)
        return [ChatChoice(message, self._names, self._top, token_ids) for message in messages]

    async def full_response(self, generation: Generation) -> bytes:
        choices = self.choices(generation)
        async for choice, delta in generation:
            await beside(self._top, functools.partial(choices[choice].add, delta))
        shown = [self.shown(i, each, generation.finish_reasons[i]) for i, each in enumerate(choices)]
        fields = await beside(self._body.prompt_logprobs, functools.partial(self.of_prompt, generation, 0))
        usage = await self._service.usage(generation, [each.message.reasoned for each in choices])
        times = self._service.metrics_of(generation)
        times |= transfer_answer(self._service, self._body.kv_transfer_params, self._head["id"])
        return to_json({**self._head, "choices": shown, "usage": usage, **fields, **times})

    def of_prompt(self, generation: Generation, prompt: int) -> dict[str, Any]:
        """The fields that were asked for with ``prompt_logprobs`` and ``return_token_ids``; null without."""
        body, ids = self._body, generation.streams[prompt].prompt_token_ids
        entries = None
        if body.prompt_logprobs is not None:
            entries = prompt_logprobs(self._names, ids, generation.prompt_logprobs[prompt], body.prompt_logprobs)
        return {"prompt_logprobs": entries, "prompt_token_ids": ids if body.return_token_ids else None}

    def shown(self, index: int, choice: ChatChoice, reason: str) -> dict[str, Any]:
        """A choice as it is sent."""
        return {"index": index, **choice.shown(reason), "message": self._with_echo(choice.message.message)}

    def _with_echo(self, message: dict[str, Any]) -> dict[str, Any]:
        return {**message, "content": self._echoed + (message["content"] or "")} if self._echoed else message

    async def events(self, generation: Generation) -> AsyncIterator[bytes]:
        # The parts of a chunk that do not change are encoded once.
        head = b"data: " + to_json(self._head)[:-1] + b',"choices":[{"index":'
        usage = self._body.include_usage or self._service.options.force_include_usage
        counted = self._service.continuous_usage(self._body)
        end = ChunkEnd(generation, usage, counted)
        chunk = head + b'%d,"delta":%b,"logprobs":%b,"finish_reason":%b%b}]%b'
        messages, head_sent = self.messages(generation), False
        async for choice, delta in generation:
            pieces = []
            if not head_sent:
                head_sent = True
                role = to_json({"role": "assistant", "content": self._echoed, "refusal": None})
                first = end(before_tokens=True)
                if self._body.return_token_ids:
                    first = b',"prompt_token_ids":' + to_json(generation.streams[0].prompt_token_ids) + first
                pieces = [chunk % (i, role, b"null", b"null", b"", first) for i in range(generation.choices)]
            logprobs, message, ids = b"null", messages[choice], b""
            if self._body.return_token_ids and delta.token_ids:
                ids = b',"token_ids":' + to_json(delta.token_ids)
            if self._top is not None and delta.token_ids:
                made = functools.partial(chat_logprobs, self._names, delta.token_ids, delta.logprobs or [], self._top)
                content = await beside(self._top, made)
                logprobs = to_json({"content": content, "refusal": None})
            parts = message.feed(delta.text, last=delta.finish_reason is not None)
            shown = list(map(to_json, parts or ([{"content": ""}] if logprobs != b"null" or ids else [])))
            reasons = [b"null"] * len(shown)
            if delta.finish_reason is not None:
                reason = to_json(finish_reason(delta.finish_reason, message))
                if counted and shown:  # clients that count along expect more tokens with each chunk
                    reasons[-1] = reason
                else:
                    shown, reasons = [*shown, b"{}"], [*reasons, reason]
            for part, reason in zip(shown, reasons, strict=True):
                pieces.append(chunk % (choice, part, logprobs, reason, ids, end()))
                logprobs, ids = b"null", b""
            if pieces:
                yield b"".join(pieces)
        if usage:
            found = await self._service.usage(generation, [each.reasoned for each in messages])
            times = self._service.metrics_of(generation)
            yield event(to_json({**self._head, "choices": [], "usage": found, **times}))
        yield DONE


class ChatChoice:
    """One choice of a response in one piece, which grows as tokens come.

    Args:
        message: reads its text.
        names: how tokens are written.
        top: log-probabilities of so many of the likeliest tokens; None: of none.
        token_ids: show the ids of its tokens.
    """

    def __init__(self, message: MessageParts, names: TokenNames, top: int | None, token_ids: bool) -> None:
        self.message, self._names, self._top = message, names, top
        self._ids: list[int] | None = [] if token_ids else None
        self._logprobs: list[dict[str, Any]] = []

    def add(self, delta: Delta) -> None:
        """Add the next delta."""
        self.message.feed(delta.text, last=delta.finish_reason is not None)
        if self._ids is not None:
            self._ids += delta.token_ids
        if self._top is not None:
            self._logprobs += chat_logprobs(self._names, delta.token_ids, delta.logprobs or [], self._top)

    def shown(self, reason: str) -> dict[str, Any]:
        """All fields but its place and its message; ``reason``: the engine's, why it has ended."""
        return {
            "logprobs": None if self._top is None else {"content": self._logprobs, "refusal": None},
            "finish_reason": finish_reason(reason, self.message),
            "token_ids": self._ids,
        }


def _last_answer(body: ChatBody) -> str:
    """The text of the last message, if the assistant wrote it."""
    last = body.messages[-1]
    parts = last.content or () if last.role == "assistant" else ()
    return "".join(part.text for part in parts if isinstance(part, TextPart))


def finish_reason(reason: str, message: MessageParts) -> str:
    """OpenAI's reason why a message ended, from the engine's."""
    return "tool_calls" if reason == "stop" and message.called else reason
