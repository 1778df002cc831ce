"""Opening a model: a folder as transformers saves it, or a single file, which an installed package's reader reads by
its ending. Torch-free."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from evener.contracts.checkpoint import Checkpoint, Extent, Headers, ModelFiles, WeightFile
from evener.errors import CheckpointError, did_you_mean

if TYPE_CHECKING:
    import torch


def open_checkpoint(path: str | Path) -> Checkpoint:
    """The checkpoint at ``path``. Only its description is read yet, not its weights.

    Raises:
        CheckpointError: it does not exist, no installed package reads it, or it is broken.
    """
    path = Path(path).expanduser()
    return _open_file(path) if path.is_file() else FolderCheckpoint(path)


def open_files(path: str | Path) -> ModelFiles:
    """The text files at ``path``: as ``open_checkpoint``, but a folder needs no ``config.json``."""
    path = Path(path).expanduser()
    return _open_file(path) if path.is_file() else FolderFiles(path)


def _open_file(path: Path) -> Checkpoint:
    from evener.plugins.discover import installed_catalog

    readers = installed_catalog().lazy_imports("checkpoint reader")
    if path.suffix not in readers:
        known = f"installed packages read files ending in {', '.join(sorted(readers))}" if readers else (
            "no installed package reads single files (pip install evener-models)"
        )  # fmt: skip
        raise CheckpointError(f"cannot open {path}: {known}; or give the folder that holds it and its config.json")
    opened: Checkpoint = readers[path.suffix].load()(path)
    return opened


#: Bytes of the longest text file that is read; the largest tokenizers have a third of that.
MAX_TEXT = 100_000_000


def weight_file_kinds() -> Iterator[tuple[str, Callable[[], type[WeightFile]]]]:
    """Kinds of weight files: the name of a single file, and what imports the reader. The first kind that is there is
    taken, safetensors before others, as in transformers: a folder with both loads the same weights."""
    from evener.plugins.discover import installed_catalog

    found = installed_catalog().lazy_imports("weight file reader")
    for name in sorted(found, key=lambda name: (not name.endswith(".safetensors"), name)):
        yield name, found[name].load


class FolderFiles(ModelFiles):
    """The text files of a folder.

    Raises:
        CheckpointError: there is no such folder.
    """

    def __init__(self, path: Path) -> None:
        if not path.is_dir():
            what = "give a model folder or file, or a name on a hub, as org/name"
            raise CheckpointError(f"the model {path} does not exist, or is no folder or plain file; {what}")
        self.path = path

    def text(self, name: str) -> str | None:
        path = self.path / name
        try:
            if path.exists() and not path.is_file():  # reading a pipe or a device may wait for ever
                raise CheckpointError(f"{path} is not a regular file; put a copy of the model's own file there")
            if (size := path.stat().st_size) > MAX_TEXT:
                raise CheckpointError(f"{path} has {size:,} bytes, which is no configuration; fetch the file again")
            return path.read_text(encoding="utf-8")
        except FileNotFoundError:
            return None
        except (OSError, ValueError) as error:  # a name from config.json may be no name of a file
            raise CheckpointError(f"cannot read {str(path)!r}: {error}; fetch the file again") from error

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
            raise _missing_error(path, "config.json", "give a model folder that has it, or a .gguf file")

    @cached_property
    def headers(self) -> Headers:
        return {name: file.headers[name] for name, file in self._files.items()}

    @cached_property
    def copied(self) -> frozenset[str]:  # type: ignore[override]  # known once the files are read
        return frozenset(name for name, file in self._files.items() if name in file.copied)

    def tensor(self, name: str) -> torch.Tensor:
        if name not in self._files:
            raise CheckpointError(f"{self.path} has no tensor {name!r}{did_you_mean(name, self._files)}")
        return self._files[name].tensor(name)

    def extent(self, name: str) -> Extent | None:
        return self._files[name].extent(name)

    def close(self) -> None:
        for file in self.__dict__.get("_files", {}).values():
            file.close()

    @cached_property
    def _files(self) -> Mapping[str, WeightFile]:
        """The file of each tensor."""
        for single, load in weight_file_kinds():
            if (self.path / single).is_file():
                return files_by_tensor([load()(self.path / single)], {})
            name = f"{single}.index.json"
            if self.text(name) is not None:
                where = _weight_map(self.path / name, self.json(name), Path(single).suffix)
                return files_by_tensor([load()(self.path / file) for file in sorted(set(where.values()))], where)
        names = ", ".join(f"{single}, {single}.index.json" for single, _ in weight_file_kinds())
        if not names:
            raise CheckpointError(f"no installed package reads weights in {self.path}: pip install evener-formats")
        raise _missing_error(self.path, f"weights: no {names}", "save the model as safetensors, or use load=dummy")


def files_by_tensor(files: Sequence[WeightFile], where: Mapping[str, str]) -> dict[str, WeightFile]:
    """The file of each tensor.

    Args:
        where: an index's ``{tensor: file}``; empty where there is none.

    Raises:
        CheckpointError: a tensor is in two files, or not where the index says.
    """
    found: dict[str, WeightFile] = {}
    for file in files:
        for tensor in file.headers:
            if tensor in found:
                raise CheckpointError(
                    f"{tensor!r} is both in {found[tensor].path.name} and in {file.path.name} of {file.path.parent}; "
                    "remove the file that is not part of this checkpoint"
                )
            found[tensor] = file
    lost = [tensor for tensor, name in where.items() if tensor not in found or found[tensor].path.name != name]
    if lost:
        raise CheckpointError(
            f"the index lists {len(lost)} tensors in files that do not hold them: {format_names(lost)}; fetch it again"
        )
    return found


def _weight_map(path: Path, index: Mapping[str, Any], ending: str) -> dict[str, str]:
    """The index's ``{tensor: file}``, whose files are all in its folder."""
    where = index.get("weight_map")
    if not isinstance(where, dict) or not where:
        raise CheckpointError(f"{path} has no weight_map; fetch the file again")
    # Only the text of a name is checked: in a hub's cache each file of a folder is a link to a blob elsewhere.
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
            f"{format_names(missing)}; fetch them"
        )
    return where


def _missing_error(folder: Path, what: str, advice: str) -> CheckpointError:
    endings = (".bin", ".gguf", ".pth", ".pt", ".safetensors", ".npz")
    others = sorted(path.name for path in folder.iterdir() if path.suffix in endings)
    detail = f" (it holds {format_names(others)}; a file that describes itself is opened by its name)" if others else ""
    return CheckpointError(f"{folder} has no {what}{detail}; {advice}")


def format_names(names: Sequence[str], limit: int = 10) -> str:
    """At most ``limit`` names, and how many there are."""
    return ", ".join(names[:limit]) + (f", … ({len(names)} in all)" if len(names) > limit else "")
