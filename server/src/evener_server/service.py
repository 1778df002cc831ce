"""What the endpoints share: the engine, the model's name, defaults, and the head of every answer."""

from __future__ import annotations

import time
import uuid
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from importlib_metadata import version

from evener.async_llm import AsyncLLM
from evener.errors import RequestError
from evener.sampling_params import SamplingParams
from evener_server.body import BodyLimits
from evener_server.errors import ApiError, unavailable
from evener_server.generation import Running
from evener_server.protocol import GenerationBody

if TYPE_CHECKING:
    from evener.config import Config


@dataclass(frozen=True, kw_only=True)
class Options:
    """What holds for requests that do not say, and limits.

    Attributes:
        stop_with_eos: end at the model's end token.
        max_new_tokens: None: the rest of the context for a chat, 16 for completions.
        limits: of request bodies.
    """

    stop_with_eos: bool = True
    max_new_tokens: int | None = None
    limits: BodyLimits = field(default_factory=BodyLimits)

    @classmethod
    def from_config(cls, config: Config) -> Options:
        """As the configuration says."""
        return cls(stop_with_eos=config.infer.stop_with_eos, max_new_tokens=config.request.max_new_tokens)


class Service:
    """One engine behind the API.

    Attributes:
        llm: the engine.
        running: what runs.
        version: of this package.
        created: when it started, in seconds since 1970.
    """

    def __init__(self, llm: AsyncLLM, options: Options) -> None:
        self.llm, self.options = llm, options
        self.running = Running(llm)
        self.version = version("evener-server")
        self.created = int(time.time())

    @property
    def model_name(self) -> str:
        """The model's name in the API.

        Raises:
            ApiError: 503, the engine is not there yet.
        """
        return str(self._info("served_name"))

    @property
    def max_model_len(self) -> int:
        """Tokens that a prompt and its answer may have together."""
        return int(self._info("max_model_len"))

    @property
    def fingerprint(self) -> str:
        """What produced an answer: the same fingerprint and seed give the same tokens."""
        return f"evener-{self.version}-{self._info('backend')}"

    def check_model(self, name: str) -> None:
        """Raises:
        ApiError: 404, ``name`` is another model.
        """
        if name != self.model_name:
            shown = name if len(name) <= 200 else name[:200] + "…"
            raise ApiError(404, f"model {shown!r} does not exist here; this server has {self.model_name!r}", "model", "model_not_found")

    def check_room(self, samples: int, param: str) -> None:
        """Raises:
        RequestError: so many samples can never run at once; ``param`` asks for them.
        """
        limit = self.llm.max_queue
        if limit is not None and samples > limit:
            raise RequestError(f"{param} asks for {samples} samples, but this server takes {limit} at a time; split it up", param)

    def sampling(self, body: GenerationBody) -> SamplingParams:
        """``body``'s parameters with the server's defaults.

        Raises:
            RequestError: a value is out of range.
        """
        return body.sampling(
            stop_with_eos=self.options.stop_with_eos,
            max_new_tokens=self.options.max_new_tokens,
            detokenize=self.llm.tokenizer is not None,
        )

    def head(self, prefix: str, kind: str) -> dict[str, Any]:
        """The fields that every answer begins with, under a new id."""
        return {
            "id": f"{prefix}-{uuid.uuid4().hex}",
            "object": kind,
            "created": int(time.time()),
            "model": self.model_name,
            "system_fingerprint": self.fingerprint,
        }

    def _info(self, key: str) -> Any:
        if not self.llm.info:
            raise unavailable(self.llm.dead_reason or "the engine is not ready yet")
        return self.llm.info[key]
