"""What a server says of itself: models, liveness, readiness, version."""

from __future__ import annotations

from typing import Any

import msgspec

from evener.async_llm import AsyncLLM
from evener.errors import EngineDeadError
from evener_server.errors import ApiError
from evener_server.service import Service


def model_card(service: Service) -> dict[str, Any]:
    """The model as ``/v1/models`` shows it.

    Raises:
        ApiError: 503, the engine is not there yet.
    """
    return {
        "id": service.model_name,
        "object": "model",
        "created": service.created,
        "owned_by": "evener",
        "max_model_len": service.max_model_len,
    }


def model_list(service: Service) -> dict[str, Any]:
    """``GET /v1/models``."""
    return {"object": "list", "data": [model_card(service)]}


def unready_reason(llm: AsyncLLM) -> str | None:
    """Why no requests are taken; None when they are."""
    if llm.ready:
        return None
    if not llm.alive:
        return f"the engine has stopped: {llm.dead_reason}"
    return "the server is shutting down" if llm.info else "the engine is starting"


def check_ready(llm: AsyncLLM) -> None:
    """Raises:
    ApiError: 503 with the reason.
    """
    reason = unready_reason(llm)
    if reason is not None:
        raise ApiError(503, reason, code="not_ready", headers={"Retry-After": "1"})


async def stats(service: Service) -> dict[str, Any]:
    """``GET /stats``: how busy the engine is, as its ``StatsReport`` says.

    Raises:
        EngineDeadError: there is no engine, or not yet.
    """
    found: dict[str, Any] = msgspec.to_builtins(await service.llm.stats())
    del found["type"]
    return found


async def metrics(service: Service) -> bytes:
    """``GET /metrics``: Prometheus' text. It answers also while there is no engine, with what was counted here."""
    llm, info = service.llm, service.llm.info
    try:
        report = await llm.stats() if llm.ready else None
    except EngineDeadError:
        report = None
    labels = {"version": service.version, "backend": str(info.get("backend", "")), "model": str(info.get("model", ""))}
    return service.metrics.text(str(info.get("served_name", "")), report, labels)


def version_info(service: Service) -> dict[str, Any]:
    """``GET /version``: what runs here and why. The engine's part is null until it has started."""
    info = service.llm.info
    return {
        "version": service.version,
        "backend": info.get("backend"),
        "backend_reason": info.get("backend_reason"),
        "manifest": info.get("manifest"),
    }
