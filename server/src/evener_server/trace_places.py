"""Where spans of requests go: ``server.otlp_endpoint``, or OpenTelemetry's own variables. Does not import it."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass
from urllib.parse import urlsplit

from evener.errors import ConfigError

logger = logging.getLogger(__name__)

KEY = "server.otlp_endpoint"
#: Where OTLP over HTTP takes spans, below the address of a collector.
_PATH = "/v1/traces"
#: OpenTelemetry's variables for the address: of spans alone, and of everything.
_SPANS_VARIABLE, _VARIABLE = "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "OTEL_EXPORTER_OTLP_ENDPOINT"
_PROTOCOLS = ("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", "OTEL_EXPORTER_OTLP_PROTOCOL")
_EXPORTERS = "OTEL_TRACES_EXPORTER"
#: The address without a variable for it, by the protocols that are supported.
_DEFAULTS = {"http/protobuf": "http://localhost:4318/v1/traces", "grpc": "http://localhost:4317"}


@dataclass(frozen=True)
class TracePlaces:
    """Where spans go.

    Attributes:
        url: of a collector; None: to none.
        protocol: how they go there: "http/protobuf", or "grpc" (then ``url`` has no path).
        console: whether they are printed to standard output.
    """

    url: str | None
    protocol: str = "http/protobuf"
    console: bool = False


def trace_places(endpoint: str | None, environ: Mapping[str, str]) -> TracePlaces | None:
    """Where spans are sent; None: requests are not traced.

    The variables mean what OpenTelemetry's specification says: ``OTEL_SDK_DISABLED`` turns everything off, and
    ``OTEL_TRACES_EXPORTER`` is a list of otlp and console, or none. But without that variable spans are sent only to an
    address that is given, and not to the default one.

    Raises:
        ConfigError: an address or the protocol cannot be used.
    """
    if environ.get("OTEL_SDK_DISABLED", "").strip().lower() == "true":
        return None
    said = _exporters(environ)
    protocol = next((found for name in _PROTOCOLS if (found := environ.get(name, "").strip())), "http/protobuf")
    given, base = environ.get(_SPANS_VARIABLE, "").strip(), environ.get(_VARIABLE, "").strip()
    if endpoint is None and not ("otlp" in said or (said == ["default"] and (given or base))):
        return TracePlaces(None, console=True) if "console" in said else None
    if protocol not in _DEFAULTS:
        raise ConfigError(f"{_PROTOCOLS[1]}={protocol} is not supported; set {_PROTOCOLS[0]}=http/protobuf and the "
                          "collector's port for it, usually 4318, or grpc and usually 4317")  # fmt: skip
    path = "" if protocol == "grpc" else _PATH
    if endpoint is not None:
        url = _checked(endpoint, f"{KEY}={endpoint}", path)
    elif given:
        url = _checked(given, f"{_SPANS_VARIABLE}={given}", path and "/")
    elif base:
        url = _checked(base.rstrip("/") + path, f"{_VARIABLE}={base}", path)
    else:
        url = _DEFAULTS[protocol]
    return TracePlaces(url, protocol, "console" in said)


def _exporters(environ: Mapping[str, str]) -> list[str]:
    """The known ones of ``OTEL_TRACES_EXPORTER``, "default" without it. As the specification asks, others are passed
    over with a warning."""
    names = list(filter(None, (name.strip().lower() for name in environ.get(_EXPORTERS, "").split(","))))
    unknown = [name for name in names if name not in ("otlp", "console", "none")]
    if unknown:
        logger.warning("%s=%s: %s is not known here and passed over; known are otlp, console and none", _EXPORTERS,
                       environ[_EXPORTERS], ", ".join(unknown))  # fmt: skip
    if "none" in names and len(names) > 1:
        logger.warning("%s=%s: none stands alone, so nothing is exported; leave none out", _EXPORTERS,
                       environ[_EXPORTERS])  # fmt: skip
    return ["none"] if "none" in names else [name for name in names if name not in unknown] if names else ["default"]


def _checked(url: str, where: str, path: str) -> str:
    """``url`` with ``path`` if it has none; without ``path`` it must have none."""
    port = 4318 if path else 4317
    if "@" in url:
        # Without the address: it may have a password.
        raise ConfigError(f"{where.partition('=')[0]} has a user name, or another @; put what the collector asks for "
                          "into the variable OTEL_EXPORTER_OTLP_HEADERS, as in authorization=Basic%20...")  # fmt: skip
    advice = f"{where} is no address of a collector; give one such as http://127.0.0.1:{port}"
    try:
        parts = urlsplit(url)
        _ = parts.port
    except ValueError as error:
        raise ConfigError(f"{advice} ({error})") from None
    wrong = parts.scheme not in ("http", "https") or not parts.hostname or parts.query or parts.fragment
    if wrong or (not path and parts.path not in ("", "/")):
        raise ConfigError(advice)
    return parts._replace(path=path).geturl() if parts.path in ("", "/") else url
