"""Pipeline stages on unlike devices: what ``infer.stages`` says about the backend and the device of each rank."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Collection, Sequence

from evener.config.packages import installed_descriptors
from evener.config.schema import Config
from evener.errors import ConfigError, did_you_mean
from evener.plugins.discover import installed_catalog


@dataclasses.dataclass(frozen=True)
class StageDevice:
    """Where a pipeline stage runs: its backend, and the index of its first device; None: the next one."""

    backend: str
    index: int | None


def stage_devices(config: Config, installed: Collection[str] | None = None) -> tuple[StageDevice, ...]:
    """The device of each stage of ``infer.stages``, which is set.

    Args:
        installed: names of the installed backends; None: not checked.

    Raises:
        ConfigError: there is not one for each stage, one cannot be read, names a backend that is not installed, or has
            the device of another.
    """
    infer, found = config.infer, []
    asked = f"infer.stages={','.join(infer.stages)}"
    if config.backend is not None:
        raise ConfigError(f"{asked} names the backend of each stage, so leave out backend={config.backend}")
    if len(infer.stages) < 2:
        raise ConfigError(f"{asked} names one stage; leave it out, and set backend={infer.stages[0]}")
    if len(infer.stages) != infer.pp_size:
        raise ConfigError(f"{asked} names {len(infer.stages)} stages, but infer.pp_size={infer.pp_size}; leave "
                          "infer.pp_size out")  # fmt: skip
    for each in infer.stages:
        backend, colon, index = each.partition(":")
        if not backend or (colon and not (index.isascii() and index.isdigit() and len(index) < 5)):
            raise ConfigError(f"{asked}: {each!r} is not a backend, or a backend and a device as in cpu:0")
        if installed is not None and backend not in installed:
            raise ConfigError(f"{asked}: no backend {backend!r} is installed{did_you_mean(backend, installed)}")
        found.append(StageDevice(backend, int(index) if colon else None))
    indexed = {stage.backend for stage in found if stage.index is not None}
    if mixed := [stage.backend for stage in found if stage.index is None and stage.backend in indexed]:
        raise ConfigError(f"{asked}: give each stage of {mixed[0]} the index of a device, or none of them")
    _check_devices(asked, found, infer.tp_size)
    return tuple(found)


def _check_devices(asked: str, stages: Sequence[StageDevice], tp_size: int) -> None:
    """Raises:
    ConfigError: two stages share a device, and it is not host memory's.
    """
    taken = [(each.backend, each.index + at) for each in stages if each.index is not None for at in range(tp_size)]
    twice = [device for device, count in Counter(taken).items() if count > 1]
    hosts = {each.name for each in installed_descriptors() if "host" in each.serves} if twice else set()
    for backend, index in twice:
        if backend not in hosts:
            ranks = f" (a stage takes {tp_size} devices, infer.tp_size)" if tp_size > 1 else ""
            raise ConfigError(f"{asked} gives {backend}:{index} to two stages{ranks}; name another device for one")


def check_stages(config: Config) -> None:
    """Raises:
    ConfigError: as ``stage_devices``, also for a backend that is not installed.
    """
    stage_devices(config, [package.name for package in installed_catalog().backends])


def config_of_stage(config: Config, stage: int) -> Config:
    """The configuration of one stage's workers: its backend, and no options of packages that only other stages use."""
    stages = stage_devices(config)
    mine, backends = stages[stage].backend, {each.backend for each in stages}
    found = installed_descriptors() if config.options else ()
    serves = {each.name: each.serves for each in found if each.name in backends}

    def uses(backend: str, name: str) -> bool:
        needs = [each.needs for each in found if each.name == name]
        return name == backend or (name not in backends and all(need <= serves.get(backend, set()) for need in needs))

    options = {name: values for name, values in config.options.items()
               if uses(mine, name) or not any(uses(each, name) for each in backends)}  # fmt: skip
    return dataclasses.replace(config, backend=mine, options=options)


def device_of_rank(config: Config, rank: int, local_rank: int, local_size: int) -> tuple[int, int]:
    """The index of a rank's device, and how many ranks of its machine share its backend.

    Args:
        local_rank: its index among the ``local_size`` ranks of its machine, which have consecutive ranks.
    """
    stages, tp_size = stage_devices(config), config.infer.tp_size
    mine, first = stages[rank // tp_size], rank - local_rank
    alike = [r for r in range(first, first + local_size) if stages[r // tp_size].backend == mine.backend]
    return alike.index(rank) if mine.index is None else mine.index + rank % tp_size, len(alike)
