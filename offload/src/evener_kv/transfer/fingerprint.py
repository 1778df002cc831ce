"""What two servers, or two runs of one, must have in common so that one may go on with the other's state.

The same model: of each of its files the size, and bytes of its beginning, its end and places between, with the options
that change weights. The same state: kinds, shapes, dtypes, scales, tokens of a block, and the same ranks. Backend and
device may differ. Not seen: weights that differ only between the places that are read.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path

import msgspec

from evener.config.schema import Config
from evener.engine.facts.worker_facts import WorkerFacts
from evener.errors import ConfigError
from evener_kv.transfer.messages import VERSION

#: Of each file: this many places, and bytes of each.
_PLACES, _BYTES = 17, 64 << 10
_MOST_FILES = 10_000
#: Files that change what a model computes. Texts and pictures beside it do not.
_ENDINGS = frozenset({".safetensors", ".gguf", ".bin", ".pt", ".pth"})


def fingerprint(config: Config, facts: WorkerFacts) -> str:
    """64 hexadecimal digits."""
    infer = config.infer
    same = {
        "version": VERSION, "block_size": facts.block_size, "specs": [asdict(spec) for spec in facts.specs],
        "dtype": facts.info.dtype, "load": config.load, "seed": config.seed if config.load == "dummy" else 0,
        "quant": config.quant, "ranks": (infer.tp_size, infer.pp_size), "layers": infer.pp_layer_partition,
        "chosen": infer.layers,
        "snapshots": infer.snapshot_every, "index_topk": infer.index_topk,
        "max_seq_len": facts.max_seq_len,  # rotary angles may follow from it
    }  # fmt: skip
    digest = hashlib.sha256(msgspec.json.encode(same, order="sorted"))
    for text in filter(None, (facts.info.model, config.weight_map, infer.kv_scales)):
        digest.update(b"\n")
        for path in _files(Path(text)):
            _add(digest, path)
    return digest.hexdigest()


def _files(path: Path) -> Iterator[Path]:
    """The model's files, ordered by name.

    Raises:
        ConfigError: there are none.
    """
    if not path.exists():
        raise ConfigError(f"the KV cache is told apart by the model's files, and {path} is none; give a folder or file")
    if path.is_file():
        yield path
    else:
        names = sorted(each for each in path.iterdir() if each.is_file())[:_MOST_FILES]
        yield from (each for each in names if each.suffix in _ENDINGS or each.name == "config.json")


def _add(digest: hashlib._Hash, path: Path) -> None:
    size = path.stat().st_size
    digest.update(f"{path.suffix} {size}\n".encode())
    with path.open("rb") as file:
        for place in range(_PLACES):
            file.seek(max(0, size - _BYTES) * place // (_PLACES - 1))
            digest.update(file.read(_BYTES))
