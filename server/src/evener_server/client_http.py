"""A server, as ``evener client`` asks it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import httpx
import msgspec

from evener.errors import EngineError, RequestError


class Server:
    """A server at ``url``, with or without ``/v1``; ``api_key`` is sent as a bearer token if given.

    Use it as a context manager. All methods raise EngineError if it does not answer, and RequestError with its message
    if it refuses.
    """

    def __init__(self, url: str, api_key: str | None = None) -> None:
        self.url = url.rstrip("/").removesuffix("/v1")
        headers = {"authorization": f"Bearer {api_key}"} if api_key else {}
        # No time limit for an answer, only for the connection.
        self._client = httpx.Client(headers=headers, timeout=httpx.Timeout(None, connect=10))

    def __enter__(self) -> Server:
        return self

    def __exit__(self, *_: object) -> None:
        self._client.close()

    def get(self, path: str) -> Any:
        """The JSON answer of a GET."""
        return msgspec.json.decode(b"".join(self._pieces("GET", path, {})))

    def post(self, path: str, body: Mapping[str, Any], packed: bool = False) -> Any:
        """The answer to ``body``, which is sent in JSON or in msgpack."""
        return (msgspec.msgpack if packed else msgspec.json).decode(b"".join(self.stream(path, body, packed)))

    def stream(self, path: str, body: Mapping[str, Any], packed: bool = False) -> Iterator[bytes]:
        """The bytes of the answer, as they come."""
        content = (msgspec.msgpack if packed else msgspec.json).encode(body)
        kind = "application/x-msgpack" if packed else "application/json"
        return self._pieces("POST", path, {"content": content, "headers": {"content-type": kind}})

    def _pieces(self, method: str, path: str, settings: Mapping[str, Any]) -> Iterator[bytes]:
        try:
            with self._client.stream(method, f"{self.url}{path}", **settings) as response:
                if not response.is_success:
                    response.read()
                    raise RequestError(f"{self.url}{path} answers {response.status_code}: {_message(response)}")
                yield from response.iter_bytes()
        except (httpx.HTTPError, httpx.InvalidURL) as error:
            reason = str(error) or type(error).__name__
            raise EngineError(
                f"{self.url} does not answer: {reason}; check that the server runs and --url is right"
            ) from error


def _message(response: httpx.Response) -> str:
    packed = response.headers.get("content-type") == "application/x-msgpack"
    try:
        body = (msgspec.msgpack if packed else msgspec.json).decode(response.content)
    except (msgspec.MsgspecError, UnicodeDecodeError):
        return response.text[:200]
    error = body.get("error", body) if isinstance(body, dict) else body
    return str(error.get("message", error) if isinstance(error, dict) else error)[:2000]
