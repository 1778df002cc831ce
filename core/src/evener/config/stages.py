"""Pipeline stages on unlike devices (``infer.stages``): an installed package says where each runs, see
``Descriptor.stage_parts``."""

from __future__ import annotations

from typing import Any

from evener.config.schema import Config
from evener.plugins.discover import installed_catalog


def has_unlike_stages(config: Config) -> bool:
    """Whether stages run on different backends."""
    return len({stage.partition(":")[0] for stage in config.infer.stages}) > 1


def stage_part(name: str) -> Any:
    """The part of that name.

    Raises:
        ConfigError: no installed package has it.
    """
    return installed_catalog().need("part of stages", name, "infer.stages", "evener-offload")


def config_of_stage(config: Config, stage: int) -> Config:
    """The configuration of one stage's workers: its backend, and no options of packages that only other stages use."""
    if config.backend is None and config.infer.stages:
        config = stage_part("config")(config, stage)
    return config


def device_of_rank(config: Config, rank: int, local_rank: int, local_size: int) -> tuple[int, int]:
    """The index of a rank's device, and how many ranks of its machine share its backend.

    Args:
        local_rank: its index among the ``local_size`` ranks of its machine, which have consecutive ranks.
    """
    place = local_rank, local_size
    if config.infer.stages:
        place = stage_part("device")(config, rank, *place)
    return place
