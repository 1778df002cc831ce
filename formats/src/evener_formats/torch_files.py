"""Weights in PyTorch's own files (``pytorch_model.bin``): only tensors, mapped; no code in them is run."""

from __future__ import annotations

import pickle
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from evener.contracts.checkpoint import WeightFile
from evener.errors import CheckpointError

if TYPE_CHECKING:
    import torch


class TorchFile(WeightFile):
    """One file.

    Raises:
        CheckpointError: it is broken, or holds more than tensors.
    """

    def __init__(self, path: Path) -> None:
        self.path, self._tensors = path, _read(path)
        self.headers = {n: (str(t.dtype).removeprefix("torch."), tuple(t.shape)) for n, t in self._tensors.items()}
        self.copied = frozenset(name for name, tensor in self._tensors.items() if not tensor.is_contiguous())

    def tensor(self, name: str) -> torch.Tensor:
        """The tensor ``name``, mapped unless it is stored with other strides."""
        return self._tensors[name].contiguous()


def _read(path: Path) -> dict[str, torch.Tensor]:
    import torch

    _check_archive(path)
    try:
        loaded: Any = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    except pickle.UnpicklingError as error:
        raise CheckpointError(
            f"{path} holds more than tensors, which would need code to be run: {_first_line(error)}; nothing of it was "
            "run. Use a copy of the model in safetensors, or save its state_dict() alone"
        ) from error
    except Exception as error:  # for a hostile file torch raises almost anything
        raise CheckpointError(f"cannot read {path}: {_first_line(error)}; fetch the file again") from error
    if isinstance(loaded, Mapping) and isinstance(loaded.get("state_dict"), Mapping):
        loaded = loaded["state_dict"]
    if not isinstance(loaded, Mapping) or not all(
        isinstance(name, str) and isinstance(tensor, torch.Tensor) for name, tensor in loaded.items()
    ):
        raise CheckpointError(f"{path} is not a table of tensors by name; save the model's state_dict()")
    odd = [name for name, t in loaded.items() if t.layout is not torch.strided or t.device.type != "cpu"]
    if odd:
        raise CheckpointError(f"{path}: {odd[0]!r} is not an ordinary tensor; save the model as safetensors")
    return {name: tensor.detach() for name, tensor in loaded.items()}


def _check_archive(path: Path) -> None:
    """Refuse compressed records, which torch would unpack to any size, and records that are larger than the file."""
    try:
        with zipfile.ZipFile(path) as archive:
            records = archive.infolist()
    except (zipfile.BadZipFile, OSError, ValueError, NotImplementedError) as error:
        raise CheckpointError(
            f"{path} is not a file of torch 1.6 or later ({_first_line(error)}); fetch it again, or save it again with "
            "torch.save"
        ) from error
    size = path.stat().st_size
    if any(r.compress_type != zipfile.ZIP_STORED for r in records) or sum(r.file_size for r in records) > size:
        raise CheckpointError(f"{path} has records that are compressed, or larger than the file; fetch the file again")


def _first_line(error: BaseException) -> str:
    lines = str(error).splitlines()
    return lines[0][:200] if lines else type(error).__name__
