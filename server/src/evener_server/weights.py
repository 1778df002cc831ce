"""Sleep and wake, and new weights while the server runs: for operators, and loops of reinforcement learning.

An operator allows it with ``server.weights_folder``, below which all weights lie. The names are vLLM's (``/sleep``,
``/wake_up``, ``/is_sleeping``) and SGLang's (``/update_weights_from_disk``). Every response of such a server names the
version of the weights, in ``x-weight-version``.
"""

from __future__ import annotations

from typing import Annotated, Any

from fastapi import FastAPI, Request, Response
from pydantic import Field
from starlette.datastructures import MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from evener.async_llm import AsyncLLM
from evener.errors import CheckpointError, RequestError
from evener_server.body import read_object
from evener_server.errors import ApiError, log_fields
from evener_server.operator_folder import folder_below
from evener_server.protocol import PromptBody, parse_body
from evener_server.service import Service
from evener_server.streaming import to_json
from evener_server.unknown_fields import header

HEADER = "x-weight-version"
#: Seconds that running requests have to end, if the client does not say.
DRAIN_SECONDS = 60.0
_MAX_SECONDS = 3600.0


class UpdateWeightsBody(PromptBody):
    """POST /update_weights."""

    #: A folder below ``server.weights_folder``: absolute, or relative to that.
    model_path: Annotated[str, Field(min_length=1, max_length=4096)]
    #: Name of these weights in responses. Default: the number of updates, and one.
    weight_version: Annotated[str | None, Field(pattern=r"^[A-Za-z0-9._:/+=@-]{1,128}$")] = None
    #: Seconds that running requests have to end with the old weights; then they get a 503.
    timeout: Annotated[float, Field(ge=0, le=_MAX_SECONDS)] = DRAIN_SECONDS
    #: SGLang's name of ``timeout`` 0.
    abort_all_requests: bool = False


class VersionHeader:
    """ASGI middleware that names the version of the weights in every response."""

    def __init__(self, app: ASGIApp, llm: AsyncLLM) -> None:
        self._app, self._llm = app, llm

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def send_with_version(message: Message) -> None:
            if message["type"] == "http.response.start":
                MutableHeaders(scope=message)[HEADER] = self._llm.weights_version
            await send(message)

        await self._app(scope, receive, send_with_version)


def add_weights(
    app: FastAPI, service: Service, folder: str, schema: dict[str, Any], responses: dict[int | str, dict[str, Any]]
) -> None:
    """Add the routes. ``schema`` and ``responses`` describe ``UpdateWeightsBody`` and errors for people."""
    llm = service.llm

    @app.post("/sleep", responses=responses)
    async def sleep(request: Request) -> Response:
        level = _query(request, "level", "timeout").get("level", "1")
        if level not in ("1", "2"):
            raise ApiError(400, "level must be 1 or 2, which are the same here: weights are read again", "level")
        await llm.sleep(_seconds(request))
        return _json({"is_sleeping": True})

    @app.post("/wake_up", responses=responses)
    async def wake_up(request: Request) -> Response:
        _query(request)
        try:
            await llm.wake_up()
        except CheckpointError as error:
            raise ApiError(500, f"the engine stays asleep: {error}", code="weights_not_loaded") from error
        return _json({"is_sleeping": False, "weight_version": llm.weights_version})

    @app.get("/is_sleeping")
    async def is_sleeping() -> Response:
        return _json({"is_sleeping": llm.asleep, "weight_version": llm.weights_version})

    async def update_weights(request: Request) -> Response:
        body, ignored = parse_body(UpdateWeightsBody, await read_object(request, service.limits))
        log_fields(request.scope)["ignored"] = header(ignored) or None
        if body.model is not None:
            service.check_model(body.model)
        found = folder_below(folder, body.model_path, "model_path", "server.weights_folder", "weights_not_found")
        seconds = 0.0 if body.abort_all_requests else body.timeout
        try:
            await llm.update_weights(found, body.weight_version, seconds)
        except CheckpointError as error:
            raise RequestError(str(error), "model_path") from error
        return _json({"success": True, "message": f"the weights are those of {body.model_path}",
                      "weight_version": llm.weights_version})  # fmt: skip

    for path in ("/update_weights", "/update_weights_from_disk"):
        app.post(path, openapi_extra=schema, responses=responses)(update_weights)


def _query(request: Request, *known: str) -> dict[str, str]:
    """The parameters of the URL.

    Raises:
        ApiError: 400, one is unknown.
    """
    for name in request.query_params:
        if name not in known:
            raise ApiError(400, f"unknown parameter {name[:100]!r}: everything sleeps and wakes together", name[:100])
    return dict(request.query_params)


def _seconds(request: Request) -> float:
    text = request.query_params.get("timeout", str(DRAIN_SECONDS))
    try:
        seconds = float(text)
    except ValueError:
        seconds = -1.0
    if not 0 <= seconds <= _MAX_SECONDS:
        raise ApiError(400, f"timeout must be seconds from 0 to {_MAX_SECONDS:g}", "timeout")
    return seconds


def _json(value: dict[str, Any]) -> Response:
    return Response(to_json(value), media_type="application/json")
