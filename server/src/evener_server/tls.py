"""TLS: the certificate of the server."""

from __future__ import annotations

import ssl
from pathlib import Path

from evener.errors import ConfigError


def tls_files(cert: str | None, key: str | None) -> tuple[Path, Path] | None:
    """The files of certificate and key, which fit together; None: no TLS.

    Raises:
        ConfigError: only one is given, or they cannot be used.
    """
    if cert is None and key is None:
        return None
    if cert is None or key is None:
        missing = "server.tls_cert" if cert is None else "server.tls_key"
        raise ConfigError(f"TLS needs two files: set {missing} too, or neither")
    files = Path(cert).expanduser(), Path(key).expanduser()
    try:
        # Without a password: a key that needs one would ask for it on the terminal.
        ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(*files, password=lambda: "")
    except (OSError, ValueError) as error:  # ssl.SSLError is an OSError
        raise ConfigError(
            f"server.tls_cert={cert} and server.tls_key={key} cannot be used: {error}; give a certificate (chain) and "
            "its key without a password, both in PEM"
        ) from error
    return files
