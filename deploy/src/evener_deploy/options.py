"""What the command line of ``evener deploy`` says of a deployment."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from evener.config.schema import Config
from evener.errors import ConfigError


@dataclass(frozen=True, kw_only=True)
class DeployOptions:
    """One deployment.

    Attributes:
        words: what each ``evener serve`` gets.
        host, port: the address of all.
        replicas: servers at the start, and at least.
        max_replicas: servers at most; equal to ``replicas``: their number stays.
        target: running requests of a replica above which more replicas are started.
        spread: by how many running requests two replicas may differ before prompts go to the less busy one although
            the other knows their beginning.
        resources: what Ray reserves for a replica, by Ray's names: CPU, GPU, or those of other devices.
        environ: variables of the replicas.
        start_timeout: seconds until a replica's server must be ready; 0: no limit.
        grow_after: seconds for which replicas must have more than ``target`` before another is started.
        shrink_after: seconds for which fewer replicas must be enough before one is ended.
        drain_timeout: seconds that running requests of a replica that is ended may continue.
    """

    words: tuple[str, ...]
    host: str
    port: int
    replicas: int = 1
    max_replicas: int = 1
    target: int = 32
    spread: int = 16
    resources: Mapping[str, float] = field(default_factory=dict)
    environ: Mapping[str, str] = field(default_factory=dict)
    start_timeout: float = 3600.0
    grow_after: float = 30.0
    shrink_after: float = 600.0
    drain_timeout: float = 300.0


#: Keys that name something of which a machine has one, with the way out.
_ALONE: Mapping[str, str] = {
    "kv_events": "Ray's router follows prompts itself",
    "kv_events_replay": "Ray's router follows prompts itself",
    "tls_cert": "put a proxy with the certificate before the address",
    "tls_key": "put a proxy with the certificate before the address",
    "tls_client_ca": "put a proxy with the certificate before the address",
    "root_path": "put the path into the proxy before the address",
    "weights_folder": "start the deployment again with other weights",
    "lora_folder": "name adapters at the start, with infer.lora_modules",
}


def check_keys(config: Config) -> None:
    """Raises:
    ConfigError: a key is for one server only.
    """
    own = config.options.get("server", {})
    for name, way in _ALONE.items():
        if own.get(name):
            raise ConfigError(f"server.{name} is for one server, and evener deploy starts several; leave it out: {way}")


def read_resources(text: str) -> dict[str, float]:
    """``GPU=2,CPU=4`` as a mapping.

    Raises:
        ConfigError: it is something else.
    """
    found: dict[str, float] = {}
    for part in filter(None, (part.strip() for part in text.split(","))):
        name, _, amount = part.partition("=")
        try:
            found[name.strip()] = float(amount)
        except ValueError:
            found[name.strip()] = -1.0
        if not name.strip() or not 0 <= found[name.strip()] < 1e6:
            raise ConfigError(f"--resources has {part!r}; give NAME=AMOUNT, as in GPU=2,CPU=4")
    return found
