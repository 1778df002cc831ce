"""Which layers' experts are in host memory: reads ``infer.cpu_layer_num`` and ``infer.host_experts``. Does not import
torch."""

from __future__ import annotations

import re
from collections.abc import Sequence

from evener.config.resolve import layer_numbers
from evener.config.schema import InferConfig
from evener.errors import ConfigError


def layer_number(path: str) -> int:
    """The number of a layer, from the path of a call site: the last number in it, 3 in ``model.layers.3.mlp``."""
    return int(re.findall(r"\d+", path)[-1])


def chosen_layers(infer: InferConfig, having: Sequence[int]) -> tuple[int, ...]:
    """Numbers of the layers whose experts are in host memory; all of ``having`` if only ``infer.resident_experts`` is
    set.

    Args:
        having: the layers that have experts, ascending.

    Raises:
        ConfigError: the model has no experts, or none in those layers; both keys are set; or a range cannot be read.
    """
    count, named, residents = infer.cpu_layer_num, infer.host_experts, infer.resident_experts
    key, value = ("host_experts", ",".join(named)) if named else ("cpu_layer_num", str(count))
    asked = f"infer.{key}={value}" if named or count else f"infer.resident_experts={residents}"
    if named and count:
        raise ConfigError(f"{asked} says which layers, so leave out infer.cpu_layer_num={count}")
    if not having:
        raise ConfigError(f"{asked}: the model has no experts; leave it out")
    if not named and not count:
        return tuple(having)
    if not named:
        assert isinstance(count, int), "auto is a number by now"
        if count > len(having):
            raise ConfigError(f"{asked}: the model has experts in {len(having)} layers; set at most {len(having)}")
        return tuple(having[len(having) - count :])
    found = layer_numbers("infer.host_experts", named)
    if other := [number for number in found if number not in having]:
        raise ConfigError(f"{asked}: layer {other[0]} has no experts; layers with experts: {ranges(having)}")
    return found


def ranges(layers: Sequence[int]) -> str:
    """Ascending numbers as ranges: ``3-20,40``."""
    runs: list[list[int]] = []
    for number in layers:
        if runs and number == runs[-1][-1] + 1:
            runs[-1].append(number)
        else:
            runs.append([number])
    return ",".join(str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs)
