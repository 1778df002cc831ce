"""API keys: where they come from, and the check of each request."""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from evener.errors import ConfigError
from evener_server.anthropic.job import error_body
from evener_server.errors import ApiError, error_response, log_error

VARIABLE = "EVENER_API_KEY"
FILE_KEY = "server.api_key_file"
#: Supervisors, load balancers and Prometheus ask these; they have no key, and the answers have no content of requests.
OPEN_PATHS = frozenset({"/health", "/ready", "/metrics"})
#: Of the key file: far more than any list of keys has.
_MAX_FILE_BYTES = 1 << 20
#: How paths of Anthropic's API begin: its clients read errors in its own format.
_ANTHROPIC_PATH = ["v1", "messages"]


class ApiKeys:
    """The keys that requests may have; only their SHA-256 digests are kept.

    Args:
        keys: the keys; none: every request is allowed.
    """

    def __init__(self, keys: Iterable[str] = ()) -> None:
        self._digests = tuple({_digest(key.encode()) for key in keys})

    def __len__(self) -> int:
        return len(self._digests)

    def __contains__(self, key: bytes) -> bool:
        """Whether ``key`` is one of them. The time depends on neither which key it is nor how much is right."""
        digest = _digest(key)
        # A sum compares every digest, also after one that is equal; any() would stop there.
        return sum(hmac.compare_digest(digest, known) for known in self._digests) > 0


def read_api_keys(listed: Iterable[str], file: str | None, environ: Mapping[str, str]) -> ApiKeys:
    """All keys: those listed, those in the file, and the one of the environment.

    Args:
        listed: ``serve.api_keys``.
        file: ``server.api_key_file``: one key a line; empty lines and lines that begin with ``#`` are left out.
        environ: where ``EVENER_API_KEY`` is read.

    Raises:
        ConfigError: the file cannot be read, is too large or has no key; a key is empty or cannot be sent in a header.
            No message shows a key.
    """
    named = [(f"serve.api_keys: key {number}", key) for number, key in enumerate(listed, 1)]
    if file is not None:
        named += _read_file(file)
    # A variable that is set but empty is a mistake: without this, it would open the server to everybody.
    if VARIABLE in environ:
        named.append((VARIABLE, environ[VARIABLE]))
    for where, key in named:
        if not key or not all("!" <= letter <= "~" for letter in key):
            problem = "is empty" if not key else "has a space, a control character or a letter outside ASCII"
            raise ConfigError(f"{where} {problem}; a key is 1 or more visible ASCII characters. Correct it, or leave "
                              "it out")  # fmt: skip
    return ApiKeys(key for _, key in named)


def _read_file(file: str) -> list[tuple[str, str]]:
    path = Path(file).expanduser()
    try:
        if not path.is_file():
            raise ConfigError(f"{FILE_KEY}={file} is not a file; give one with an API key on each line")
        with path.open("rb") as opened:
            data = opened.read(_MAX_FILE_BYTES + 1)
        if len(data) > _MAX_FILE_BYTES:
            raise ConfigError(f"{FILE_KEY}={file} has more than {_MAX_FILE_BYTES} bytes; give one with only API keys")
        lines = [line.strip() for line in data.decode("utf-8-sig").splitlines()]
    except (OSError, UnicodeDecodeError) as error:
        # The text of a UnicodeDecodeError would show a part of the file.
        why = error.strerror if isinstance(error, OSError) else "it is not UTF-8"
        raise ConfigError(f"{FILE_KEY}={file} cannot be read: {why}; write a key on each line") from None
    found = [(f"{FILE_KEY}={file}: line {n}", line) for n, line in enumerate(lines, 1) if line and line[0] != "#"]
    if not found:
        raise ConfigError(f"{FILE_KEY}={file} has no key; write one on each line, or leave {FILE_KEY} out")
    return found


class KeyCheck:
    """ASGI middleware that answers 401 to requests without one of the keys, before their body is read.

    A key comes as ``Authorization: Bearer KEY``, or as ``x-api-key: KEY`` as Anthropic's clients send it; one valid key
    is enough. ``OPEN_PATHS`` need none.

    Args:
        keys: at least one.
        is_open: says of further paths that they need no key.
    """

    def __init__(self, app: ASGIApp, keys: ApiKeys, is_open: Callable[[str], bool] = lambda path: False) -> None:
        self._app, self._keys, self._is_open = app, keys, is_open

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and not (scope["path"] in OPEN_PATHS or self._is_open(scope["path"])):
            given = list(_given(scope))
            if not any(key in self._keys for key in given):
                error = _unauthorized(bool(given))
                log_error(scope, error)
                if scope["path"].split("/")[1:3] == _ANTHROPIC_PATH:
                    scope["state"]["error_format"] = error_body
                await error_response(scope, error)(scope, receive, send)
                return
        await self._app(scope, receive, send)


def _given(scope: Scope) -> Iterator[bytes]:
    headers = Headers(scope=scope)
    for value in headers.getlist("authorization"):
        scheme, _, key = value.partition(" ")
        if scheme.lower() == "bearer" and key.strip():
            yield key.strip().encode("latin-1")
    for value in headers.getlist("x-api-key"):
        if value.strip():
            yield value.strip().encode("latin-1")


def _unauthorized(given: bool) -> ApiError:
    """In the words and with the codes of OpenAI's API, whose clients show them; a wrong key is never repeated."""
    headers = {"WWW-Authenticate": "Bearer"}
    if given:
        return ApiError(401, "Incorrect API key provided. Send one of this server's keys as Authorization: Bearer KEY",
                        code="invalid_api_key", headers=headers)  # fmt: skip
    return ApiError(401, "You didn't provide an API key. Send it in the header Authorization: Bearer KEY",
                    headers=headers)  # fmt: skip


def _digest(key: bytes) -> bytes:
    return hashlib.sha256(key).digest()
