"""Opening a model: a folder by the core itself, a file by the reader that a package registered for its ending."""

from __future__ import annotations

from pathlib import Path

from evener.contracts.checkpoint import Checkpoint, ModelFiles
from evener.errors import CheckpointError
from evener.loading.folder import FolderCheckpoint, FolderFiles


def open_checkpoint(path: str | Path) -> Checkpoint:
    """The checkpoint at ``path``. Only its description is read yet, not its weights.

    Raises:
        CheckpointError: there is nothing, nobody reads it, or it is broken.
    """
    path = Path(path).expanduser()
    return _open_file(path) if path.is_file() else FolderCheckpoint(path)


def open_files(path: str | Path) -> ModelFiles:
    """The text files at ``path``: as ``open_checkpoint``, but a folder needs no ``config.json``."""
    path = Path(path).expanduser()
    return _open_file(path) if path.is_file() else FolderFiles(path)


def _open_file(path: Path) -> Checkpoint:
    from evener.plugins.catalog import targets
    from evener.plugins.discover import discover

    readers = targets(discover().packages, "checkpoint reader")
    if path.suffix not in readers:
        known = f"installed packages read files ending in {', '.join(sorted(readers))}" if readers else (
            "no installed package reads single files (pip install evener-models)"
        )  # fmt: skip
        raise CheckpointError(
            f"cannot open {path}: {known}; otherwise give the folder that holds it and its config.json"
        )
    opened: Checkpoint = readers[path.suffix].load()(path)
    return opened
