"""From ``auto`` to values: a new frozen object, with the reason for each value.

Nothing is written back into ``Config``. Values that only the engine knows (the block size, the memory left after
warm-up) are added with ``ResolvedConfig.with_value``, which returns a new object.
"""

from __future__ import annotations

import dataclasses
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

from evener.config.checkpoint import ModelFacts
from evener.config.cpu_cores import usable_cores
from evener.config.schema import Auto, Config, InferConfig, key_specs, to_flat
from evener.errors import ConfigError

if TYPE_CHECKING:
    from evener.contracts.device import Device
    from evener.key_spec import KeySpec

GIB = 2**30
#: Values for ``auto``: (with host memory, with device memory).
_MAX_REQS, _MAX_SEQ_LEN = (64, 256), (32_768, 131_072)
_STEP_TOKENS = (2048, 8192)
#: Rows of logits that a step of few requests with drafts may have.
_DRAFTED_ROWS = 128


@dataclass(frozen=True, kw_only=True)
class DeviceFacts:
    """Facts about the chosen device.

    Attributes:
        backend: name of its backend.
        name: the device's name.
        dtypes: compute dtypes with native kernels.
        emulated: compute dtypes that give correct results slowly.
        host_memory: tensors live in host memory.
        graphs: steps can be captured.
        free: bytes that can still be allocated; of host memory, this rank's share.
        local: ranks of this run on this machine; they share its cores.
    """

    backend: str
    name: str
    dtypes: frozenset[str]
    emulated: frozenset[str] = frozenset()
    host_memory: bool = False
    graphs: bool = False
    free: int = 0
    local: int = 1

    @classmethod
    def of(cls, device: Device, backend: str, local: int = 1) -> DeviceFacts:
        """The facts of an opened device; ``local`` ranks run on its machine."""
        can = device.capabilities
        free = device.memory().free // (local if can.host_memory else 1)
        return cls(
            backend=backend, name=device.name, dtypes=can.dtypes, emulated=can.emulated, host_memory=can.host_memory,
            graphs=can.graphs, free=free, local=local,
        )  # fmt: skip


@dataclass(frozen=True)
class ResolvedValue:
    """The value that a run uses for one key, and the reason for it. A sequence is a list."""

    value: Any
    reason: str


@dataclass(frozen=True, kw_only=True)
class ResolvedConfig:
    """What this run uses.

    Attributes:
        config: what was asked for; keys without a field below are used from there.
        dtype: the compute dtype, torch's name.
        max_reqs: requests that run at the same time.
        max_seq_len: tokens of one request.
        step_tokens: tokens in one step.
        block_size: tokens in one block; "auto" until the engine has asked the state providers.
        kv_memory: bytes for state; None until the engine has measured what is left.
        depth: plans in flight.
        use_cuda_graph: whether steps are captured.
        threads: host threads for computation.
        executor: where the workers run.
        backend: name of the chosen backend.
        served_model_name: the model's name in the API.
        reasons: the reason for a value, by key.
    """

    config: Config
    dtype: str
    max_reqs: int
    max_seq_len: int
    step_tokens: int
    block_size: int | Auto
    kv_memory: int | None
    depth: int
    use_cuda_graph: bool
    threads: int
    executor: Literal["inline", "process"]
    backend: str
    served_model_name: str
    reasons: Mapping[str, str] = field(default_factory=dict)

    @property
    def max_samples(self) -> int:
        """Rows that a step may sample: one for each request, and drafts; for all of few requests, else for some."""
        drafts = self.config.infer.draft_tokens if self.config.infer.proposes != "none" else 0
        return max(self.max_reqs + drafts, min(self.max_reqs * (1 + drafts), _DRAFTED_ROWS))

    def with_value(self, key: str, value: Any, reason: str) -> ResolvedConfig:
        """A copy with ``key`` (as in ``"infer.block_size"``) set to ``value``, and ``reason`` as its reason."""
        name = key.rpartition(".")[2]
        changes: dict[str, Any] = {name: value, "reasons": {**self.reasons, key: reason}}
        return dataclasses.replace(self, **changes)

    def values(self) -> dict[str, ResolvedValue]:
        """Every key with its value and reason, in the order of the documents; a secret's value is ``(hidden)``."""
        specs = key_specs()
        return {key: self._value(key, specs.get(key), asked) for key, asked in to_flat(self.config).items()}

    def _value(self, key: str, spec: KeySpec | None, asked: Any) -> ResolvedValue:
        reason = self.reasons.get(key) or ("the default" if spec and asked == spec.default else "as asked")
        if spec and spec.secret and asked:
            return ResolvedValue("(hidden)", reason)
        value = vars(self).get(key.rpartition(".")[2], asked) if spec else asked
        return ResolvedValue(list(value) if isinstance(value, tuple) else value, reason)


def resolve_config(config: Config, model: ModelFacts, device: DeviceFacts, serving: bool = False) -> ResolvedConfig:
    """Turn every ``auto`` of ``config`` into a value for this checkpoint on this device.

    Args:
        serving: whether this is a server; its worker gets a process of its own.

    Raises:
        ConfigError: this checkpoint or device does not support a value; the message says what to change.
    """
    infer, reasons = config.infer, {}
    dtype, reasons["dtype"] = _dtype(config.dtype, model, device)
    max_seq_len, reasons["infer.max_seq_len"] = _max_seq_len(infer.max_seq_len, model, device)
    graph, reasons["infer.use_cuda_graph"] = _graph(infer.use_cuda_graph, device)
    kv_memory, reasons["infer.kv_memory"] = _kv_memory(infer.kv_memory, device)
    cores, why = usable_cores() if infer.threads == "auto" else (infer.threads, "as asked")
    if device.local > 1 and infer.threads == "auto":
        cores, why = max(1, cores // device.local), f"{why}, shared by {device.local} ranks"
    reasons["infer.threads"] = why
    max_reqs, reasons["infer.max_reqs"] = _sized(infer.max_reqs, _MAX_REQS, device)
    step_tokens, reasons["infer.step_tokens"] = _sized(infer.step_tokens, _STEP_TOKENS, device)
    if infer.depth == "auto":
        reasons["infer.depth"] = "one is computed, one is read" if infer.pp_size == 1 else "one more than stages"
    if infer.block_size == "auto":
        reasons["infer.block_size"] = "the engine takes a size that every state provider supports"
    reasons["backend"] = "as asked" if config.backend else f"chosen: {device.name}"
    if infer.stages:
        reasons |= {"infer.pp_size": "one for each of infer.stages", "backend": "of its stage, see infer.stages"}
    apart = uses_worker_processes(config, serving)
    if config.executor == "auto":
        who = "a server's worker" if serving else "each of several ranks"
        reasons["executor"] = f"{who} gets its own process" if apart else "one device needs one process"
    served = config.serve.served_model_name
    if served is None:
        reasons["serve.served_model_name"] = "the folder's name"
    return ResolvedConfig(
        config=config,
        dtype=dtype,
        max_reqs=max_reqs,
        max_seq_len=max_seq_len,
        step_tokens=step_tokens,
        block_size=infer.block_size,
        kv_memory=kv_memory,
        depth=plans_in_flight(config),
        use_cuda_graph=graph,
        threads=cores,
        executor="process" if apart else "inline",
        backend=device.backend,
        served_model_name=served or os.path.basename(os.path.abspath(config.model)),
        reasons=reasons,
    )


def _sized(asked: int | Auto, pair: tuple[int, int], device: DeviceFacts) -> tuple[int, str]:
    if asked != "auto":
        return asked, "as asked"
    return (pair[0], "for host memory") if device.host_memory else (pair[1], "for device memory")


def plans_in_flight(config: Config) -> int:
    """How many plans are in flight at a time."""
    return config.infer.pp_size + 1 if config.infer.depth == "auto" else config.infer.depth


def layer_partition(infer: InferConfig) -> tuple[int, ...]:
    """Number of layers of each pipeline stage, if given; else empty, for equal numbers.

    Raises:
        ConfigError: they are not numbers.
    """
    asked = () if infer.pp_layer_partition == ("equal",) else infer.pp_layer_partition
    if not all(each.isdigit() for each in asked):
        raise ConfigError(f"infer.pp_layer_partition={','.join(asked)} is not a list of numbers; write it as in 15,16")
    return tuple(map(int, asked))


def layer_numbers(key: str, given: Sequence[str]) -> tuple[int, ...]:
    """Ascending numbers of layers, from what ``key`` says, such as ("3-20", "40").

    Raises:
        ConfigError: one is no number and no range.
    """
    found: set[int] = set()
    for each in given:
        match = re.fullmatch(r"(\d{1,5})(?:-(\d{1,5}))?", each, re.ASCII)
        first, last = (int(match[1]), int(match[2] or match[1])) if match else (1, 0)
        if first > last:
            raise ConfigError(f"{key}={','.join(given)}: {each!r} is no layer and no range of layers; write them as in "
                              "3-20,40")  # fmt: skip
        found.update(range(first, last + 1))
    return tuple(sorted(found))


def uses_worker_processes(config: Config, serving: bool) -> bool:
    """Whether each worker gets its own process."""
    ranks = config.infer.tp_size * config.infer.pp_size
    return config.executor == "process" or (config.executor == "auto" and (serving or ranks > 1))


def _dtype(asked: str, model: ModelFacts, device: DeviceFacts) -> tuple[str, str]:
    usable = device.dtypes | device.emulated
    if asked != "auto":
        if asked not in usable:
            raise ConfigError(
                f"dtype={asked} is not supported on {device.name}, which has {', '.join(sorted(usable))}: "
                "leave dtype out, or set one of these"
            )
        return asked, "as asked" + (", emulated on this device" if asked in device.emulated else "")
    wanted = model.dtype or "float32"
    origin = "the checkpoint's own" if model.dtype else "the checkpoint has none, which means float32"
    if wanted in usable:
        return wanted, origin + (", emulated on this device" if wanted in device.emulated else "")
    # float32 loses nothing; between the 16-bit types range or precision is lost.
    instead = next((name for name in ("float32", "bfloat16", "float16") if name in usable), None)
    if instead is None:
        raise ConfigError(
            f"{device.name} supports none of float32, bfloat16 and float16; choose another backend with --backend"
        )
    return instead, f"the checkpoint is {wanted}, which this device does not support"


def _max_seq_len(asked: int | Auto, model: ModelFacts, device: DeviceFacts) -> tuple[int, str]:
    positions = model.max_positions
    if asked != "auto":
        if positions is not None and asked > positions:
            raise ConfigError(
                f"infer.max_seq_len={asked} is more than the checkpoint's {positions} positions "
                f"(max_position_embeddings or a similar key in its config.json); set at most {positions}"
            )
        return asked, "as asked"
    if positions is None:
        raise ConfigError(f"{model.path}/config.json has no max_position_embeddings; set infer.max_seq_len=TOKENS")
    cap, trained = _sized("auto", _MAX_SEQ_LEN, device)[0], model.trained_positions or positions
    if trained > cap:
        return cap, f"limited to save memory; the checkpoint allows {positions}: infer.max_seq_len={positions}"
    if trained < positions:
        return trained, f"the checkpoint's length of training; it allows {positions}: infer.max_seq_len={positions}"
    return positions, "max_position_embeddings of the checkpoint"


def _graph(asked: bool | Auto, device: DeviceFacts) -> tuple[bool, str]:
    if asked is True and not device.graphs:
        raise ConfigError(f"infer.use_cuda_graph=true, but {device.name} cannot capture steps; leave it out")
    if asked == "auto":
        return device.graphs, "the device can" if device.graphs else "the device cannot"
    return asked, "as asked"


def _kv_memory(asked: int | float | Auto, device: DeviceFacts) -> tuple[int | None, str]:
    free = f"{device.free / GIB:.1f} GiB of free memory"
    if isinstance(asked, float):
        return int(asked * device.free), f"{asked:g} of the {free}"
    if asked != "auto":
        return asked, "as asked"
    if not device.host_memory:
        return None, "what is left after warm-up"
    share = int(0.4 * device.free)
    return (share, f"40 % of the {free}") if share < 4 * GIB else (4 * GIB, f"4 GiB, less than 40 % of the {free}")
