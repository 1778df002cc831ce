"""What stages on unlike devices agree on before they load weights, and how their layers are divided: by a package that
measures how long each takes for a layer."""

from __future__ import annotations

from dataclasses import replace

from evener.backend_search import BackendSearch
from evener.config.resolve import DeviceFacts, ResolvedConfig
from evener.config.schema import Config
from evener.contracts.communicator import CommunicatorFactory
from evener.contracts.device import Device
from evener.distributed.agreement import Agreement
from evener.distributed.world import RankGroups, RankPlacement
from evener.engine.worker.assembly import Assembly, assemble
from evener.errors import ConfigError
from evener.plugins.discover import installed_catalog
from evener_stages.host_groups import open_groups


def assemble_split(
    config: Config, search: BackendSearch, serving: bool = False, ranks: RankGroups | RankPlacement | None = None,
    measure: bool = True,
) -> Assembly:  # fmt: skip
    """As ``assemble``. The layers are divided by measurement, unless ``infer.pp_layer_partition`` is set, or the
    checkpoint was split for some stages.

    Args:
        measure: False: if an earlier start has not kept the times of layers on all stages, they stay divided equally.

    Raises:
        ConfigError: no installed package measures them.
    """
    a = assemble(config, search, serving, ranks)
    count = max(build.held.stop for build in (a.build, *a.other_stages))
    if a.config.config.infer.pp_layer_partition or count < 3:
        return a
    what, install = "dividing layers among unlike devices", "evener-inspection, or set infer.pp_layer_partition=equal"
    divide = installed_catalog().need("part of stages", "split", what, install)
    division = divide(config, search, a, measure)
    if division is None:
        return a
    infer = replace(config.infer, pp_layer_partition=tuple(map(str, division.partition)))
    a = assemble(replace(config, infer=infer), search, serving, a.ranks)
    reason = f"by the time of a layer on each device, and its memory: {'; '.join(division.lines)}"
    a.resolver.manifest.notes.append(f"layers are divided {reason}")
    return replace(a, config=replace(a.config, reasons={**a.config.reasons, "infer.pp_layer_partition": reason}))


def meet(
    place: RankGroups | RankPlacement, factory: CommunicatorFactory, device: Device, config: ResolvedConfig,
    facts: DeviceFacts,
) -> tuple[RankGroups, Agreement, ResolvedConfig]:  # fmt: skip
    """Open a rank's groups (``open_groups``), and settle what all stages use. Returns the groups, what stages settle
    more with, and the configuration.

    Args:
        config: as this stage would resolve it, with ``facts`` about its device.

    Raises:
        ConfigError: the devices have no compute dtype in common.
    """
    ranks = open_groups(place, factory, device)
    agreement = Agreement(ranks.pp)
    return ranks, agreement, agree(config, facts, agreement)


def agree(config: ResolvedConfig, device: DeviceFacts, agreement: Agreement) -> ResolvedConfig:
    """The configuration that all stages use: a compute dtype that every device has, and the smallest limits."""
    dtypes, limits = ("float32", "bfloat16", "float16"), ("max_reqs", "max_seq_len", "step_tokens")
    flags = [name in device.dtypes | device.emulated for name in dtypes]
    least = agreement.least([*(getattr(config, name) for name in limits), *flags])
    for name, value in zip(limits, least, strict=False):
        if value != getattr(config, name):
            config = config.with_value(f"infer.{name}", value, "the smallest of all stages")
    common = [name for name, everywhere in zip(dtypes, least[len(limits) :], strict=True) if everywhere]
    if not common:
        has = ", ".join(name for name, flag in zip(dtypes, flags, strict=True) if flag)
        raise ConfigError(f"{device.name} has {has}, but the devices of the other stages have none of these; name "
                          "others with infer.stages")  # fmt: skip
    if config.dtype not in common:
        config = config.with_value("dtype", common[0], f"the device of another stage does not have {config.dtype}")
    return config
