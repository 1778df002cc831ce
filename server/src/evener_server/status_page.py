"""``GET /status``: what runs here and how busy it is, in one answer: JSON for programs, a page for a browser.

The page is a file of this package, the same for everybody: it has no data, asks for the JSON like any other client, and
needs an API key for that where the server has keys.
"""

from __future__ import annotations

import functools
import platform
import time
from typing import Any

from fastapi import FastAPI, Request, Response
from importlib_metadata import PackageNotFoundError, version
from starlette.datastructures import Headers
from starlette.types import Scope

from evener.errors import EngineDeadError
from evener_server.page import file_response, is_page, page_files
from evener_server.service import Service
from evener_server.status import not_ready_reason
from evener_server.streaming import to_json

PATH = "/status"
_FILE = "status.html"
#: Characters of a name or a reason, and names of adapters: the answer has a limit of its own.
_MAX_CHARACTERS, _MAX_ADAPTERS = 300, 20
#: Their versions are shown, where they are installed.
_PACKAGES = ("evener", "evener-server", "evener-models", "torch")


def add_status_page(app: FastAPI, service: Service) -> None:
    """Add the route."""

    @app.head(PATH, include_in_schema=False)
    @app.get(PATH, responses={200: {"content": {"text/html": {"schema": {"type": "string"}}}}})
    async def status(request: Request) -> Response:
        if service.options.page and _wants_page(request.scope):
            response = file_response(request, page_files()[_FILE])
        else:
            headers = {"Cache-Control": "no-store", "X-Content-Type-Options": "nosniff"}
            response = Response(to_json(await status_report(service)), media_type="application/json", headers=headers)
        response.headers["Vary"] = "Accept"
        return response


def needs_no_key(scope: Scope) -> bool:
    """Whether a request is for a page or one of its files: people load these before they type their key."""
    return is_page(scope["path"]) or (scope["path"] == PATH and _wants_page(scope))


async def status_report(service: Service) -> dict[str, Any]:
    """The model, the backend, requests, memory for their state, and versions. Fields of an engine that has not started
    or has stopped are null."""
    llm, info, own = service.llm, service.llm.info, service.metrics
    try:
        report = await llm.stats() if llm.alive and info is not None else None
    except EngineDeadError:
        report = None
    reason = not_ready_reason(llm)
    adapters = sorted(service.adapters)
    return {
        "ready": reason is None,
        "reason": reason and reason[:_MAX_CHARACTERS],
        "started": service.created,
        "uptime_seconds": max(0, int(time.time()) - service.created),
        "model": info and {
            "name": info.served_name[:_MAX_CHARACTERS], "architecture": info.architecture, "dtype": info.dtype,
            "max_model_len": info.max_model_len, "weights_version": llm.weights_version, "asleep": llm.asleep,
            "adapters": [name[:_MAX_CHARACTERS] for name in adapters[:_MAX_ADAPTERS]], "adapter_count": len(adapters),
        },
        "backend": info and {
            "name": info.backend, "version": info.backend_version, "reason": info.backend_reason[:_MAX_CHARACTERS],
            "device": info.device[:_MAX_CHARACTERS], "ranks": max(1, len(info.ranks)),
        },
        "requests": {
            "running": report and report.running, "waiting": report and report.waiting, "open": len(service.running),
            "max_running": info and info.max_reqs, "max_waiting": llm.max_queue,
            "ended": dict(own.finished), "preemptions": report and report.preemptions,
        },
        "kv_cache": report and {
            "blocks": report.blocks, "blocks_used": report.blocks_used,
            "usage": report.blocks_used / report.blocks if report.blocks else 0.0,
            "prefix_queries": report.queried_tokens, "prefix_hits": report.cached_tokens,
        },
        "tokens": {"prompt": own.prompt_tokens, "generated": own.generation_tokens},
        "versions": _versions(),
    }  # fmt: skip


@functools.cache
def _versions() -> dict[str, str]:
    found = {"python": platform.python_version()}
    for name in _PACKAGES:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found


def _wants_page(scope: Scope) -> bool:
    """Whether HTML is named before JSON, as browsers do for a page."""
    kinds = [part.partition(";")[0].strip().lower() for part in Headers(scope=scope).get("accept", "").split(",")]
    return next((kind == "text/html" for kind in kinds if kind in ("text/html", "application/json")), False)
