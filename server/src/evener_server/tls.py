"""TLS: the certificate of the server, which is read again when it changes, and whose certificates clients must have."""

from __future__ import annotations

import asyncio
import logging
import ssl
from pathlib import Path
from typing import Any

from evener.errors import ConfigError
from evener_server.key_file import signature
from evener_server.options import ServerOptions

logger = logging.getLogger(__name__)

#: Seconds between two looks at the files.
_WATCH_SECONDS = 2.0


class Tls:
    """The files of certificate and key, which fit together.

    Args:
        cert: a certificate, with the chain that leads to it, in PEM.
        key: its key, without a password, in PEM.
        client_ca: certificates in PEM, one of which must have signed a client's certificate; None: clients need none.

    Raises:
        ConfigError: they cannot be used.
    """

    def __init__(self, cert: Path, key: Path, client_ca: Path | None = None) -> None:
        self._cert, self._key, self._client_ca = cert, key, client_ca
        self._seen = self._signatures()
        self._check()
        if client_ca is not None:
            try:
                ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_verify_locations(client_ca)
            except (OSError, ValueError) as error:  # ssl.SSLError is an OSError
                raise ConfigError(f"server.tls_client_ca={client_ca} cannot be used: {error}; give certificates in "
                                  "PEM, one of which has signed those of clients") from error  # fmt: skip

    @classmethod
    def of(cls, options: ServerOptions) -> Tls | None:
        """What the keys say; None: no TLS.

        Raises:
            ConfigError: one of two files is missing, or they cannot be used.
        """
        cert, key, client_ca = options.tls_cert, options.tls_key, options.tls_client_ca
        if cert is None and key is None:
            if client_ca is not None:
                raise ConfigError("server.tls_client_ca needs a server with TLS: set server.tls_cert and "
                                  "server.tls_key too")  # fmt: skip
            return None
        if cert is None or key is None:
            missing = "server.tls_cert" if cert is None else "server.tls_key"
            raise ConfigError(f"TLS needs two files: set {missing} too, or neither")
        return cls(*(Path(each).expanduser() for each in (cert, key, client_ca) if each is not None))

    @property
    def settings(self) -> dict[str, Any]:
        """For uvicorn."""
        found: dict[str, Any] = {"ssl_certfile": str(self._cert), "ssl_keyfile": str(self._key)}
        if self._client_ca is not None:
            found |= {"ssl_ca_certs": str(self._client_ca), "ssl_cert_reqs": ssl.CERT_REQUIRED}
        return found

    async def watch(self, context: ssl.SSLContext) -> None:
        """Look at the files for ever, and give new connections of ``context`` a certificate that has changed. If it
        cannot be used, the earlier one stays."""
        while True:
            await asyncio.sleep(_WATCH_SECONDS)
            try:
                # In a context of its own: a failure half way leaves the other one as it is.
                if await asyncio.to_thread(self._check_changed):
                    # In the loop's thread, which makes the connections: one that began between certificate and key
                    # would have only one of them.
                    self._load(context)
                    logger.info("the certificate was read again")
            except (ConfigError, OSError, ValueError) as error:
                logger.warning("the certificate stays as it was: %s", error)

    def _check_changed(self) -> bool:
        """Whether the files were changed since the last look.

        Raises:
            ConfigError: they were, and cannot be used.
        """
        if (now := self._signatures()) == self._seen:
            return False
        self._seen = now
        self._check()
        return True

    def _signatures(self) -> tuple[object, object]:
        return signature(str(self._cert)), signature(str(self._key))

    def _check(self) -> None:
        try:
            self._load(ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER))
        except (OSError, ValueError) as error:
            raise ConfigError(
                f"server.tls_cert={self._cert} and server.tls_key={self._key} cannot be used: {error}; give a "
                "certificate (chain) and its key without a password, both in PEM"
            ) from error

    def _load(self, context: ssl.SSLContext) -> None:
        # A password: a key that needs one would ask for it on the terminal.
        context.load_cert_chain(self._cert, self._key, password=lambda: "")
