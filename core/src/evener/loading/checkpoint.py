"""A model folder: its configuration, and its tensors as files describe them. Imports torch only to read one."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from evener.errors import CheckpointError, did_you_mean
from evener.loading.header import MAX_HEADER, TensorEntry, read_header

if TYPE_CHECKING:
    import torch

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"


@dataclass(frozen=True, eq=False)
class Checkpoint:
    """A model folder, opened with ``Checkpoint.open``.

    Attributes:
        folder: where it lies.
        config: the parsed ``config.json``.
        generation_config: the parsed ``generation_config.json``; empty if there is none.
        entries: every stored tensor by name; empty if it was opened without weights.
    """

    folder: Path
    config: Mapping[str, Any]
    generation_config: Mapping[str, Any]
    entries: Mapping[str, TensorEntry]
    _files: dict[Path, Any] = field(default_factory=dict, repr=False)

    @classmethod
    def open(cls, folder: str | Path, weights: bool = True) -> Checkpoint:
        """Read a folder's configuration and, with ``weights``, the headers of its weight files.

        Raises:
            CheckpointError: the folder, ``config.json`` or (with ``weights``) weight files are missing or broken.
        """
        folder = Path(folder).expanduser()
        if not folder.is_dir():
            detail = (
                "it is a file; give the folder that holds it and its config.json"
                if folder.exists()
                else "it does not exist"
            )
            raise CheckpointError(f"cannot open the model folder {folder}: {detail}")
        config = _read_json(folder / "config.json")
        if config is None:
            there = (
                f" (it holds {_some(others)}, which evener does not read)" if (others := _other_weights(folder)) else ""
            )
            raise CheckpointError(f"{folder} has no config.json{there}; give a model folder as saved for transformers")
        generation = _read_json(folder / "generation_config.json") or {}
        return cls(folder, config, generation, _read_entries(folder) if weights else {})

    @property
    def architecture(self) -> str:
        """The name under which the model's class is registered: the first of ``architectures``.

        Raises:
            CheckpointError: ``config.json`` names none.
        """
        names = self.config.get("architectures")
        if not isinstance(names, list) or not names or not isinstance(names[0], str):
            raise CheckpointError(
                f"{self.folder / 'config.json'} does not name an architecture; add the model's class, e.g. "
                '"architectures": ["LlamaForCausalLM"]'
            )
        return names[0]

    @cached_property
    def headers(self) -> Mapping[str, tuple[str, tuple[int, ...]]]:
        """``{tensor: (dtype, shape)}``, as quantization schemes read it."""
        return {name: (entry.dtype, entry.shape) for name, entry in self.entries.items()}

    @property
    def nbytes(self) -> int:
        """Bytes of all stored tensors."""
        return sum(entry.nbytes for entry in self.entries.values())

    @property
    def dtype(self) -> str | None:
        """The element type that ``config.json`` names, else the one of most stored bytes; None without either."""
        named = self.config.get("dtype", self.config.get("torch_dtype"))
        if isinstance(named, str):
            return named.removeprefix("torch.")
        count: Counter[str] = Counter()
        for entry in self.entries.values():
            count[entry.dtype] += entry.nbytes
        return count.most_common(1)[0][0] if count else None

    def tensor(self, name: str) -> torch.Tensor:
        """The tensor called ``name``, memory-mapped: no memory beyond the page cache. Do not write into it.

        Raises:
            CheckpointError: there is none of that name, or the file cannot be mapped.
        """
        entry = self.entries.get(name)
        if entry is None:
            raise CheckpointError(f"{self.folder} has no tensor {name!r}{did_you_mean(name, self.entries)}")
        from safetensors import SafetensorError, safe_open

        try:
            if entry.file not in self._files:
                self._files[entry.file] = safe_open(entry.file, framework="pt")
            tensor: torch.Tensor = self._files[entry.file].get_tensor(name)
        except (SafetensorError, OSError) as error:
            raise CheckpointError(f"cannot read {name!r} from {entry.file}: {error}; fetch the file again") from error
        return tensor

    def close(self) -> None:
        """Let go of the files. Tensors that were handed out stay valid."""
        self._files.clear()


def _read_json(path: Path) -> dict[str, Any] | None:
    """The object in a JSON file; None if there is no such file."""
    try:
        if path.stat().st_size > MAX_HEADER:
            raise CheckpointError(
                f"{path} has {path.stat().st_size:,} bytes, which is no configuration; fetch the file again"
            )
        value = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None
    except (OSError, ValueError, RecursionError) as error:
        raise CheckpointError(f"cannot read {path}: {error or type(error).__name__}; fetch the file again") from error
    if not isinstance(value, dict):
        raise CheckpointError(f"{path} holds a JSON {type(value).__name__}, not an object; fetch the file again")
    return value


def _read_entries(folder: Path) -> dict[str, TensorEntry]:
    # The order in which transformers looks, so that a folder with both loads the same weights.
    if (folder / SINGLE).exists():
        return read_header(folder / SINGLE)
    index = _read_json(folder / INDEX)
    if index is None:
        raise CheckpointError(_no_weights(folder))
    return _read_shards(folder, index)


def _read_shards(folder: Path, index: Mapping[str, Any]) -> dict[str, TensorEntry]:
    where = index.get("weight_map")
    if not isinstance(where, dict) or not where:
        raise CheckpointError(f"{folder / INDEX} has no weight_map; fetch the file again")
    # Names are judged as text: a hub's cache links each file of a folder to a blob elsewhere, and that is fine.
    for name in where.values():
        if (
            not isinstance(name, str)
            or not name.endswith(".safetensors")
            or set(name) & set("/\\\0")
            or name.startswith(".")
        ):
            raise CheckpointError(
                f"{folder / INDEX} names the weight file {str(name)[:120]!r}; "
                "only *.safetensors files of the same folder are read"
            )
    files = sorted(set(where.values()))
    missing = [name for name in files if not (folder / name).is_file()]
    if missing:
        raise CheckpointError(
            f"{folder} lacks {len(missing)} of the {len(files)} weight files that {INDEX} names: "
            f"{_some(missing)}; fetch them"
        )
    entries: dict[str, TensorEntry] = {}
    for name in files:
        for tensor, entry in read_header(folder / name).items():
            if tensor in entries:
                raise CheckpointError(
                    f"{tensor!r} is both in {entries[tensor].file.name} and in {name} of {folder}; "
                    "remove the file that is not part of this checkpoint"
                )
            entries[tensor] = entry
    lost = [t for t, name in where.items() if t not in entries or entries[t].file.name != name]
    if lost:
        raise CheckpointError(
            f"{folder / INDEX} names {len(lost)} tensors that are not in the file it names: "
            f"{_some(lost)}; fetch the folder again"
        )
    return entries


def _no_weights(folder: Path) -> str:
    if others := _other_weights(folder):
        return (
            f"{folder} has no {SINGLE} or {INDEX}, only {_some(others)}, which evener does not read; save the model as "
            "safetensors (transformers' save_pretrained does), or use load=dummy for random weights"
        )
    return (
        f"{folder} has no weights: neither {SINGLE} nor {INDEX}; put them there, or use load=dummy for random weights"
    )


def _other_weights(folder: Path) -> list[str]:
    endings = (".bin", ".gguf", ".pth", ".pt", ".safetensors", ".npz")
    return sorted(path.name for path in folder.iterdir() if path.suffix in endings)


def _some(names: list[str], limit: int = 10) -> str:
    return ", ".join(names[:limit]) + (f", … ({len(names)} in all)" if len(names) > limit else "")
