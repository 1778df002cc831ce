"""``infer.stages=auto``: all accelerators of this machine in order, and the host last if their memory does not hold the
weights. Torch-free."""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from evener.errors import ConfigError
from evener.plugins.choose import choose, requested_backend
from evener.plugins.discover import installed_catalog
from evener.plugins.probe import ProbeOutcome, ProbeRun

log = logging.getLogger("evener.config")
#: Share of the accelerators' memory that weights may take; the rest is for state, workspace and the runtime. A stage on
#: the host is many times slower, so one is taken only if there is little hope without.
_SHARE = 0.9
_WEIGHTS = ("*.safetensors", "*.bin", "*.gguf")

_Keys = dict[str, Any]


def settle_keys(top: _Keys, infer: _Keys) -> tuple[_Keys, _Keys]:
    """The keys of a configuration that names stages, and of its section ``infer``: with their number, and with devices
    in place of ``auto``. If one stage is enough, it is a run without stages.

    Raises:
        ConfigError: ``auto`` with a backend, beside names, or with more stages than there are devices.
        PluginError: a backend's hardware is here, but its probe failed; or no backend can run here.
    """
    stages = infer["stages"]
    if "auto" not in stages:
        return top, {"pp_size": len(stages), **infer}
    asked, source = requested_backend(top.get("backend"))
    if len(stages) > 1 or asked:
        other = f"leave out {source}" if asked else f"it stands alone, not in {','.join(stages)}"
        raise ConfigError(f"infer.stages=auto takes the devices that are here: {other}")
    found, why = _devices(top["model"], infer.get("tp_size", 1), top.get("load"))
    wanted = infer.get("pp_size", len(found))
    if wanted > len(found):
        raise ConfigError(f"infer.stages=auto finds devices for {len(found)} stages ({','.join(found)}), but "
                          f"infer.pp_size={wanted}; leave it out, or name each stage")  # fmt: skip
    found = found[:wanted]
    log.info("infer.stages=auto: %s (%s)", ",".join(found), why)
    if len(found) == 1:
        return {**top, "backend": found[0].partition(":")[0]}, {**infer, "stages": (), "pp_size": 1}
    return top, {**infer, "stages": found, "pp_size": len(found)}


def _devices(model: str | os.PathLike[str], tp_size: int, load: str | None) -> tuple[tuple[str, ...], str]:
    """As in ``infer.stages``, with ``tp_size`` devices for each stage; and why the host is one of them, or not.

    Raises:
        ConfigError: there are not enough devices, or the model, a hub's id for example, is not here.
    """
    catalog = installed_catalog()
    probed = ProbeRun.start(catalog.backends).result()
    failed = any(probe.hardware_seen and probe.error is not None for probe in probed.values())
    able = [probe for probe in probed.values() if probe.result is not None and probe.result.score > 0]
    hosts = {package.name for package in catalog.backends if "host" in package.descriptor.serves}
    chips = [probe for probe in able if probe.package.name not in hosts]
    if failed or not chips:
        return (choose(catalog, probes=probed).backend.name,), "no accelerator is here"
    stages, memory, known = list[str](), 0, True
    for probe in chips:
        assert probe.result is not None, "those that answered"
        devices = probe.result.devices
        for at in range(0, len(devices) - tp_size + 1, tp_size):
            stages.append(f"{probe.package.name}:{devices[at].index}")
            memory += sum(each.memory for each in devices[at : at + tp_size])
            known = known and all(each.memory for each in devices[at : at + tp_size])
    if not stages:
        raise ConfigError(f"infer.stages=auto: no backend has infer.tp_size={tp_size} devices here; lower it")
    folder = Path(model).expanduser()
    if not folder.exists() and load != "dummy":
        raise ConfigError("infer.stages=auto compares the size of the weights with the accelerators' memory, but "
                          f"{model} is not on this machine: give the folder of the model, or name the stages, as in "
                          f"infer.stages={','.join(stages)}")  # fmt: skip
    weights = _weight_bytes(folder)
    sizes = f"the weights take {weights / 2**30:.1f} GiB, the accelerators have {memory / 2**30:.1f} GiB"
    if known and weights > _SHARE * memory and (host := _best([each for each in able if each.package.name in hosts])):
        return (*stages, host), sizes
    return tuple(stages), sizes


def _best(probes: Sequence[ProbeOutcome]) -> str | None:
    scores: Mapping[str, int] = {each.package.name: each.result.score for each in probes if each.result is not None}
    return max(scores, key=lambda name: scores[name], default=None)


def _weight_bytes(model: Path) -> int:
    """Bytes of a model's weight files; 0 if it has none, as with random weights."""
    files = [model] if model.is_file() else [each for pattern in _WEIGHTS for each in model.glob(pattern)]
    return sum(each.stat().st_size for each in files)
