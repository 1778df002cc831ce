"""Weights in safetensors files, mapped. Imports torch only to read one."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from evener.contracts.checkpoint import Extent
from evener.errors import CheckpointError
from evener.loading.header import read_header

if TYPE_CHECKING:
    import torch


class SafetensorsFile:
    """One file.

    Raises:
        CheckpointError: its header is broken or lies.
    """

    copied: frozenset[str] = frozenset()

    def __init__(self, path: Path) -> None:
        self.path = path
        self._entries = read_header(path)
        # The data is what the file ends with, without a hole: its header was checked for it.
        self._data = path.stat().st_size - max((entry.end for entry in self._entries.values()), default=0)
        self.headers = {name: (entry.dtype, entry.shape) for name, entry in self._entries.items()}
        self._open: Any = None

    def tensor(self, name: str) -> torch.Tensor:
        """The tensor ``name``, mapped."""
        from safetensors import SafetensorError, safe_open

        try:
            self._open = self._open or safe_open(self.path, framework="pt")
            tensor: torch.Tensor = self._open.get_tensor(name)
        except (SafetensorError, OSError) as error:
            raise CheckpointError(f"cannot read {name!r} from {self.path}: {error}; fetch the file again") from error
        return tensor

    def extent(self, name: str) -> Extent:
        """Where the bytes of ``name`` lie."""
        return Extent(self.path, self._data + self._entries[name].begin)

    def close(self) -> None:
        """Let go of the file."""
        self._open = None
