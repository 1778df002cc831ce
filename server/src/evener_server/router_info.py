"""What routers ask a server before they send it requests: ``GET /server_info`` and ``GET /model_info``.

The fields are those of SGLang's endpoints that SGLang's router reads. Its older routers ask for ``/get_server_info``
and ``/get_model_info``. Nothing secret is in them: no key, no token, no address.
"""

from __future__ import annotations

from typing import Any

from fastapi import FastAPI, Response

from evener.engine.facts.engine_info import EngineInfo
from evener_server.service import Service
from evener_server.streaming import to_json


def add_router_info(app: FastAPI, service: Service) -> None:
    """Add the routes."""

    async def get_server_info() -> Response:
        return Response(to_json(server_info(service)), media_type="application/json")

    async def get_model_info() -> Response:
        return Response(to_json(model_info(service)), media_type="application/json")

    for prefix in ("/", "/get_"):
        shown = prefix == "/"
        app.get(f"{prefix}server_info", include_in_schema=shown)(get_server_info)
        app.get(f"{prefix}model_info", include_in_schema=shown)(get_model_info)


def server_info(service: Service) -> dict[str, Any]:
    """The server's limits and its division over devices.

    Raises:
        ApiError: 503, the engine is not ready yet.
    """
    info = service.info
    return {
        "version": service.version,
        "model_path": info.model,
        "served_model_name": info.served_name,
        "tp_size": setting(info, "infer.tp_size", 1),
        "pp_size": setting(info, "infer.pp_size", 1),
        "dp_size": 1,
        "max_running_requests": info.max_reqs,
        "context_length": info.max_model_len,
        "page_size": setting(info, "infer.block_size", None),
        "disable_radix_cache": not setting(info, "infer.prefix_cache", True),
        "dtype": info.dtype,
        "device": info.device,
    }


def model_info(service: Service) -> dict[str, Any]:
    """The model.

    Raises:
        ApiError: 503, the engine is not ready yet.
    """
    info = service.info
    return {
        "model_path": info.model,
        "tokenizer_path": setting(info, "tokenizer", None) or info.model,
        "served_model_name": info.served_name,
        "is_generation": info.pooling is None,
        "architectures": [] if info.architecture is None else [info.architecture],
        "max_context_length": info.max_model_len,
        "vocab_size": info.vocab_size,
        "has_image_understanding": "image" in info.encoders,
        "has_audio_understanding": "audio" in info.encoders,
        "preferred_sampling_params": None,
    }


def cache_labels(info: EngineInfo) -> dict[str, str]:
    """Labels of ``vllm:cache_config_info`` that say how the prefix cache works; empty if the engine does not say."""
    size = setting(info, "infer.block_size", None)
    if size is None:
        return {}
    return {
        "block_size": str(size),
        "enable_prefix_caching": str(setting(info, "infer.prefix_cache", True)),
        "cache_dtype": str(setting(info, "infer.kv_dtype", "auto")),
    }


def setting(info: EngineInfo, key: str, default: Any) -> Any:
    """The resolved value of a key; ``default`` if the engine does not report it."""
    return info.config[key].value if key in info.config else default
