"""Whether requests are traced; if so, starts what makes and sends their spans.

This module imports nothing of OpenTelemetry: ``request_traces`` does, which is imported only if requests are traced.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import TYPE_CHECKING

from evener.errors import ConfigError
from evener_server.trace_places import KEY, trace_places

if TYPE_CHECKING:
    from evener_server.request_traces import Traces

logger = logging.getLogger(__name__)
#: The extra of this package for each protocol.
_EXTRAS = {"http/protobuf": "traces", "grpc": "traces-grpc"}


def open_traces(endpoint: str | None, version: str, environ: Mapping[str, str]) -> Traces | None:
    """What traces requests; None: they are not traced.

    Args:
        endpoint: ``server.otlp_endpoint``; None: what the environment says.
        version: of this package.

    Raises:
        ConfigError: the address or a variable cannot be used, or OpenTelemetry's packages are missing. If only the
            environment asks for spans, as it may for all programs of a machine, missing packages are a warning.
    """
    places = trace_places(endpoint, environ)
    if places is None:
        return None
    try:
        from evener_server.request_traces import Traces

        return Traces.to(places, version)
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] not in ("opentelemetry", "grpc"):
            raise
        install = f'pip install "evener-server[{_EXTRAS[places.protocol]}]"'
        if endpoint is None:
            logger.warning("requests are not traced, although the environment asks for it: %s is missing; type %s",
                           error.name, install)  # fmt: skip
            return None
        raise ConfigError(f"{KEY}={endpoint} over {places.protocol} needs the package {error.name}, which is missing; "
                          f"type {install}, or leave {KEY} out") from error  # fmt: skip
    except ValueError as error:
        raise ConfigError(
            f"OpenTelemetry does not take its variables (OTEL_...) as they are set: {error} Correct them; "
            "OTEL_BSP_MAX_QUEUE_SIZE is at least OTEL_BSP_MAX_EXPORT_BATCH_SIZE (512)"
        ) from error
