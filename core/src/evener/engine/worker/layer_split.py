"""The layers of stages on unlike devices, divided by a package that measures how long each takes for a layer."""

from __future__ import annotations

from dataclasses import replace

from evener.backend_search import BackendSearch
from evener.config.schema import Config
from evener.config.stages import has_unlike_stages
from evener.distributed.world import RankGroups, RankPlacement
from evener.engine.worker.assembly import Assembly, assemble
from evener.errors import ConfigError
from evener.plugins.discover import installed_catalog


def assemble_split(
    config: Config, search: BackendSearch, serving: bool = False, ranks: RankGroups | RankPlacement | None = None
) -> Assembly:
    """As ``assemble``. The layers of stages on unlike devices are divided by measurement, unless
    ``infer.pp_layer_partition`` is set, or the checkpoint was split for some stages.

    Raises:
        ConfigError: no installed package measures them.
    """
    a = assemble(config, search, serving, ranks)
    count = max(build.held.stop for build in (a.build, *a.other_stages))
    if not has_unlike_stages(config) or a.config.config.infer.pp_layer_partition or count < 3:
        return a
    splitters = installed_catalog().lazy_imports("layer splitter")
    if not splitters:
        raise ConfigError("dividing layers among unlike devices by measurement needs a package that is not installed; "
                          "type: pip install evener-inspection, or set infer.pp_layer_partition=equal")  # fmt: skip
    partition: tuple[int, ...] = splitters[min(splitters)].load()(config, search, a)
    infer = replace(config.infer, pp_layer_partition=tuple(map(str, partition)))
    a = assemble(replace(config, infer=infer), search, serving, a.ranks)
    reasons = {**a.config.reasons, "infer.pp_layer_partition": "by the time of a layer on each device, and its memory"}
    return replace(a, config=replace(a.config, reasons=reasons))
