"""Whether requests are traced, and where their spans go: ``server.otlp_endpoint``, or OpenTelemetry's own variables.

This module imports nothing of OpenTelemetry: ``request_traces`` does, which is read only if requests are traced.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from evener.errors import ConfigError

if TYPE_CHECKING:
    from evener_server.request_traces import Traces

logger = logging.getLogger(__name__)

KEY = "server.otlp_endpoint"
#: Where OTLP over HTTP takes spans, below the address of a collector.
_PATH = "/v1/traces"
#: OpenTelemetry's variables for the address: of spans alone, and of everything.
_SPANS_VARIABLE, _VARIABLE = "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "OTEL_EXPORTER_OTLP_ENDPOINT"
_PROTOCOLS = ("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", "OTEL_EXPORTER_OTLP_PROTOCOL")
_INSTALL = 'pip install "evener-server[traces]"'


def open_traces(endpoint: str | None, version: str, environ: Mapping[str, str]) -> Traces | None:
    """What traces requests; None: they are not traced.

    Args:
        endpoint: ``server.otlp_endpoint``; None: what the environment says.
        version: of this package.

    Raises:
        ConfigError: the address or a variable cannot be used, or OpenTelemetry's packages are missing. If only the
            environment asks for spans, as it may for all programs of a machine, missing packages are a warning.
    """
    url = spans_url(endpoint, environ)
    if url is None:
        return None
    try:
        from evener_server.request_traces import Traces
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] != "opentelemetry":
            raise
        if endpoint is None:
            logger.warning("requests are not traced, although the environment asks for it: %s is missing; type %s",
                           error.name, _INSTALL)  # fmt: skip
            return None
        raise ConfigError(f"{KEY}={endpoint} needs the package {error.name}, which is missing; type {_INSTALL}, or "
                          f"leave {KEY} out") from error  # fmt: skip
    try:
        return Traces.to_collector(url, version)
    except ValueError as error:
        raise ConfigError(
            f"OpenTelemetry does not take its variables (OTEL_...) as they are set: {error} Correct them; "
            "OTEL_BSP_MAX_QUEUE_SIZE is at least OTEL_BSP_MAX_EXPORT_BATCH_SIZE (512)"
        ) from error


def spans_url(endpoint: str | None, environ: Mapping[str, str]) -> str | None:
    """The URL to which spans are sent; None: requests are not traced.

    The variables mean what OpenTelemetry's specification says: ``OTEL_SDK_DISABLED`` turns everything off, and
    ``OTEL_TRACES_EXPORTER=none`` what other variables turn on.

    Raises:
        ConfigError: it is no URL for OTLP over HTTP.
    """
    if environ.get("OTEL_SDK_DISABLED", "").strip().lower() == "true":
        return None
    if endpoint is not None:
        return _checked(endpoint, f"{KEY}={endpoint}")
    if environ.get("OTEL_TRACES_EXPORTER", "otlp").strip() not in ("otlp", ""):
        return None
    whole, base = environ.get(_SPANS_VARIABLE, "").strip(), environ.get(_VARIABLE, "").strip()
    if not whole and not base:
        return None
    protocol = next((found for name in _PROTOCOLS if (found := environ.get(name, "").strip())), "http/protobuf")
    if protocol != "http/protobuf":
        raise ConfigError(f"{_PROTOCOLS[1]}={protocol} is not supported; set {_PROTOCOLS[0]}=http/protobuf and the "
                          "collector's port for it, usually 4318")  # fmt: skip
    if whole:
        return _checked(whole, f"{_SPANS_VARIABLE}={whole}", path="/")
    return _checked(base.rstrip("/") + _PATH, f"{_VARIABLE}={base}")


def _checked(url: str, where: str, path: str = _PATH) -> str:
    """``url`` with ``path`` if it has none."""
    advice = f"{where} is no address of a collector; give one such as http://127.0.0.1:4318"
    try:
        parts = urlsplit(url)
        _ = parts.port
    except ValueError as error:
        raise ConfigError(f"{advice} ({error})") from None
    if parts.scheme not in ("http", "https") or not parts.hostname or parts.query or parts.fragment:
        raise ConfigError(advice)
    if parts.username is not None:
        # Without the address: it has the password.
        raise ConfigError(f"{where.partition('=')[0]} has a user name; put what the collector asks for into the "
                          "variable OTEL_EXPORTER_OTLP_HEADERS, as in authorization=Basic%20...")  # fmt: skip
    return parts._replace(path=path).geturl() if parts.path in ("", "/") else url
