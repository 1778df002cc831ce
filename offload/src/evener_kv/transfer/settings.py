"""What the operator has set for transfers: ``offload.kv_transfer`` and the keys beside it."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from evener.config.schema import Config
from evener.errors import ConfigError
from evener_offload import descriptor

#: A shared key: fewer bytes can be guessed, and more are a wrong file.
_SHORTEST_KEY, _LONGEST_KEY = 16, 4096


@dataclass(frozen=True)
class Address:
    """Where a server's controller listens; its rank r listens on the port behind it plus r."""

    host: str
    port: int

    @classmethod
    def parse(cls, text: str) -> Address | None:
        """``HOST:PORT``, or ``[HOST]:PORT`` for IPv6; None: it is something else."""
        host, colon, port = text.strip().rpartition(":")
        host = host[1:-1] if host.startswith("[") and host.endswith("]") else host
        if not (colon and host and port.isascii() and port.isdecimal() and len(port) <= 5 and 0 < int(port) < 65_536):
            return None
        return cls(host, int(port))

    def of_rank(self, rank: int) -> tuple[str, int]:
        """Where a rank listens."""
        return self.host, self.port + 1 + rank


@dataclass(frozen=True)
class TransferSettings:
    """Attributes:
    own: where this server listens; peers: those that it may connect to.
    key: the shared key.
    seconds: the most that a request waits for blocks of a peer.
    hold_seconds: how long blocks of a request are held for the server that goes on with it.
    nbytes: of host memory on each rank for blocks that arrive.
    """

    own: Address
    peers: frozenset[Address]
    key: bytes
    seconds: float
    hold_seconds: float
    nbytes: int

    @classmethod
    def of(cls, config: Config) -> TransferSettings:
        """Raises:
        ConfigError: a value cannot be used, or the key cannot be read.
        """
        defaults = {name: option.default for name, option in descriptor.options.items()}
        options = {**defaults, **config.options["offload"]}
        own = Address.parse(options["kv_transfer"])
        if own is None or own.host in ("0.0.0.0", "::", "*"):
            raise ConfigError(f"offload.kv_transfer={options['kv_transfer']!r}: give the HOST:PORT under which the "
                              "other servers reach this one, as in 10.0.0.1:21100")  # fmt: skip
        peers = set()
        for text in filter(None, (part.strip() for part in (options["kv_peers"] or "").split(","))):
            peer = Address.parse(text)
            if peer is None:
                raise ConfigError(f"offload.kv_peers has {text!r}: give HOST:PORT, several with commas between them")
            peers.add(peer)
        for name in ("kv_transfer_seconds", "kv_hold_seconds", "kv_landing_bytes"):
            if not options[name] > 0:
                raise ConfigError(f"offload.{name}={options[name]} must be more than 0")
        return cls(own, frozenset(peers), _read_key(options["kv_key_file"]), options["kv_transfer_seconds"],
                   options["kv_hold_seconds"], options["kv_landing_bytes"])  # fmt: skip


def _read_key(path: str | None) -> bytes:
    if path is None:
        raise ConfigError("offload.kv_transfer needs a key that all its servers share: write one with `openssl rand "
                          "-hex 32 > FILE`, and set offload.kv_key_file=FILE")  # fmt: skip
    try:
        with Path(path).open("rb") as file:
            key = file.read(_LONGEST_KEY + 1).strip()
    except OSError as error:
        raise ConfigError(f"offload.kv_key_file={path} cannot be read: {error}; give a text file") from error
    if not _SHORTEST_KEY <= len(key) <= _LONGEST_KEY:
        raise ConfigError(f"offload.kv_key_file={path} must have {_SHORTEST_KEY} to {_LONGEST_KEY} bytes; write one "
                          "with `openssl rand -hex 32`")  # fmt: skip
    return key
