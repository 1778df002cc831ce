"""The view of a folder that ModelSlim saved: its ``config.json`` does not say that the weights are quantized, their
files have names of their own, and its norms may have biases that are zero. Torch-free to import."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from evener.contracts.checkpoint import Checkpoint, Extent, Headers, WeightFile
from evener.contracts.conversion.views import CheckpointView, ViewRequest
from evener.errors import CheckpointError
from evener.layers.builder import Builder
from evener.loading.checkpoint import FolderCheckpoint, files_by_tensor
from evener.loading.match import declared_names
from evener_formats.safetensors_files import SafetensorsFile

if TYPE_CHECKING:
    import torch

_METHOD, _DESCRIPTIONS, _WEIGHTS = "modelslim", "quant_model_description*.json", "quant_model_weight*.safetensors"
#: What a norm may have beside its weight: a bias, and in older versions both again.
_SHIFTS, _AGAIN = (".bias", ".module.bias"), ".module.weight"


class ModelSlimCheckpoint(CheckpointView):
    """``inner`` with the quantization method in its config, and without what its norms have and the model has not.

    Args:
        extra: names of such tensors, by those of the norms' weights. They are checked when the weight is read.
    """

    changes = "files"

    def __init__(self, inner: Checkpoint, extra: Mapping[str, Sequence[str]]) -> None:
        super().__init__(inner)
        self._extra, hidden = extra, {name for names in extra.values() for name in names}
        self._headers = {name: each for name, each in inner.headers.items() if name not in hidden}

    @classmethod
    def of(cls, request: ViewRequest) -> ModelSlimCheckpoint | None:
        """The view, if the folder has a description of its weights.

        Raises:
            CheckpointError: weight files are missing.
        """
        inner = request.checkpoint
        if not inner.names(_DESCRIPTIONS):
            return None
        files, settings = inner.names(_WEIGHTS), inner.config.get("quantization_config")
        if not files and isinstance(settings, Mapping) and settings.get("quant_method") == _METHOD:
            return None  # what was converted from such a folder
        if files:
            inner = _SlimFolder(inner.path, files)
        return cls(inner, _extra(inner.headers, request))

    @property
    def headers(self) -> Headers:
        return self._headers

    @cached_property
    def config(self) -> Mapping[str, Any]:
        return {**self.inner.config, "quantization_config": {"quant_method": _METHOD}}

    def tensor(self, name: str) -> torch.Tensor:
        tensor = self.inner.tensor(name)
        for other in self._extra.get(name, ()):
            beside = self.inner.tensor(other)
            if other.endswith(_AGAIN):
                wrong = beside.shape != tensor.shape or bool((beside != tensor).any())
                problem, advice = f"differs from {name}", "without the layers that were left unquantized"
            else:
                wrong, problem, advice = bool((beside != 0).any()), "is not zero", "with a symmetric anti_method"
            if wrong:
                raise CheckpointError(
                    f"{other} in {self.path} {problem}, and this model's norms have one weight and no bias; quantize "
                    f"the original model again {advice}"
                )
        return tensor

    def extent(self, name: str) -> Extent | None:
        # Those go through ``tensor``, which checks them.
        return None if name in self._extra else self.inner.extent(name)


def _extra(headers: Headers, request: ViewRequest) -> Mapping[str, Sequence[str]]:
    """What norms have that the model does not declare."""
    norms: dict[str, list[str]] = {}
    for name, (_, shape) in headers.items():
        if name.endswith(".weight") and len(shape) == 1 and not name.endswith(_AGAIN):
            stem = name.removesuffix(".weight")
            found = [stem + ending for ending in (*_SHIFTS, _AGAIN) if stem + ending in headers]
            if found:
                norms[name] = found
    if not norms:
        return {}
    build = Builder("bfloat16", request.length)
    request.architecture(request.checkpoint.config, build)
    declared = {name for item in build.weights for name in declared_names(item)}
    undeclared = {norm: [each for each in names if each not in declared] for norm, names in norms.items()}
    return {norm: names for norm, names in undeclared.items() if names}


class _SlimFolder(FolderCheckpoint):
    """A folder whose weights are in ``files``.

    Raises:
        CheckpointError: its index names more files, or two of them hold the same tensor.
    """

    def __init__(self, path: Path, files: Sequence[str]) -> None:
        super().__init__(path)
        self._names = files

    @cached_property
    def _files(self) -> Mapping[str, WeightFile]:
        where: dict[str, str] = {}
        for index in self.names(f"{_WEIGHTS}.index.json"):
            named = self.json(index).get("weight_map")
            if not isinstance(named, dict) or not named:
                raise CheckpointError(f"{self.path} has {index} without a weight_map; fetch it again")
            missing = sorted({str(file) for file in named.values()} - set(self._names))
            if missing:
                raise CheckpointError(
                    f"{self.path} lacks {len(missing)} files that {index} names: {missing[0][:120]!r}; fetch them again"
                )
            where |= named
        return files_by_tensor([SafetensorsFile(self.path / name) for name in self._names], where)
