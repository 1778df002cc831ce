"""Weights in safetensors files, mapped. Imports torch only to read one."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from evener.errors import CheckpointError
from evener.loading.header import TensorEntry, read_header

if TYPE_CHECKING:
    import torch


class SafetensorsFiles:
    """One file, or the shards of an index.

    Args:
        files: by name.
        where: the index's ``{tensor: file}``.

    Attributes:
        entries: every stored tensor by name.

    Raises:
        CheckpointError: a header is broken or lies, or the index and the files disagree.
    """

    copied: frozenset[str] = frozenset()

    def __init__(self, files: Mapping[str, Path], where: Mapping[str, str] | None) -> None:
        self.entries: dict[str, TensorEntry] = {}
        for path in files.values():
            for tensor, entry in read_header(path).items():
                if tensor in self.entries:
                    raise CheckpointError(
                        f"{tensor!r} is both in {self.entries[tensor].file.name} and in {path.name} of {path.parent}; "
                        "remove the file that is not part of this checkpoint"
                    )
                self.entries[tensor] = entry
        check_index({name: entry.file for name, entry in self.entries.items()}, where)
        self.headers = {name: (entry.dtype, entry.shape) for name, entry in self.entries.items()}
        self._open: dict[Path, Any] = {}

    def tensor(self, name: str) -> torch.Tensor:
        """The tensor ``name``, mapped."""
        from safetensors import SafetensorError, safe_open

        file = self.entries[name].file
        try:
            if file not in self._open:
                self._open[file] = safe_open(file, framework="pt")
            tensor: torch.Tensor = self._open[file].get_tensor(name)
        except (SafetensorError, OSError) as error:
            raise CheckpointError(f"cannot read {name!r} from {file}: {error}; fetch the file again") from error
        return tensor

    def close(self) -> None:
        """Let go of the files."""
        self._open.clear()


def check_index(found: Mapping[str, Path], where: Mapping[str, str] | None) -> None:
    """Check that every tensor of the index is in the file that it names.

    Raises:
        CheckpointError: some are not.
    """
    lost = [tensor for tensor, name in (where or {}).items() if tensor not in found or found[tensor].name != name]
    if lost:
        shown = ", ".join(lost[:10]) + (", …" if len(lost) > 10 else "")
        raise CheckpointError(
            f"the index names {len(lost)} tensors that are not in the file it names: {shown}; fetch the folder again"
        )
