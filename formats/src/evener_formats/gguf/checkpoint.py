"""A GGUF file as a checkpoint, with the tensor names, shapes and text files that a model folder has. Tensors are
memory-mapped. Imports torch only to read a tensor."""

from __future__ import annotations

import fnmatch
import json
import logging
import re
import struct
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from evener.contracts.checkpoint import Checkpoint, Headers
from evener.errors import CheckpointError, did_you_mean
from evener_formats.gguf.families import FAMILIES, Llama, family_of_file
from evener_formats.gguf.header import MXFP4, UNPACKED, GgufHeader, GgufTensor, read_header
from evener_formats.gguf.made import Made, Mxfp4Matrix, UnpackedMatrix
from evener_formats.gguf.stored import folder_rows, memory_map
from evener_formats.read_ahead import FileRange, ReadAhead
from evener_formats.tokenizers.gguf_tokenizer import tokenizer_files
from evener_formats.tokenizers.tokenizer_json import MadeTokenizer

if TYPE_CHECKING:
    import torch

log = logging.getLogger(__name__)
#: Tensors of a model, each expert's counted. DeepSeek V3 has 45,000.
_MOST_TENSORS = 1 << 20
_PART = re.compile(r"(.*)-(\d{5})-of-(\d{5})\.gguf")


class GgufCheckpoint(Checkpoint, MadeTokenizer):
    """One GGUF file, or the first of several whose names end in ``-0000i-of-0000N.gguf``.

    Attributes:
        family: what the file's family calls its keys and tensors.

    Raises:
        CheckpointError: a file is broken, or its model family is not supported.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        header = read_header(path)
        parts = header.metadata.get("split.count", 1)
        self._header = header if parts in (0, 1) else _merge_split_files(path, header, parts)
        name, family = str(self._header.metadata.get("general.architecture")), family_of_file(self._header)
        if family is None:
            raise CheckpointError(
                f"{path} holds a model of architecture {name[:80]!r}, which is not supported in GGUF"
                f"{did_you_mean(name, FAMILIES)}; use the model's safetensors, or upgrade: "
                "pip install -U evener-models"
            )
        self.family: Llama = family(self._header, _read_floats)
        self._stored: dict[str, str] = {}
        self._entries: dict[str, GgufTensor] = {}
        self._made: dict[str, Made] = {}
        #: What was made last: a loader asks for a stack of experts once for each of them.
        self._last: tuple[Made, Mapping[str, torch.Tensor]] | None = None
        for name, entry in self._header.tensors.items():
            folder_name = self.family.name(name)
            if folder_name is not None:
                for one, part in self._matrices(folder_name, name, entry):
                    self._stored[one], self._entries[one] = name, part
        for one, part in [item for item in self._entries.items() if item[1].dtype in (MXFP4, *UNPACKED)]:
            del self._entries[one]
            make = Mxfp4Matrix if part.dtype == MXFP4 else UnpackedMatrix
            self._add(make(one, part, self.family.permuted_heads(self._stored.pop(one))))
        for made in self.family.made():
            self._add(made)
        unread = Counter(tensor.dtype for tensor in self._header.tensors.values() if tensor.dtype in UNPACKED)
        for kind, count in sorted(unread.items()):
            log.info("%s: %d tensors are dequantized from %s, which no kernel reads", path, count, kind)
        changed = (n for n, s in self._stored.items() if self._offset(n) or self.family.permuted_heads(s))
        self.copied = frozenset((*changed, *self._made))

    def _add(self, made: Made) -> None:
        for name in made.headers:
            if name in self._entries or name in self._made:
                raise CheckpointError(f"{self.path} has {name} as a whole and in parts; fetch the file again")
            self._made[name] = made

    def where(self, name: str) -> str:
        return f"{self.path} ({name})"

    def text(self, name: str) -> str | None:
        known = name == "config.json" or name in self._tokenizer_files
        return json.dumps(self.json(name), ensure_ascii=False) if known else None

    def json(self, name: str) -> dict[str, Any]:
        if name == "config.json":
            return self._config()
        return self._tokenizer_files[name]() if name in self._tokenizer_files else {}

    def names(self, pattern: str) -> Sequence[str]:
        return sorted(fnmatch.filter(("config.json", *self._tokenizer_files), pattern))

    @cached_property
    def _tokenizer_files(self) -> Mapping[str, Callable[[], dict[str, Any]]]:
        # Nothing here may name this object: only the garbage collector would free it, and a start runs without one.
        return tokenizer_files(self._header.metadata, str(self.path))

    def _config(self) -> dict[str, Any]:
        special = self.json("generation_config.json")
        return self.family.config() | {k: special[k] for k in ("bos_token_id", "eos_token_id") if k in special}

    @cached_property
    def headers(self) -> Headers:
        found = {name: (entry.dtype, entry.shape) for name, entry in self._entries.items()}
        return found | {name: made.headers[name] for name, made in self._made.items()}

    def tensor(self, name: str) -> torch.Tensor:
        if (made := self._made.get(name)) is not None:
            if self._last is None or self._last[0] is not made:
                self._last = None  # before the next: one stack of a large model has a gigabyte
                self._last = made, made.tensors()
            return self._last[1][name]
        if name not in self._stored:
            raise CheckpointError(f"{self.path} has no tensor {name!r}{did_you_mean(name, self.headers)}")
        stored = self._stored[name]
        self._ahead.used(stored)
        # Every row is stored as whole blocks, so rows can be permuted without dequantizing.
        tensor = folder_rows(memory_map(self._entries[name]), self.family.permuted_heads(stored))
        return tensor - self.family.norm_offset if self._offset(name) else tensor

    @cached_property
    def _ahead(self) -> ReadAhead:
        tensors = self._header.tensors
        return ReadAhead({name: FileRange(each.file, each.begin, each.end) for name, each in tensors.items()})

    def close(self) -> None:
        self._last = None
        if (ahead := self.__dict__.pop("_ahead", None)) is not None:
            ahead.close()

    def _matrices(self, folder_name: str, stored: str, entry: GgufTensor) -> Iterator[tuple[str, GgufTensor]]:
        """The tensor by its name in a folder; of a stack of experts each matrix."""
        if "{}" not in folder_name:
            yield folder_name, entry
            return
        count = self.family.expert_count()
        if len(entry.shape) != 3 or entry.shape[0] != count or len(self._entries) + count > _MOST_TENSORS:
            raise CheckpointError(
                f"{self.path}: {stored} is {entry.dtype} {list(entry.shape)}, and the file says that a layer has "
                f"{count} experts; fetch the file again"
            )
        size = (entry.end - entry.begin) // count
        for expert in range(count):
            begin = entry.begin + expert * size
            one = replace(entry, shape=entry.shape[1:], begin=begin, end=begin + size)
            yield folder_name.replace("{}", str(expert)), one

    def _offset(self, name: str) -> bool:
        return bool(self.family.norm_offset) and name.endswith("norm.weight")


def _merge_split_files(path: Path, first: GgufHeader, parts: Any) -> GgufHeader:
    """The header of the first file, with the tensors of all files."""
    named = _PART.fullmatch(path.name)
    if named is None or type(parts) is not int or int(named[2]) != 1 or int(named[3]) != parts:
        raise CheckpointError(
            f"{path} is one of {parts} files; open the first, whose name ends in -00001-of-{parts:05}.gguf"
        )
    tensors = dict(first.tensors)
    for number in range(2, parts + 1):
        part = path.with_name(f"{named[1]}-{number:05}-of-{parts:05}.gguf")
        if not part.is_file():
            raise CheckpointError(f"{path} is the first of {parts} files, and {part.name} is missing; fetch it")
        more = read_header(part).tensors
        if twice := tensors.keys() & more.keys():
            raise CheckpointError(f"the tensor {min(twice)!r} is in {part} and an earlier file; fetch the files again")
        tensors |= more
    return GgufHeader(first.metadata, tensors)


def _read_floats(entry: GgufTensor) -> list[float]:
    if entry.dtype != "float32" or entry.end - entry.begin > 1 << 16:
        raise CheckpointError(
            f"{entry.file}: rotary factors are {entry.dtype} {list(entry.shape)}; they must be float32 and at "
            "most 64 KiB; fetch the file again"
        )
    with entry.file.open("rb") as file:
        file.seek(entry.begin)
        data = file.read(entry.end - entry.begin)
    return list(struct.unpack(f"<{len(data) // 4}f", data))
