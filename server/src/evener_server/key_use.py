"""How much each API key uses: requests that are open, requests and tokens a minute; and the limits on them."""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field

from prometheus_client.core import CounterMetricFamily, Metric
from prometheus_client.registry import Collector

from evener_server.errors import ApiError
from evener_server.key_file import ApiKey

_MINUTE = 60.0


class Allowance:
    """A token bucket: it refills evenly and holds at most one minute's worth. It may be overdrawn; the next caller then
    waits until the debt is refilled.

    Args:
        clock: the current time in seconds.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock, self._left, self._since = clock, math.inf, clock()

    def wait(self, per_minute: int, needed: int = 1) -> float:
        """Seconds until ``needed`` are there; 0: now."""
        now = self._clock()
        self._left = min(self._left + (now - self._since) * per_minute / _MINUTE, per_minute)
        self._since = now
        return max(needed - self._left, 0) * _MINUTE / per_minute

    def take(self, count: int) -> None:
        """``count`` are used."""
        self._left -= count


@dataclass
class KeyUse:
    """What one key uses.

    Attributes:
        requests, refused, tokens: so far; refused ones by the limit that refused them.
        open: requests that are being answered, or that run in the background.
    """

    clock: Callable[[], float] = time.monotonic
    requests: int = 0
    refused: Counter[str] = field(default_factory=Counter)
    tokens: int = 0
    open: int = 0

    def __post_init__(self) -> None:
        self._requests, self._tokens = Allowance(self.clock), Allowance(self.clock)

    def begin(self, key: ApiKey) -> None:
        """A request with this key comes.

        Raises:
            ApiError: 429, a limit of the key does not allow it now.
        """
        waits = {
            "requests_at_once": 1.0 if self.open >= (key.requests_at_once or math.inf) else 0.0,
            "requests_per_minute": self._requests.wait(key.requests_per_minute) if key.requests_per_minute else 0.0,
            "tokens_per_minute": self._tokens.wait(key.tokens_per_minute) if key.tokens_per_minute else 0.0,
        }
        limit, wait = max(waits.items(), key=lambda item: item[1])
        if wait > 0:
            self.refused[limit] += 1
            message = f"this API key may have {getattr(key, limit)} {limit.replace('_', ' ')}; try again in a moment"
            headers = {"Retry-After": str(math.ceil(wait))}
            raise ApiError(429, message, code="rate_limit_exceeded", headers=headers)
        self.requests += 1
        if key.requests_per_minute:
            self._requests.take(1)

    def charge(self, tokens: int) -> None:
        """A generation has ended that had so many tokens, of prompts and of answers. A key's limit holds for the
        requests after that, because nobody knows an answer's length before."""
        self.tokens += tokens
        self._tokens.take(tokens)


@dataclass
class Client:
    """Who sent one request. The request is open while it is answered, and while anything runs for it."""

    key: ApiKey
    use: KeyUse
    _reserved: int = 0

    def reserve(self) -> None:
        """Something runs for the request; ``release`` follows."""
        self.use.open += self._reserved == 0
        self._reserved += 1

    def release(self) -> None:
        """One of them has ended."""
        self._reserved -= 1
        self.use.open -= self._reserved == 0

    @contextmanager
    def answering(self) -> Iterator[None]:
        """While the request is answered; what runs for it finds this as ``current_client``."""
        token = current_client.set(self)
        self.reserve()
        try:
            yield
        finally:
            self.release()
            current_client.reset(token)


#: None without API keys.
current_client: ContextVar[Client | None] = ContextVar("current_client", default=None)


def current_priority() -> int:
    """The priority of the request that is being answered."""
    client = current_client.get()
    return 0 if client is None else client.key.priority


class KeyFamilies(Collector):
    """What keys use, as metrics by their names."""

    def __init__(self, uses: Mapping[str, KeyUse]) -> None:
        self._uses = uses

    def collect(self) -> Iterator[Metric]:
        requests = CounterMetricFamily("evener:api_key_requests", "Accepted requests, by API key.", labels=("key",))
        tokens = CounterMetricFamily("evener:api_key_tokens", "Tokens of prompts and answers.", labels=("key",))
        refused = CounterMetricFamily(
            "evener:api_key_refused", "Requests that a limit of their API key refused.", labels=("key", "limit")
        )
        for name, use in self._uses.items():
            requests.add_metric((name,), use.requests)
            tokens.add_metric((name,), use.tokens)
            for limit, count in use.refused.items():
                refused.add_metric((name, limit), count)
        yield from (requests, tokens, refused)
