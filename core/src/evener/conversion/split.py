"""Checkpoints that were split: one weight file for each rank, with only what that rank reads. Torch-free.

The folder has the text files of a model, ``evener_split.json``, and ``rank-00000-of-00004.safetensors`` and so on,
numbered as ``World`` numbers ranks. A tensor keeps its name. Of a tensor of which the rank reads spans along one axis,
the file has these spans, one after another; so a declared weight reads the whole tensor, or its span of those.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from functools import cached_property
from pathlib import Path
from typing import Any, TypeVar

from evener.config.schema import Config
from evener.contracts.checkpoint import Checkpoint, Headers, WeightFile
from evener.contracts.declared import Declared, LinearWeight, Slice, Span, Weight
from evener.distributed.world import World
from evener.errors import CheckpointError, ConfigError
from evener.layers.builder import Builder
from evener.loading.checkpoint import FolderCheckpoint, open_checkpoint
from evener.loading.safetensors_files import SafetensorsFile

INDEX, VERSION = "evener_split.json", 1
T = TypeVar("T")


def rank_file(world: World) -> str:
    """Name of the file with the weights of a rank."""
    return f"rank-{world.rank:05}-of-{world.size:05}.safetensors"


def open_part(config: Config, world: World) -> Checkpoint:
    """The model of ``config``: if it was split, what the rank reads, else all of it.

    Raises:
        CheckpointError: it does not exist, or is broken.
        ConfigError: it was split for another number of ranks.
    """
    path = Path(config.model).expanduser()
    if not (path / INDEX).is_file() or config.load == "dummy":
        return open_checkpoint(path)
    made = FolderCheckpoint(path).json(INDEX)
    wanted = {"version": VERSION, "tp_size": world.tp_size, "pp_size": world.pp_size}
    if made.get("version") != VERSION:
        raise CheckpointError(f"{path / INDEX} has version {made.get('version')!r}, not {VERSION}; convert it again")
    if any(made.get(key) != value for key, value in wanted.items()):
        raise ConfigError(
            f"{path} was split for infer.tp_size={made.get('tp_size')} infer.pp_size={made.get('pp_size')}; set these, "
            "or convert the original model for this number of ranks"
        )
    partition = list(config.infer.pp_layer_partition)
    if made.get("pp_layer_partition") != partition:
        raise ConfigError(
            f"{path} was split with infer.pp_layer_partition={','.join(made.get('pp_layer_partition') or []) or 'none'}"
            "; set the same, or convert the original model"
        )
    return SplitCheckpoint(path, rank_file(world))


class SplitCheckpoint(FolderCheckpoint):
    """A folder of which one file is read.

    Raises:
        CheckpointError: the folder or its ``config.json`` is missing.
    """

    def __init__(self, path: Path, file: str) -> None:
        super().__init__(path)
        self._file = file

    @cached_property
    def _files(self) -> Mapping[str, WeightFile]:
        if not (self.path / self._file).is_file():
            raise CheckpointError(f"{self.path} lacks {self._file}; convert the original model again")
        file = SafetensorsFile(self.path / self._file)
        return dict.fromkeys(file.headers, file)


def as_stored(checkpoint: Checkpoint, headers: Headers, declared: tuple[Builder, T]) -> tuple[Builder, T]:
    """``declared``, a builder and its model; if the checkpoint is one rank's part, weights read it and not slices of
    whole tensors. ``headers``: of the checkpoint; empty for random weights."""
    build, model = declared
    if headers and (checkpoint.path / INDEX).is_file():
        spans = spans_read(build.weights)
        for item in build.weights:
            if isinstance(item, (Weight, LinearWeight)):
                local = tuple(_local(name, cut, spans) for name, cut in named_pieces(item))
                item.slices = local if any(local) else ()
    return build, model


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


def split_index(config: Config) -> str:
    """The text of ``evener_split.json``."""
    infer = config.infer
    index: dict[str, Any] = {
        "version": VERSION, "tp_size": infer.tp_size, "pp_size": infer.pp_size,
        "pp_layer_partition": list(infer.pp_layer_partition),
    }  # fmt: skip
    return json.dumps(index, indent=2) + "\n"
