"""The endpoints about the server itself: models, liveness, readiness, statistics, version."""

from __future__ import annotations

from datetime import datetime, timezone
from typing import Any

import msgspec
from prometheus_client.registry import Collector

from evener.async_llm import AsyncLLM
from evener.errors import EngineDeadError
from evener_server.errors import ApiError
from evener_server.key_use import KeyFamilies
from evener_server.router_info import cache_labels, setting
from evener_server.service import Service
from evener_server.vllm_metrics import AdapterFamily, VllmFamilies


def model_card(service: Service, name: str | None = None) -> dict[str, Any]:
    """The model, or an adapter, as ``/v1/models`` shows it under ``name``; default: the model's own name. It has the
    fields of OpenAI's documents and of Anthropic's: clients of both ask here.

    Raises:
        ApiError: 503, the engine is not ready yet.
    """
    adapter = service.adapters.get(name or "")
    return {
        "id": name or service.model_name,
        "object": "model",
        "created": service.created,
        "owned_by": "evener",
        "root": adapter or service.info.model,
        "parent": None if adapter is None else service.model_name,
        "max_model_len": service.max_model_len,
        "input_modalities": ["text", *service.info.encoders],
        "type": "model",
        "display_name": name or service.model_name,
        "created_at": datetime.fromtimestamp(service.created, timezone.utc).isoformat(),
        "max_input_tokens": service.max_model_len,
        "max_tokens": service.max_model_len,
        "capabilities": None,
    }


def model_list(service: Service) -> dict[str, Any]:
    """``GET /v1/models``."""
    names = (*service.own_names, *service.adapters)
    data = [model_card(service, name) for name in names]
    return {"object": "list", "data": data, "first_id": names[0], "last_id": names[-1], "has_more": False}


def not_ready_reason(llm: AsyncLLM) -> str | None:
    """Why requests are refused; None if they are accepted."""
    if llm.ready:
        return None
    if not llm.alive:
        return f"the engine has stopped: {llm.dead_reason}"
    if llm.paused is not None:
        return llm.paused
    return "the server is shutting down" if llm.info else "the engine is starting"


def check_ready(llm: AsyncLLM) -> None:
    """Raises:
    ApiError: 503 with the reason.
    """
    reason = not_ready_reason(llm)
    if reason is not None:
        raise ApiError(503, reason, code="not_ready", headers={"Retry-After": "1"})


async def stats(service: Service) -> dict[str, Any]:
    """``GET /stats``: the engine's ``StatsReport``.

    Raises:
        EngineDeadError: the engine has stopped or is not ready yet.
    """
    found: dict[str, Any] = msgspec.to_builtins(await service.llm.stats())
    del found["type"]
    return found


async def metrics(service: Service) -> bytes:
    """``GET /metrics`` in Prometheus' text format. Without an engine it has the metrics of this process only."""
    llm, info = service.llm, service.llm.info
    try:
        report = await llm.stats() if llm.ready else None
    except EngineDeadError:
        report = None
    names = ("", "", "") if info is None else (info.backend, info.model, info.served_name)
    labels = {"version": service.version, "backend": names[0], "model": names[1]}
    vllm: list[Collector] = []
    if service.options.vllm_metrics:
        known = ({}, 1) if info is None else (cache_labels(info), info.max_model_len)
        vllm.append(VllmFamilies(service.metrics, names[2], report, *known))
        if llm.ready and llm.info is not None and llm.info.adapters is not None:
            vllm.append(AdapterFamily(setting(llm.info, "infer.max_loras", 0), service.adapters))
    keys = [KeyFamilies(service.key_uses)] if service.key_uses else []
    return service.metrics.text(names[2], report, labels, [*vllm, *keys])


def version_info(service: Service) -> dict[str, Any]:
    """``GET /version``: version, backend and manifest. The engine's fields are null until it is ready."""
    info = service.llm.info
    return {
        "version": service.version,
        "backend": info and info.backend,
        "backend_reason": info and info.backend_reason,
        "manifest": info and msgspec.to_builtins(info.manifest),
    }
