"""All matrices of one layer, quantized, and what the checkpoint stores for them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

import torch

from evener.contracts.declared import LinearWeight, StackedWeight
from evener.errors import EngineError
from evener_quantize.awq import clips
from evener_quantize.chosen import Chosen
from evener_quantize.folded import fold_scales, query_and_key_rows
from evener_quantize.folded_experts import fold_down, fold_norms, keys_before
from evener_quantize.gptq import gptq
from evener_quantize.observed import Inputs, Key
from evener_quantize.rounding import Grid, Rounded, nearest
from evener_quantize.settings import Settings
from evener_quantize.stage import Stage
from evener_quantize.written import tensors_of


@dataclass(frozen=True)
class LayerMaker:
    """Quantizes layers by one method."""

    settings: Settings
    chosen: Chosen

    @property
    def grid(self) -> Grid:
        """The codes of the format."""
        s = self.settings
        return Grid(s.bits, s.symmetric, least_zero=1 if s.method == "gptq" else 0)

    @property
    def _folds(self) -> bool:
        return self.settings.method == "awq" and not self.settings.nearest

    def batches(self, stage: Stage, most: int) -> Iterator[dict[Key, int]]:
        """The matrices of a layer whose inputs are remembered at the same time, and the columns of each; what is
        remembered takes ``most`` bytes if no unit needs more. Scales of channels reach from one matrix into another:
        all matrices but those of experts are one unit then, and so are those of one expert."""
        keys = self._keys(stage)
        if not self._folds:
            yield from _batches([{key: columns} for key, columns in keys.items()], most)
            return
        if first := {key: n for key, n in keys.items() if key[1] < 0} | keys_before(stage, self.chosen):
            yield first
        units: dict[int, dict[Key, int]] = {}
        for (name, expert), columns in keys.items():
            if expert >= 0:
                units.setdefault(expert, {})[name, expert] = columns
        yield from _batches(units.values(), most)

    def _keys(self, stage: Stage) -> dict[Key, int]:
        found: dict[Key, int] = {}
        for weight in filter(self.chosen.has, stage.linear):
            experts = range(weight.experts) if weight.experts else (-1,)
            found |= {(weight.name, expert): weight.columns for expert in experts}
        return found

    def fold(self, stage: Stage, seen: Mapping[Key, Inputs]) -> dict[str, torch.Tensor]:
        """Scale channels, if the method does; returns the tensors, but those of matrices, that are stored otherwise."""
        if not self._folds:
            return {}
        changed = fold_norms(stage, seen, self.grid, self.chosen)
        changed |= fold_scales(stage, seen, self.grid, self.chosen)
        fold_down(stage, seen, self.grid, self.chosen)
        return changed

    def quantize(self, stage: Stage, seen: Mapping[Key, Inputs]) -> dict[str, torch.Tensor]:
        """Quantize the matrices of which inputs were ``seen``; the stage computes with the result.

        Raises:
            EngineError: a weight or an input is NaN or infinite.
        """
        made: dict[str, torch.Tensor] = {}
        unclipped = query_and_key_rows(stage)
        for weight in filter(self.chosen.has, stage.linear):
            numbers = [n for (name, n), inputs in seen.items() if name == weight.name and inputs.remembered]
            if not numbers:
                continue
            assert weight.value is not None, "the stage is loaded"
            data = weight.value.data.clone() if weight.experts else weight.value.data
            for expert in numbers:
                values = (data[expert] if weight.experts else data).float()
                if not bool(values.isfinite().all()):
                    raise EngineError(f"NaN or infinite somewhere: {weight.name}; fetch or convert the model again")
                rounded = self._rounded(weight, values, seen[weight.name, expert], unclipped)
                if weight.experts:
                    data[expert] = rounded.values()
                else:
                    data = rounded.values()
                for name, rows in _parts(weight, expert):
                    made |= tensors_of(name, rounded.rows(rows.start, rows.stop), self.settings)
            stage.replace(weight, data)
        stage.bind()
        return made

    def _rounded(
        self, weight: LinearWeight, values: torch.Tensor, inputs: Inputs, unclipped: Mapping[str, int]
    ) -> Rounded:
        group, grid = self.chosen.group_of(weight.columns), self.grid
        if self.settings.nearest or not inputs.count:
            return nearest(values, grid, group)
        gram = inputs.gram / inputs.count
        if self.settings.method == "gptq":
            return gptq(values, gram, grid, group, self.settings.order)
        clip = clips(values, gram, grid, group)
        # Queries and keys are multiplied with each other, so their errors are not those of a sum: left as they are.
        free = unclipped.get(weight.name, 0)
        clip[:free] = values.view(len(values), -1, group)[:free].abs().amax(-1)
        return nearest(values, grid, group, clip)


def _parts(weight: LinearWeight, expert: int) -> Iterator[tuple[str, range]]:
    """Names of the stored tensors of one matrix, with their rows."""
    at = 0
    for part in weight.parts:
        name = part.name.format(expert) if isinstance(weight, StackedWeight) else part.name
        yield name, range(at, at + part.rows)
        at += part.rows


def _batches(units: Iterable[Mapping[Key, int]], most: int) -> Iterator[dict[Key, int]]:
    """Units together, if what is remembered of their inputs fits in ``most`` bytes."""
    batch: dict[Key, int] = {}
    held = 0
    for unit in units:
        nbytes = sum(4 * columns * columns for columns in unit.values())
        if batch and held + nbytes > most:
            yield batch
            batch, held = {}, 0
        batch |= unit
        held += nbytes
    if batch:
        yield batch
