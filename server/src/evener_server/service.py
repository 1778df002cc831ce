"""What the endpoints share: the engine, the model's name, defaults, and the head of every answer."""

from __future__ import annotations

import time
import uuid
from typing import Any

from importlib_metadata import version

from evener.async_llm import AsyncLLM
from evener.errors import RequestError
from evener.sampling_params import SamplingParams
from evener_server.body import BodyLimits
from evener_server.errors import ApiError, unavailable
from evener_server.generation import Running
from evener_server.metrics import Metrics
from evener_server.protocol import GenerationBody


class Service:
    """One engine behind the API.

    Attributes:
        llm: the engine.
        limits: of request bodies.
        metrics: what is counted.
        running: what runs.
        version: of this package.
        created: when it started, in seconds since 1970.
    """

    def __init__(self, llm: AsyncLLM, limits: BodyLimits) -> None:
        self.llm, self.limits = llm, limits
        self.metrics = Metrics()
        self.running = Running(llm, self.metrics)
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
            raise ApiError(
                404,
                f"model {shown!r} does not exist here; this server has {self.model_name!r}",
                "model",
                "model_not_found",
            )

    def check_room(self, samples: int, param: str) -> None:
        """Raises:
        RequestError: so many samples can never run at once; ``param`` asks for them.
        """
        if self.llm.max_queue is None:
            return
        limit = int(self.llm.info.get("max_reqs", 0)) + self.llm.max_queue  # type: ignore[call-overload]
        if samples > limit:
            raise RequestError(
                f"{param} asks for {samples} samples, but this server takes {limit} at a time; split it up", param
            )

    def sampling(self, body: GenerationBody) -> SamplingParams:
        """``body``'s parameters for the engine.

        Raises:
            RequestError: a value is out of range.
        """
        return body.sampling(detokenize=self.llm.tokenizer is not None)

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
