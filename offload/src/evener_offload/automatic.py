"""How many bytes of experts do not fit the device's memory. Keys that are ``auto`` are computed from this."""

from __future__ import annotations

from evener.distributed.agreement import Agreement
from evener.engine.worker.assembly import Assembly
from evener.engine.worker.memory import memory_demand
from evener.errors import ConfigError

#: The plan uses this share of the free memory, because libraries take some. State (the KV cache) should have at least
#: the second share of the planned memory, if the requests can use so much.
_PLANNED, _STATE = 0.95, 0.15


def lacking_bytes(a: Assembly, key: str) -> int:
    """Bytes that the device of ``a`` lacks to hold all weights, experts included, and a fair share of state. 0 or less:
    nothing is lacking.

    Args:
        key: the key that is ``auto``, for the error.

    Raises:
        ConfigError: there are several pipeline stages.
    """
    if a.ranks.world.pp_size > 1:
        raise ConfigError(f"{key}=auto is not implemented for several stages (infer.pp_size); set a number")
    demand, free = memory_demand(a, a.config), int(_PLANNED * a.device.memory().free)
    share = int(_STATE * free) if a.config.kv_memory is None else a.config.kv_memory
    state = max(demand.least_state, min(share, (demand.max_useful_blocks + 1) * demand.block_bytes))
    return demand.fixed + state - free


def agreed(a: Assembly) -> Agreement:
    """Lets the ranks that share the layers settle on one number."""
    return Agreement(a.ranks.tp, a.device.torch_device)
