"""A model folder as transformers saves it: text files beside weights in safetensors or PyTorch files. Torch-free."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from evener.contracts.checkpoint import Checkpoint, Headers, ModelFiles
from evener.errors import CheckpointError, did_you_mean
from evener.loading.header import MAX_HEADER
from evener.loading.safetensors_files import SafetensorsFiles
from evener.loading.torch_files import TorchFiles

if TYPE_CHECKING:
    import torch


class WeightFiles(Protocol):
    """The weight files of one folder, all of one kind."""

    @property
    def headers(self) -> Headers:
        """As ``Checkpoint.headers``."""

    @property
    def copied(self) -> frozenset[str]:
        """As ``Checkpoint.copied``."""

    def tensor(self, name: str) -> torch.Tensor:
        """The tensor ``name``, which is in ``headers``."""

    def close(self) -> None:
        """Let go of the files."""


#: Kinds of weight files: the name of a single one, how further ones end, and who reads them. The first that is there is
#: taken, as transformers does, so that a folder with both loads the same weights.
KINDS = (("model.safetensors", ".safetensors", SafetensorsFiles), ("pytorch_model.bin", ".bin", TorchFiles))


class FolderFiles(ModelFiles):
    """The text files of a folder.

    Raises:
        CheckpointError: there is no such folder.
    """

    def __init__(self, path: Path) -> None:
        if not path.is_dir():
            raise CheckpointError(f"cannot open the model {path}: it does not exist; give a model folder or file")
        self.path = path

    def text(self, name: str) -> str | None:
        path = self.path / name
        try:
            if path.stat().st_size > MAX_HEADER:
                raise CheckpointError(
                    f"{path} has {path.stat().st_size:,} bytes, which is no configuration; fetch the file again"
                )
            return path.read_text(encoding="utf-8")
        except FileNotFoundError:
            return None
        except (OSError, UnicodeDecodeError) as error:
            raise CheckpointError(f"cannot read {path}: {error}; fetch the file again") from error

    def names(self, pattern: str) -> Sequence[str]:
        return sorted(str(path.relative_to(self.path)) for path in self.path.glob(pattern))


class FolderCheckpoint(FolderFiles, Checkpoint):
    """A folder with ``config.json`` and weights.

    Raises:
        CheckpointError: the folder or its ``config.json`` is missing.
    """

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        if not (path / "config.json").exists():
            raise CheckpointError(_no_config(path))

    @property
    def headers(self) -> Headers:
        return self._weights.headers

    @property
    def copied(self) -> frozenset[str]:  # type: ignore[override]  # known once the files are read
        return self._weights.copied

    def tensor(self, name: str) -> torch.Tensor:
        if name not in self.headers:
            raise CheckpointError(f"{self.path} has no tensor {name!r}{did_you_mean(name, self.headers)}")
        return self._weights.tensor(name)

    def close(self) -> None:
        if "_weights" in self.__dict__:
            self._weights.close()

    @cached_property
    def _weights(self) -> WeightFiles:
        for single, ending, reader in KINDS:
            if (self.path / single).exists():
                return reader({single: self.path / single}, None)
            name = f"{single}.index.json"
            if self.text(name) is not None:
                where = _weight_map(self.path / name, self.json(name), ending)
                return reader({file: self.path / file for file in sorted(set(where.values()))}, where)
        raise CheckpointError(_no_weights(self.path))


def _weight_map(path: Path, index: Mapping[str, Any], ending: str) -> dict[str, str]:
    """The index's ``{tensor: file}``, whose files are all in its folder."""
    where = index.get("weight_map")
    if not isinstance(where, dict) or not where:
        raise CheckpointError(f"{path} has no weight_map; fetch the file again")
    # Names are judged as text: a hub's cache links each file of a folder to a blob elsewhere, and that is fine.
    for name in where.values():
        if not isinstance(name, str) or not name.endswith(ending) or set(name) & set("/\\\0") or name.startswith("."):
            raise CheckpointError(
                f"{path} names the weight file {str(name)[:120]!r}; only *{ending} files of the same folder are read"
            )
    files = sorted(set(where.values()))
    missing = [name for name in files if not (path.parent / name).is_file()]
    if missing:
        raise CheckpointError(
            f"{path.parent} lacks {len(missing)} of the {len(files)} weight files that {path.name} names: "
            f"{some(missing)}; fetch them"
        )
    return where


def _no_config(folder: Path) -> str:
    others = _other_weights(folder)
    detail = f" (it holds {some(others)}; a file that has its own description is opened by its name)" if others else ""
    return f"{folder} has no config.json{detail}; give a model folder as saved for transformers"


def _no_weights(folder: Path) -> str:
    wanted = " or ".join(f"{single}, {single}.index.json" for single, _, _ in KINDS)
    if others := _other_weights(folder):
        return (
            f"{folder} has no {wanted}, only {some(others)}; save the model as safetensors (transformers' "
            "save_pretrained does), open a file that has its own description by its name, or use load=dummy for "
            "random weights"
        )
    return f"{folder} has no weights: no {wanted}; put them there, or use load=dummy for random weights"


def _other_weights(folder: Path) -> list[str]:
    endings = (".bin", ".gguf", ".pth", ".pt", ".safetensors", ".npz")
    return sorted(path.name for path in folder.iterdir() if path.suffix in endings)


def some(names: Sequence[str], limit: int = 10) -> str:
    """At most ``limit`` names, and how many there are."""
    return ", ".join(names[:limit]) + (f", … ({len(names)} in all)" if len(names) > limit else "")
