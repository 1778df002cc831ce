"""Which matrices of a model are quantized, and what the result stores for them."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from evener_convert.matrices import model_matrices
from evener_convert.source import Source, declare

from evener.contracts.checkpoint import Headers
from evener.contracts.conversion.quantizer import Matrix
from evener.contracts.declared import LinearWeight, StackedWeight
from evener.distributed.world import World
from evener.errors import ConfigError
from evener.layers.builder import Builder
from evener.loading.scheme import Unquantized
from evener_formats.quantize.rules import NONE, Rules
from evener_quantize.settings import GROUPS, Settings
from evener_quantize.written import headers_of, quantization_config, rows_unit


@dataclass(frozen=True)
class Chosen:
    """The matrices that are quantized.

    Attributes:
        names: of the stored tensors that are replaced.
        group: columns of a group; 0: whole rows.
        layers: number of the model's layers.
        headers: of what is stored in their place.
        config: ``quantization_config`` of the result.
    """

    names: frozenset[str]
    group: int
    layers: int
    headers: Headers
    config: Mapping[str, Any]

    def has(self, weight: LinearWeight) -> bool:
        """Whether a linear weight, all of its parts, is quantized."""
        return all(name in self.names for name in stored_names(weight))

    def group_of(self, columns: int) -> int:
        """Columns of a group of a matrix with so many columns."""
        return self.group or columns


def stored_names(weight: LinearWeight) -> list[str]:
    """Names of its matrices in the checkpoint: part after part, and of a stack all experts of each."""
    return list(weight.stored_parts()) if isinstance(weight, StackedWeight) else [part.name for part in weight.parts]


def choose(source: Source, settings: Settings) -> Chosen:
    """What is quantized of a model: all matrices of its layers but routers, unless a rule keeps them.

    Raises:
        ConfigError: the model is quantized already or cannot be run layer by layer, its experts are stored in stacks,
            nothing fits, or ``--group`` does not divide the columns.
    """
    config, headers, where = source.checkpoint.config, source.checkpoint.headers, source.config.model
    if not Unquantized().detect(config):
        raise ConfigError(f"{where} is quantized already; give the unquantized model")
    build = declare(source, World())
    if not build.staged:
        raise ConfigError(
            f"{source.family.__name__} cannot be run layer by layer; quantize it without a text, as in `evener convert "
            "SRC DST quant=int4`"
        )
    rules = Rules((source.config.options.get("formats") or {}).get("quant_rules") or "", ())
    matrices = model_matrices(source.family, config, headers, 2).found
    rules.check_used(list(matrices.values()))
    linear = list(_in_layers(source, build))
    _refuse_stacks(where, linear, headers)
    wanted = [w for w in linear if all(_wanted(matrices.get(name), rules, settings) for name in stored_names(w))]
    group = _group(wanted, settings)
    taken = [w for w in wanted if not group or w.columns % group == 0]
    if not taken:
        raise ConfigError(
            f"{where} has no matrix that {settings.method} could store: rows in multiples of {rows_unit(settings)} and "
            f"columns of {group or GROUPS[-1]}; set another --group, or use `evener convert SRC DST quant=q8_0`"
        )
    replaced = frozenset(name for weight in taken for name in stored_names(weight))
    stored: dict[str, Any] = {}
    for weight in taken:
        for name in stored_names(weight):
            rows, columns = matrices[name].shape
            stored |= headers_of(name, rows, columns, group or columns, settings)
    kept = [name for name, each in matrices.items() if name not in replaced and each.kind not in ("head", "shared")]
    return Chosen(replaced, group, len(build.held), stored, quantization_config(settings, group, kept))


def _in_layers(source: Source, build: Builder) -> Iterator[LinearWeight]:
    """The linear weights of the layers that a text runs through; not those of an encoder of images."""
    prefixes: set[str] = set()
    if len(build.held) > 1:
        second = declare(source, World.of(1, 1, len(build.held)))
        found = (re.match(r"(.*?\.)1\.", each.name) for each in second.weights if isinstance(each, LinearWeight))
        prefixes = {match[1] for match in found if match}
    for item in build.weights:
        if isinstance(item, LinearWeight) and (not prefixes or item.name.startswith(tuple(prefixes))):
            yield item


def _wanted(matrix: Matrix | None, rules: Rules, settings: Settings) -> bool:
    if matrix is None or matrix.kind not in ("linear", "expert") or not matrix.name.endswith(".weight"):
        return False
    rows, columns = matrix.shape
    return rules.of(matrix.name) != NONE and rows % rows_unit(settings) == 0 and columns % GROUPS[-1] == 0


def _group(weights: Sequence[LinearWeight], settings: Settings) -> int:
    columns = sorted({weight.columns for weight in weights})
    if settings.group is None:
        return next((each for each in GROUPS if all(count % each == 0 for count in columns)), GROUPS[-1])
    odd = [count for count in columns if settings.group and count % settings.group]
    if odd:
        fit = [each for each in GROUPS if all(count % each == 0 for count in columns)]
        raise ConfigError(f"--group {settings.group} does not divide {odd[0]} columns; what fits: "
                          f"{', '.join(map(str, fit))}, or -1 for whole rows")  # fmt: skip
    return settings.group


def _refuse_stacks(where: str, weights: Sequence[LinearWeight], headers: Headers) -> None:
    for weight in weights:
        if weight.experts and any(len(headers.get(name, ("", ()))[1]) == 3 for name in stored_names(weight)):
            raise ConfigError(
                f"{where} stores the experts {weight.name} in one tensor, for which GPTQ and AWQ checkpoints have no "
                "form; use `evener convert SRC DST quant=int4`"
            )
