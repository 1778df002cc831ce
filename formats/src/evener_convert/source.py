"""The model that is converted, and what each file of the result holds."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NoReturn

import importlib_metadata

from evener.backend_search import BackendSearch
from evener.config.checkpoint import facts_of
from evener.config.resolve import layer_partition
from evener.config.schema import Config
from evener.contracts.architecture import Architecture
from evener.contracts.checkpoint import Checkpoint
from evener.contracts.communicator import Communicator, CommunicatorCapabilities
from evener.contracts.conversion.views import ViewRequest
from evener.contracts.quant import QuantScheme
from evener.distributed.world import World
from evener.errors import ArchitectureError, ConfigError, EngineError
from evener.layers.builder import Builder
from evener.loading.checkpoint import open_checkpoint
from evener.loading.match import check_match
from evener.loading.views import view_checkpoint
from evener.plugins.discover import installed_catalog
from evener_convert.merged import MergedPart
from evener_convert.merging import MergedPieces, merge
from evener_convert.pieces import Piece, rank_pieces, whole_pieces
from evener_convert.split import INDEX, rank_file

#: Bytes of the largest weight file of an unsplit result; a single tensor may be larger.
FILE_BYTES = 5_000_000_000
#: Bytes at the beginning and at the end of a weight file that its fingerprint reads.
_SAMPLE = 1 << 16


@dataclass(frozen=True)
class Source:
    """An opened model.

    Attributes:
        checkpoint: as it will be stored: quantized, if ``quant`` says so.
        family: its class.
        scheme: reads ``checkpoint``.
        merge: whether the parts of a weight are stored together.
    """

    config: Config
    checkpoint: Checkpoint
    family: type[Architecture]
    scheme: QuantScheme
    merge: bool = False


def open_source(config: Config, merged: bool = False) -> Source:
    """Open the model of ``config`` and compare its tensors with those that its class declares. ``merged``: as
    ``Source.merge``.

    Raises:
        EvenerError: it cannot be read, or not be quantized in this way.
    """
    path = Path(config.model).expanduser()
    if (path / INDEX).is_file():
        raise ConfigError(f"{path} was split for ranks already; convert the original model")
    if config.infer.tp_size % config.infer.ep_size:
        raise ConfigError(f"infer.ep_size={config.infer.ep_size} divides experts among the infer.tp_size ranks of a "
                          "layer; set infer.tp_size to a multiple of it")  # fmt: skip
    checkpoint = open_checkpoint(path)
    loaded = BackendSearch(config.backend).load(config.options)
    target = loaded.architectures.get(checkpoint.architecture)
    if target is None:
        raise ArchitectureError(
            f"{path} is a {checkpoint.architecture}, which no installed package registers; type `evener models` for "
            "what is installed"
        )
    family: type[Architecture] = target.load()
    schemes = [provided.value for provided in loaded.quant_schemes()]
    length = facts_of(config.model, checkpoint.config, family.max_positions).max_positions or 2
    checkpoint, scheme = view_checkpoint(
        ViewRequest(checkpoint, family, schemes, min(length, 4096), config.quant, config.weight_map, config.options)
    )
    source = Source(config, checkpoint, family, scheme, merged)
    build = declare(source, World())
    check_match(build.weights, checkpoint.headers, scheme, [build], str(path))
    return source


def declare(source: Source, world: World) -> Builder:
    """What the rank ``world`` declares of the model."""
    infer, headers, scheme = source.config.infer, source.checkpoint.headers, source.scheme
    made: Callable[..., Builder] = Builder
    if infer.ep_size > 1 and world.size > 1:
        divided = installed_catalog().need("placement of experts", "ranks", "infer.ep_size", "evener-offload")
        made = divided(infer.ep_size)
    build = made(
        "bfloat16", 2, lambda name: scheme.part(name, headers), _Planned(world) if world.tp_size > 1 else None,
        stage=(world.pp_rank, world.pp_size), partition=layer_partition(infer) if world.pp_size > 1 else (),
    )  # fmt: skip
    source.family(source.checkpoint.config, build)
    if world.pp_size > 1 and not build.staged:
        raise ArchitectureError(f"{source.family.__name__} has no pipeline stages; set infer.pp_size=1")
    return build


@dataclass(frozen=True)
class PlannedFile:
    """A weight file of the result: its name, its pieces, and the parts of its merged tensors."""

    name: str
    pieces: Sequence[Piece]
    parts: Mapping[str, Sequence[MergedPart]] = field(default_factory=dict)


def files(source: Source) -> Iterator[PlannedFile]:
    """The weight files."""
    infer, checkpoint, scheme = source.config.infer, source.checkpoint, source.scheme
    size = infer.tp_size * infer.pp_size
    for rank in range(size):
        world = World.of(rank, infer.tp_size, infer.pp_size)
        weights = declare(source, world).weights if size > 1 or source.merge else ()
        pieces = list(rank_pieces(weights, checkpoint, scheme) if size > 1 else whole_pieces(checkpoint))
        merged = merge(pieces, weights, checkpoint, scheme) if source.merge else MergedPieces(pieces, {})
        if size > 1:
            yield PlannedFile(rank_file(world), merged.pieces, merged.parts)
            continue
        for name, group in shared_out(merged.pieces):
            held = {tensor for piece in group for tensor in piece.stored}
            yield PlannedFile(name, group, {tensor: p for tensor, p in merged.parts.items() if tensor in held})


def shared_out(pieces: Iterable[Piece], stem: str = "model") -> Iterator[tuple[str, Sequence[Piece]]]:
    """``pieces`` in files of at most ``FILE_BYTES`` whose names begin with ``stem``."""
    groups: list[list[Piece]] = [[]]
    held = 0
    for piece in pieces:
        nbytes = sum(each.nbytes for each in piece.stored.values())
        if groups[-1] and held + nbytes > FILE_BYTES:
            groups.append([])
            held = 0
        groups[-1].append(piece)
        held += nbytes
    for number, group in enumerate(groups, start=1):
        single = len(groups) == 1
        yield f"{stem}.safetensors" if single else f"{stem}-{number:05}-of-{len(groups):05}.safetensors", group


def fingerprint(path: Path) -> str:
    """Identifies the bytes of a model without reading all of them: of each file its name and size, of text files the
    bytes, of weight files the time of their last change and their beginning and end."""
    found = hashlib.sha256()
    for file in sorted(path.iterdir()) if path.is_dir() else [path]:
        if not file.is_file():
            continue
        status = file.stat()
        found.update(f"{file.name}\0{status.st_size}\0".encode())
        with file.open("rb") as data:
            if status.st_size <= 1 << 20:
                found.update(data.read())
                continue
            found.update(f"{status.st_mtime_ns}\0".encode() + data.read(_SAMPLE))
            data.seek(-_SAMPLE, 2)
            found.update(data.read(_SAMPLE))
    return found.hexdigest()


def description(source: Source) -> dict[str, Any]:
    """What ``evener_convert.json`` says, and what a conversion that is continued must have in common."""
    config, infer = source.config, source.config.infer
    packages = ("evener", "evener-formats", "evener-models")
    return {
        "source": str(Path(config.model).expanduser().resolve()),
        "fingerprint": fingerprint(Path(config.model).expanduser()),
        "options": {
            "quant": config.quant, "infer.tp_size": infer.tp_size, "infer.pp_size": infer.pp_size,
            "infer.ep_size": infer.ep_size, "infer.pp_layer_partition": list(infer.pp_layer_partition),
            "weight_map": config.weight_map, **({"merge": True} if source.merge else {}),
            **{f"{name}.{key}": value for name, each in config.options.items() for key, value in each.items()},
        },
        "versions": {name: importlib_metadata.version(name) for name in packages},
    }  # fmt: skip


class _Planned(Communicator):
    """Stands for one rank while converting; gives the part of the model that this rank holds."""

    def __init__(self, world: World) -> None:
        self.name, self.rank, self.size = "tp", world.tp_rank, world.tp_size
        self.capabilities = CommunicatorCapabilities()

    def _absent(self, *_: Any, **__: Any) -> NoReturn:
        raise EngineError("a conversion declares ranks and runs none")

    all_reduce = all_gather = reduce_scatter = all_to_all = broadcast = send = receive = barrier = _absent
