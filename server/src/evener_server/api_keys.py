"""API keys: where they come from, and the check of each request."""

from __future__ import annotations

import asyncio
import hmac
import logging
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping

from starlette.datastructures import Headers
from starlette.requests import Request
from starlette.types import ASGIApp, Receive, Scope, Send

from evener.errors import ConfigError
from evener.sampling_params import MAX_PRIORITY
from evener_server.anthropic.job import error_body
from evener_server.errors import ApiError, error_response, log_error, log_fields
from evener_server.key_file import ApiKey, digest_of, plain_key, read_key_file, signature
from evener_server.key_use import Client, KeyUse
from evener_server.ksanallm.encoding import Encoding

logger = logging.getLogger(__name__)

VARIABLE = "EVENER_API_KEY"
#: Supervisors, load balancers and Prometheus ask these; they have no key, and the answers have no content of requests.
OPEN_PATHS = frozenset({"/health", "/ready", "/metrics"})
#: These change what everybody gets: a key has to be marked for them.
ADMIN_PATHS = frozenset({
    "/sleep", "/wake_up", "/update_weights", "/update_weights_from_disk",
    "/v1/load_lora_adapter", "/v1/unload_lora_adapter",
})  # fmt: skip
#: How paths of Anthropic's API begin: its clients read errors in its own format.
_ANTHROPIC_PATH = ["v1", "messages"]
#: KsanaLLM's clients read errors in its own format, too.
_KSANALLM_PATHS = ("/generate", "/forward")
#: Seconds between two looks at the key file.
_WATCH_SECONDS = 2.0


class ApiKeys:
    """The keys that requests may have; only their SHA-256 digests are kept.

    Args:
        keys: the keys; none: every request is allowed.
        strict: False lets in requests without one of them too, with a lower priority than all of them.

    Attributes:
        uses: what each key uses, by its name.
        highest: the highest priority of a key.
    """

    def __init__(self, keys: Iterable[str | ApiKey] = (), strict: bool = True) -> None:
        self.strict = strict
        self.uses: defaultdict[str, KeyUse] = defaultdict(KeyUse)
        self.replace(keys)

    def replace(self, keys: Iterable[str | ApiKey]) -> None:
        """Let these be the keys from now on. Of equal keys the first counts."""
        found = [plain_key(each, "a key") if isinstance(each, str) else each for each in keys]
        self._keys = tuple({key.digest: key for key in reversed(found)}.values())
        lowest = min((key.priority for key in self._keys), default=0)
        self.highest = max((key.priority for key in self._keys), default=0)
        self._others = ApiKey(name="none", digest=b"", priority=max(lowest - 1, -MAX_PRIORITY))

    def __len__(self) -> int:
        return len(self._keys)

    def find(self, key: bytes) -> ApiKey | None:
        """The one that ``key`` is. The time depends on neither which key it is nor how much is right."""
        digest = digest_of(key)
        # A list compares every digest, also after one that is equal; next() would stop there.
        equal = [each for each in self._keys if hmac.compare_digest(digest, each.digest)]
        return equal[0] if equal else None

    def client(self, given: Iterable[bytes]) -> Client | None:
        """Who sends a request with these keys; None: nobody who may."""
        found = next((key for each in given if (key := self.find(each)) is not None), None)
        key = found or (None if self.strict else self._others)
        return None if key is None else Client(key, self.uses[key.name])


class KeyReader:
    """Reads all keys: those listed, those in the file, and the one of the environment.

    Args:
        listed: ``serve.api_keys``.
        file: ``server.api_key_file``, see ``read_key_file``.
        environ: where ``EVENER_API_KEY`` is read.

    Raises:
        ConfigError: a key is empty or cannot be sent in a header. No message shows a key.
    """

    def __init__(self, listed: Iterable[str], file: str | None, environ: Mapping[str, str]) -> None:
        self._file, self._seen = file, None if file is None else signature(file)
        self._fixed = [plain_key(key, f"serve.api_keys: key {number}") for number, key in enumerate(listed, 1)]
        # A variable that is set but empty is a mistake: without this, it would open the server to everybody.
        if VARIABLE in environ:
            self._fixed.append(plain_key(environ[VARIABLE], VARIABLE))

    def read(self) -> list[ApiKey]:
        """All keys, as they are now.

        Raises:
            ConfigError: the file cannot be used.
        """
        # Those of the file first: they have names and limits.
        return [*(() if self._file is None else read_key_file(self._file)), *self._fixed]

    def read_changed(self, keys: ApiKeys) -> None:
        """Read the file again if it was changed since the last look. If it cannot be used, the earlier keys stay."""
        if self._file is None or (now := signature(self._file)) == self._seen:
            return
        self._seen = now
        try:
            keys.replace(self.read())
        except ConfigError as error:
            logger.warning("the API keys stay as they were: %s", error)
        else:
            logger.info("the API keys were read again (number of keys: %d)", len(keys))

    async def watch(self, keys: ApiKeys) -> None:
        """Look at the file for ever."""
        while self._file is not None:
            await asyncio.sleep(_WATCH_SECONDS)
            await asyncio.to_thread(self.read_changed, keys)


class KeyCheck:
    """ASGI middleware that answers 401 to requests without one of the keys, 403 to those whose key does not suffice,
    and 429 to those that a limit of their key refuses, before their body is read.

    A key comes as ``Authorization: Bearer KEY``, or as ``x-api-key: KEY`` as Anthropic's clients send it; one valid key
    is enough. ``OPEN_PATHS`` need none, and ``ADMIN_PATHS`` one that is marked ``admin``. Limits are for POST.

    Args:
        keys: at least one.
        is_open: says of further requests that they need no key.
        is_crowded: whether there is only room left that is kept for the highest priority.
    """

    def __init__(
        self, app: ASGIApp, keys: ApiKeys, is_open: Callable[[Scope], bool] = lambda scope: False,
        is_crowded: Callable[[], bool] = lambda: False,
    ) -> None:  # fmt: skip
        self._app, self._keys, self._is_open, self._is_crowded = app, keys, is_open, is_crowded

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["path"] in OPEN_PATHS or self._is_open(scope):
            await self._app(scope, receive, send)
            return
        given = list(_given(scope))
        client = self._keys.client(given)
        try:
            if client is None:
                raise _unauthorized(bool(given))
            log_fields(scope)["key"] = client.key.name
            if scope["path"] in ADMIN_PATHS and not client.key.admin:
                raise _not_admin()
            if scope["method"] == "POST":
                if client.key.priority < self._keys.highest and self._is_crowded():
                    raise _crowded()
                client.use.begin(client.key)
        except ApiError as error:
            log_error(scope, error)
            if scope["path"].split("/")[1:3] == _ANTHROPIC_PATH:
                scope["state"]["error_format"] = error_body
            elif scope["path"] in _KSANALLM_PATHS:
                request = Request(scope)
                Encoding.of(request).use_for_errors(request)
            await error_response(scope, error)(scope, receive, send)
            return
        with client.answering():
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


def _not_admin() -> ApiError:
    message = ("this path needs an API key that may change what the server serves: mark one with admin: true in "
               "server.api_key_file, and send that")  # fmt: skip
    return ApiError(403, message, code="admin_key_needed")


def _crowded() -> ApiError:
    """As of a full queue."""
    message = "too many requests wait, and the rest of the queue is kept for a higher priority: try again in a moment"
    return ApiError(429, message, code="overloaded", headers={"Retry-After": "1"})


def _unauthorized(given: bool) -> ApiError:
    """In the words and with the codes of OpenAI's API, whose clients show them; a wrong key is never repeated."""
    headers = {"WWW-Authenticate": "Bearer"}
    if given:
        return ApiError(401, "Incorrect API key provided. Send one of this server's keys as Authorization: Bearer KEY",
                        code="invalid_api_key", headers=headers)  # fmt: skip
    return ApiError(401, "You didn't provide an API key. Send it in the header Authorization: Bearer KEY",
                    headers=headers)  # fmt: skip
