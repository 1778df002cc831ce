"""A request and its answer, as they pass between the address and a replica: plain data."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Iterable, Mapping
from dataclasses import dataclass
from typing import Any
from urllib.parse import quote

import httpx

#: Requests that any replica can answer. Others concern one server (its adapters, the responses that it keeps).
PATHS: Mapping[str, frozenset[str]] = {
    "POST": frozenset({
        "/v1/chat/completions", "/v1/chat/completions/batch", "/v1/completions", "/v1/messages",
        "/v1/messages/count_tokens", "/v1/embeddings", "/v1/rerank", "/v2/rerank", "/rerank", "/v1/score", "/score",
        "/generate", "/forward", "/invocations", "/tokenize", "/detokenize",
    }),
    "GET": frozenset({"/v1/models", "/ready", "/version", "/server_info", "/model_info", "/openapi.json"}),
}  # fmt: skip
#: Characters of a prompt that the router compares.
PREFIX_CHARS = 16_384
#: Headers that belong to one connection.
_OF_CONNECTION = {"connection", "keep-alive", "transfer-encoding", "upgrade", "te", "trailer", "host", "content-length"}
#: Of a server that ends or whose engine has died: another one may answer.
_UNAVAILABLE = 503


class ReplicaLost(Exception):
    """A replica cannot answer, or not any further; the message says why."""


@dataclass(frozen=True)
class Question:
    """One request.

    Attributes:
        path: with the query.
        headers: without those of the connection.
        prompt: how the prompt begins, or the path if there is none. Ray's router chooses by this attribute, and waits
            for ever if it is empty.
    """

    method: str
    path: str
    headers: tuple[tuple[str, str], ...]
    body: bytes
    prompt: str


@dataclass(frozen=True)
class Head:
    """The beginning of an answer; its body follows in pieces."""

    status: int
    headers: tuple[tuple[str, str], ...]


def replica_url(method: str, path: str, query: str) -> str | None:
    """What a replica is asked for; None: it concerns one server, and is not passed on.

    Args:
        path: without escapes; query: with them.
    """
    *before, model = path.partition("/v1/models/")
    if before == ["", "/v1/models/"]:  # a model's name may have slashes; dots would lead to other paths
        known = method == "GET" and not {"", ".", ".."} & set(model.split("/"))
    else:
        known = path in PATHS.get(method, ())
    return (quote(path) + f"?{query}" * bool(query)) if known else None


def passed_on(headers: Iterable[tuple[bytes, bytes]]) -> tuple[tuple[str, str], ...]:
    """The headers that do not belong to the connection, in HTTP's own encoding."""
    pairs = ((name.decode("latin-1"), value.decode("latin-1")) for name, value in headers)
    return tuple((name, value) for name, value in pairs if name.lower() not in _OF_CONNECTION)


def prompt_prefix(body: bytes) -> str:
    """How the prompt of a body begins, at most ``PREFIX_CHARS`` characters; "" if it has none. The replica judges the
    body; here nothing is refused."""
    try:
        value = json.loads(body) if body else None
    except (ValueError, RecursionError):
        return ""
    if not isinstance(value, dict):
        return ""
    for name in ("messages", "prompt", "input", "text", "query", "tokens"):
        if name in value:
            return _text(value[name])
    return ""


def _text(value: Any) -> str:
    """The strings and numbers in a prompt, in order."""
    parts: list[str] = []
    room, waiting = PREFIX_CHARS, [value]
    while waiting and room > 0:
        item = waiting.pop()
        if isinstance(item, dict):
            # Who speaks is part of the prompt; the text of a part is under its kind.
            waiting.extend(item[name] for name in ("text", "content", "role") if name in item)
        elif isinstance(item, list):
            waiting.extend(reversed(item))
        elif isinstance(item, str | int) and not isinstance(item, bool):
            text = item if isinstance(item, str) else f"{item} "
            parts.append(text[:room])
            room -= len(text)
    return "".join(parts)


async def ask(client: httpx.AsyncClient, question: Question) -> AsyncIterator[Head | bytes]:
    """Ask a server; its answer: the ``Head``, then the body as it comes.

    Raises:
        ReplicaLost: the server is gone, or says that it is about to go.
    """
    headers = [(name.encode("latin-1"), value.encode("latin-1")) for name, value in question.headers]
    request = client.build_request(question.method, question.path, headers=headers, content=question.body)
    try:
        response = await client.send(request, stream=True)
        try:
            if response.status_code == _UNAVAILABLE:
                raise ReplicaLost(f"it answered 503: {(await response.aread())[:500].decode(errors='replace')}")
            yield Head(response.status_code, passed_on(response.headers.raw))
            async for piece in response.aiter_raw():
                yield piece
        finally:
            await response.aclose()
    except httpx.TransportError as error:
        raise ReplicaLost(f"its server does not answer: {error or type(error).__name__}") from error
