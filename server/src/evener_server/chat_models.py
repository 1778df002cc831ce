"""What answers in ``evener chat``: a model in this process, or any server with the OpenAI API."""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Mapping
from contextlib import aclosing
from typing import Any

import httpx

from evener.async_llm import AsyncLLM
from evener.errors import EngineError, RequestError
from evener.sampling_params import SamplingParams

Messages = list[dict[str, Any]]


class ChatModel(ABC):
    """Answers conversations.

    Attributes:
        name: the model's name.
    """

    name: str

    @abstractmethod
    def answer(self, messages: Messages) -> AsyncIterator[str]:
        """Pieces of the answer as they come; closing the iterator ends the request.

        Raises:
            EvenerError: there is no answer; with the reason.
        """

    @abstractmethod
    async def close(self) -> None:
        """Free its resources."""


class LocalModel(ChatModel):
    """A model in this process; ``close`` closes its engine."""

    def __init__(self, llm: AsyncLLM, params: SamplingParams) -> None:
        self._llm, self._params = llm, params
        assert llm.info is not None, "it was started"
        self.name = llm.info.served_name

    async def answer(self, messages: Messages) -> AsyncIterator[str]:
        async with await self._llm.submit_chat(messages, self._params) as stream:
            async for delta in stream:
                if delta.error is not None:
                    raise EngineError(f"the request failed: {delta.error}")
                if delta.text:
                    yield delta.text

    async def close(self) -> None:
        await self._llm.close()


class RemoteModel(ChatModel):
    """A model behind ``<url>/v1/chat/completions``.

    Args:
        url: of the server, with or without ``/v1``.
        name: the model's name, or None for the first model of the server.
        fields: further fields of every request's body.
        api_key: sent as a bearer token if given.
    """

    def __init__(self, url: str, name: str | None, fields: Mapping[str, Any], api_key: str | None = None) -> None:
        self._base = url.rstrip("/").removesuffix("/v1") + "/v1"
        headers = {"authorization": f"Bearer {api_key}"} if api_key else {}
        # No time limit for an answer, only for the connection.
        self._client = httpx.AsyncClient(headers=headers, timeout=httpx.Timeout(None, connect=10))
        self._fields, self.name = fields, name or ""

    async def open(self) -> None:
        """Connect to the server to find its first model, if no name was given.

        Raises:
            EngineError: there is no such server, or it has no model.
        """
        if self.name:
            return
        try:
            response = await self._client.get(f"{self._base}/models")
        except (httpx.HTTPError, httpx.InvalidURL) as error:
            raise self._unreachable(error) from error
        found = _json(response).get("data") if response.is_success else None
        if not found:
            raise EngineError(f"{self._base}/models answers {response.status_code} and lists no model; give a name: "
                              "evener chat MODEL --url …")  # fmt: skip
        self.name = str(found[0]["id"])

    async def answer(self, messages: Messages) -> AsyncIterator[str]:
        body = {"model": self.name, "messages": messages, "stream": True, **self._fields}
        try:
            async with self._client.stream("POST", f"{self._base}/chat/completions", json=body) as response:
                if not response.is_success:
                    await response.aread()
                    raise RequestError(f"the server answers {response.status_code}: {_message(_json(response))}")
                async with aclosing(response.aiter_lines()) as lines:  # type: ignore[type-var]  # it has aclose
                    async for line in lines:
                        text = _text(line)
                        if text:
                            yield text
        except (httpx.HTTPError, httpx.InvalidURL) as error:
            raise self._unreachable(error) from error

    async def close(self) -> None:
        await self._client.aclose()

    def _unreachable(self, error: Exception) -> EngineError:
        reason = str(error) or type(error).__name__
        return EngineError(f"{self._base} does not answer: {reason}; check that the server runs and --url is right")


def _json(response: httpx.Response) -> dict[str, Any]:
    try:
        value = response.json()
    except ValueError:
        value = {"error": response.text[:200]}
    return value if isinstance(value, dict) else {"error": str(value)[:200]}


def _message(body: dict[str, Any]) -> str:
    error = body.get("error")
    return str(error.get("message", error) if isinstance(error, dict) else error)


def _text(line: str) -> str:
    """The text in one line of server-sent events.

    Raises:
        EngineError: the event is an error.
    """
    data = line.removeprefix("data:").strip()
    if not line.startswith("data:") or data == "[DONE]":
        return ""
    try:
        event = json.loads(data)
    except ValueError as error:
        raise EngineError(f"the server sent something that is not JSON: {data[:100]!r}; check --url") from error
    if "error" in event:
        raise EngineError(f"the server ended the answer: {_message(event)}")
    choices = event.get("choices") or [{}]
    return str((choices[0].get("delta") or {}).get("content") or "")
