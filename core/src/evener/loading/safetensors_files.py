"""Weights in safetensors files, mapped. Imports torch only to read one."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

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
        self.headers = {name: (entry.dtype, entry.shape) for name, entry in read_header(path).items()}
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

    def close(self) -> None:
        """Let go of the file."""
        self._open = None
