"""The application of Ray Serve: an address, and replicas behind it, each of which runs one ``evener serve``.

The address reads a request and gives it to a replica through Ray's handle, where Ray's router by prefix
(``PrefixCacheAffinityRouter``) chooses. Only this module imports Ray.
"""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import time
from collections.abc import AsyncIterator
from typing import Any

import httpx
import ray
from ray import serve
from ray.exceptions import RayActorError
from ray.serve.config import RequestRouterConfig
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response, StreamingResponse

from evener.errors import EngineError
from evener_deploy import exchange
from evener_deploy.engine_process import EngineProcess
from evener_deploy.exchange import Head, Question, ReplicaLost, passed_on, prompt_prefix, replica_url
from evener_deploy.options import DeployOptions
from evener_deploy.retries import begin, error_body

logger = logging.getLogger(__name__)

APP = "evener"
#: Says which replica answered.
HEADER = "x-evener-replica"
#: Where Ray keeps the router that `ray.serve.llm.request_router` shows; that module also imports engines.
_ROUTER = "ray.llm._internal.serve.routing_policies.prefix_aware.prefix_aware_router:PrefixCacheAffinityRouter"
_MAX_BODY = 16 << 20
#: Of one replica, which has a queue of its own and refuses what is too much.
_MAX_ONGOING = 2048
_HEALTH_SECONDS = 2.0
#: Of a server whose requests have ended, until its processes have.
_STOP_SECONDS = 30.0
_POLL_SECONDS = 0.2
#: Of Ray's processes, where ``start`` makes the cluster.
_VARIABLES = {
    "RAY_USAGE_STATS_ENABLED": "0",
    # Ray lets its processes give way to all others of a machine (nice 15), and the servers are children of these.
    "RAY_worker_niceness": "0",
    # The router asks a replica how busy it is, and takes another one if the answer does not come in 0.1 s: on a busy
    # machine prompts then go where their beginning is not cached.
    "RAY_SERVE_QUEUE_LENGTH_RESPONSE_DEADLINE_S": "1",
}


class Replica:
    """One server. This process ends if its server does, so that Ray replaces both at once."""

    def __init__(self, options: DeployOptions) -> None:
        self._engine = EngineProcess(options.words, options.environ, _end, options.start_timeout)
        self._name = serve.get_replica_context().replica_id.unique_id
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=None)
        self._client = httpx.AsyncClient(
            base_url=self._engine.url, timeout=httpx.Timeout(None, connect=5.0), limits=limits, trust_env=False
        )

    async def ask(self, question: Question) -> AsyncIterator[Head | bytes]:
        """The server's answer."""
        async for part in exchange.ask(self._client, question):
            yield Head(part.status, (*part.headers, (HEADER, self._name))) if isinstance(part, Head) else part

    async def check_health(self) -> None:
        """Ray asks this every few seconds, and replaces the replica if it fails."""
        if (await self._client.get("/health", timeout=20.0)).status_code != 200:
            raise EngineError("the server of this replica is not healthy")

    async def __del__(self) -> None:
        """Ray ends a replica that is no longer needed, after its requests have ended."""
        await asyncio.to_thread(self._engine.stop, _STOP_SECONDS)


def _end(code: int) -> None:
    logger.error("evener serve ended with status %d: this replica ends too", code)
    os._exit(1)


class Address:
    """What clients talk to."""

    def __init__(self, replicas: Any) -> None:
        self._replicas = replicas.options(stream=True, method_name="ask")

    async def __call__(self, request: Request) -> Response:
        """Answer one request."""
        path, method = request.url.path, request.method
        if path == "/health":
            return JSONResponse({"status": "alive"})
        if (target := replica_url(method, path, request.url.query)) is None:
            text = f"evener deploy does not pass on {method} {path}: it concerns one server, and there are several"
            return Response(error_body(text), 404, media_type="application/json")
        try:
            body = await _read(request)
        except ClientDisconnect:
            return Response(status_code=400)
        if body is None:
            return Response(error_body(f"the body has more than {_MAX_BODY} bytes"), 413, media_type="application/json")
        question = Question(method, target, passed_on(request.headers.raw), body, prompt_prefix(body) or target)
        try:
            head, pieces = await begin(self._ask, question)
        except ReplicaLost as error:
            headers = {"Retry-After": "1"}
            return Response(error_body(f"no replica answers: {error}"), 503, headers, media_type="application/json")
        response = StreamingResponse(pieces, head.status)
        response.raw_headers = [(name.lower().encode("latin-1"), text.encode("latin-1")) for name, text in head.headers]
        return response

    async def _ask(self, question: Question) -> AsyncIterator[Head | bytes]:
        answer = self._replicas.remote(question)
        try:
            async for part in answer:
                yield part
        except RayActorError as error:
            raise ReplicaLost(str(error).splitlines()[0]) from error
        finally:
            # Ends the request in the replica if the client is gone; does nothing if it has ended.
            answer.cancel()


async def _read(request: Request) -> bytes | None:
    """The body; None: it is too large."""
    body = bytearray()
    async for piece in request.stream():
        body += piece
        if len(body) > _MAX_BODY:
            return None
    return bytes(body)


def start(options: DeployOptions) -> str:
    """Start the application on the Ray cluster that this process belongs to, or on a new one of this machine alone.
    Returns its URL when all replicas are ready.

    Raises:
        EngineError: a replica does not start.
    """
    for name, value in _VARIABLES.items():
        os.environ.setdefault(name, value)
    handlers = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}
    ray.init(include_dashboard=False, logging_level="warning", ignore_reinit_error=True)
    for number, handler in handlers.items():
        # Ray puts a handler of its own before them, which ends the process three seconds after SIGTERM.
        signal.signal(number, handler)
    serve.start(http_options={"host": options.host, "port": options.port}, logging_config={"log_level": "WARNING"})
    try:
        serve.run(build(options), name=APP, route_prefix="/")
    except RuntimeError as error:
        raise EngineError(f"the replicas did not start: {error}") from error
    return f"http://{options.host}:{options.port}"


def stop(timeout: float) -> None:
    """End the application, and the cluster if ``start`` made it. Other applications of a cluster go on.

    Args:
        timeout: seconds that running requests may continue.
    """
    if not ray.is_initialized():
        return
    try:
        # Not blocking: Ray itself would wait for a minute, whatever the deployments say.
        serve.delete(APP, _blocking=False)
        last = time.monotonic() + timeout + 2 * _STOP_SECONDS
        while APP in serve.status().applications and time.monotonic() < last:
            time.sleep(_POLL_SECONDS)
    finally:
        ray.shutdown()


def build(options: DeployOptions) -> Any:
    """The application, for ``ray.serve.run`` and for Ray's own config files."""
    resources = dict(options.resources)
    actor = {"num_cpus": resources.pop("CPU", 1.0), "num_gpus": resources.pop("GPU", 0.0), "resources": resources}
    router = RequestRouterConfig(
        request_router_class=_ROUTER,
        request_router_kwargs={"imbalanced_threshold": options.spread, "do_eviction": True},
    )
    number: dict[str, Any] = {"num_replicas": options.replicas}
    if options.max_replicas > options.replicas:
        number = {"autoscaling_config": {
            "min_replicas": options.replicas, "max_replicas": options.max_replicas,
            "target_ongoing_requests": options.target, "upscale_delay_s": options.grow_after,
            "downscale_delay_s": options.shrink_after,
        }}  # fmt: skip
    replicas = serve.deployment(
        name="replica", ray_actor_options=actor, request_router_config=router, max_ongoing_requests=_MAX_ONGOING,
        health_check_period_s=_HEALTH_SECONDS, health_check_timeout_s=30.0,
        graceful_shutdown_timeout_s=options.drain_timeout + _STOP_SECONDS, **number,
    )(Replica)  # fmt: skip
    address = serve.deployment(
        name="address", ray_actor_options={"num_cpus": 0}, max_ongoing_requests=_MAX_ONGOING * 8,
        graceful_shutdown_timeout_s=options.drain_timeout + _STOP_SECONDS,
    )(Address)  # fmt: skip
    return address.bind(replicas.bind(options))
