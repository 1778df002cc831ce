"""Checkpoints that were split: one weight file for each rank, with only what that rank reads. Torch-free.

The folder has the text files of a model, ``evener_split.json``, and ``rank-00000-of-00004.safetensors`` and so on,
numbered as ``World`` numbers ranks. A tensor keeps its name. Of a tensor of which the rank reads spans along one axis,
the file has these spans, one after another; so a declared weight reads the whole tensor, or its span of those.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

from evener.config.resolve import layer_partition
from evener.config.schema import Config
from evener.contracts.checkpoint import Checkpoint, WeightFile
from evener.contracts.conversion.views import CheckpointView, ViewRequest
from evener.contracts.declared import Declared, LinearWeight, Slice, Span, StackedWeight, Weight
from evener.distributed.world import World
from evener.errors import CheckpointError, ConfigError
from evener.loading.checkpoint import FolderCheckpoint
from evener_formats.safetensors_files import SafetensorsFile

INDEX, VERSION = "evener_split.json", 1


def rank_file(world: World) -> str:
    """Name of the file with the weights of a rank."""
    return f"rank-{world.rank:05}-of-{world.size:05}.safetensors"


class SplitCheckpoint(CheckpointView):
    """What one rank reads of a folder that was split."""

    changes = "files"

    @classmethod
    def of(cls, request: ViewRequest) -> SplitCheckpoint | None:
        """The rank's part, if the folder was split.

        Raises:
            CheckpointError: the folder is of another version, or broken.
            ConfigError: it was split for another number of ranks.
        """
        path, (tp_rank, tp_size), (pp_rank, pp_size) = request.checkpoint.path, request.tp, request.stage
        if request.checkpoint.text(INDEX) is None:
            return None
        made = request.checkpoint.json(INDEX)
        if made.get("version") != VERSION:
            found = made.get("version")
            raise CheckpointError(f"{path / INDEX} has version {found!r}, not {VERSION}; convert it again")
        sizes = {"tp_size": tp_size, "pp_size": pp_size, "ep_size": request.ep_size}
        split = {key: made.get(key, 1 if key == "ep_size" else None) for key in sizes}
        if split != sizes:
            shown = ("tp_size", "pp_size", *(["ep_size"] if split["ep_size"] != request.ep_size else []))
            asked = " ".join(f"infer.{key}={split[key]}" for key in shown)
            raise ConfigError(
                f"{path} was split for {asked}; set these, or convert the original model for this number of ranks"
            )
        partition = made.get("pp_layer_partition")
        if not isinstance(partition, list) or not all(isinstance(each, str) for each in partition):
            raise CheckpointError(
                f"{path / INDEX}: pp_layer_partition {partition!r} is no list of numbers; convert it again"
            )
        if partition != [str(each) for each in request.partition]:
            raise ConfigError(
                f"{path} was split with infer.pp_layer_partition={','.join(partition) or 'none'}; set the same, "
                "or convert the original model"
            )
        world = World(tp_rank, tp_size, pp_rank, pp_size, pp_rank * tp_size + tp_rank, tp_size * pp_size)
        return cls(_RankFolder(path, rank_file(world)))

    @classmethod
    def partition(cls, checkpoint: Checkpoint) -> Sequence[int] | None:
        if checkpoint.text(INDEX) is None:
            return None
        found = checkpoint.json(INDEX).get("pp_layer_partition")
        if not isinstance(found, list) or not all(isinstance(each, str) and each.isdigit() for each in found):
            return None  # ``of`` says what is wrong
        return [int(each) for each in found]

    def reslice(self, weights: Sequence[Declared]) -> None:
        spans = spans_read(weights)
        for item in weights:
            if isinstance(item, (Weight, LinearWeight)):
                local = tuple(_local(name, cut, spans) for name, cut in named_pieces(item))
                if isinstance(item, Weight) and item.shapes:
                    kept = zip(item.shapes, item.pieces(), strict=True)
                    item.shapes = tuple(_kept(shape, spans[name]) for shape, (name, _) in kept)
                item.slices = local if any(local) else ()
                if isinstance(item, StackedWeight) and all("{}" not in part.name for part in item.parts):
                    item.held = Span(0, 0, 0)  # the file has the stacks of this rank's experts only


class _RankFolder(FolderCheckpoint):
    """A folder of which one weight file is read."""

    def __init__(self, path: Path, file: str) -> None:
        super().__init__(path)
        self._file = file

    @cached_property
    def _files(self) -> Mapping[str, WeightFile]:
        if not (self.path / self._file).is_file():
            raise CheckpointError(f"{self.path} lacks {self._file}; convert the original model again")
        file = SafetensorsFile(self.path / self._file)
        return dict.fromkeys(file.headers, file)


def named_pieces(item: Declared) -> Iterator[tuple[str, Slice | None]]:
    """The names that an item reads (with ``{}`` for an expert's number), and which slice of each."""
    if isinstance(item, Weight):
        yield from item.pieces()
    elif isinstance(item, LinearWeight):
        yield from ((part.name, cut) for part, cut in item.pieces())


def spans_read(weights: Iterable[Declared]) -> Mapping[str, tuple[Slice, ...]]:
    """For each name that a rank reads, its slices in order; empty if it needs the whole tensor."""
    found: dict[str, tuple[Slice, ...]] = {}
    whole: set[str] = set()
    for item in weights:
        for name, cut in named_pieces(item):
            slices = found.setdefault(name, ())
            if cut is None or any(other.axis != cut.axis for other in slices):
                whole.add(name)
            elif cut not in slices:
                found[name] = (*slices, cut)
    return {name: () if name in whole else slices for name, slices in found.items()}


def _local(name: str, cut: Slice | None, spans: Mapping[str, tuple[Slice, ...]]) -> Slice | None:
    slices = spans[name]
    if cut is None or not slices:
        return cut
    if len(slices) == 1:
        return None
    before = sum(each.span.size for each in slices[: slices.index(cut)])
    whole = sum(each.span.size for each in slices)
    return Slice(cut.axis, Span(before, before + cut.span.size, whole))


def _kept(shape: tuple[int, ...], slices: Sequence[Slice]) -> tuple[int, ...]:
    """The shape of a tensor of which these slices were kept."""
    if not slices:
        return shape
    axis = slices[0].axis
    return (*shape[:axis], sum(each.span.size for each in slices), *shape[axis + 1 :])


def split_index(config: Config) -> str:
    """The text of ``evener_split.json``."""
    infer = config.infer
    index: dict[str, Any] = {
        "version": VERSION, "tp_size": infer.tp_size, "pp_size": infer.pp_size,
        "pp_layer_partition": list(map(str, layer_partition(infer))), "ep_size": infer.ep_size,
    }  # fmt: skip
    return json.dumps(index, indent=2) + "\n"
