"""The checkpoint contract: where a model's files and weights come from.

A checkpoint gives what a model folder saved for transformers has: text files by name and tensors by name. Core reads
such folders. A package can add a reader for single files, by their ending::

    Descriptor(name="my-reader", checkpoints={".xyz": "my_reader:XyzCheckpoint"}, …)

A package can also add a reader for the weight files in a model folder, by the name of a single one. Others are found
through its index, ``<name>.index.json``, and have its ending::

    Descriptor(name="my-reader", weight_files={"weights.xyz": "my_reader:XyzFile"}, …)

Opening a checkpoint and reading its texts and headers must not import torch, and must check offsets and sizes in the
file against the size of the file.
"""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from evener.errors import CheckpointError

if TYPE_CHECKING:
    import torch

#: What a checkpoint stores, without the numbers: ``{tensor: (dtype, shape)}``; see ``Checkpoint.headers``.
Headers = Mapping[str, tuple[str, tuple[int, ...]]]


@dataclass(frozen=True)
class Extent:
    """Where a stored tensor is: a file, and the offset of its first byte. The bytes are contiguous."""

    file: Path
    offset: int


class ModelFiles(ABC):
    """The text files of a model: ``config.json``, ``generation_config.json``, ``tokenizer.json``,
    ``tokenizer_config.json``, ``chat_template.jinja``, …

    Attributes:
        path: the file or folder that was opened.
    """

    path: Path

    @abstractmethod
    def text(self, name: str) -> str | None:
        """The text of the file ``name``; None if there is no such file.

        Raises:
            CheckpointError: the file cannot be read.
        """

    def names(self, pattern: str) -> Sequence[str]:
        """(optional) Names of the files that match a glob pattern, sorted. Default: none."""
        del pattern
        return ()

    def where(self, name: str) -> str:
        """(optional) How error messages name the file ``name``. Default: its path below ``path``."""
        return str(self.path / name)

    def json(self, name: str) -> dict[str, Any]:
        """The object in a JSON file; empty if there is no such file.

        Raises:
            CheckpointError: the file is not a JSON object.
        """
        if (text := self.text(name)) is None:
            return {}
        try:
            value = json.loads(text)
        except (ValueError, RecursionError) as error:
            detail = str(error) or type(error).__name__
            raise CheckpointError(f"{self.where(name)} is not valid JSON ({detail}); fetch the file again") from error
        if not isinstance(value, dict):
            raise CheckpointError(f"{self.where(name)} must hold a JSON object, not a {type(value).__name__}")
        return value


class StoredTensors(ABC):
    """Tensors by name: of one file, or of a whole model.

    Attributes:
        copied: names of tensors that ``tensor`` copies into new memory; the others are memory-mapped.
    """

    copied: frozenset[str] = frozenset()

    @abstractmethod
    def tensor(self, name: str) -> torch.Tensor:
        """The tensor ``name``, memory-mapped if the file stores it as it is. A tensor of blocks is uint8 [rows, bytes
        per row]. The caller must not write into it.

        Raises:
            CheckpointError: there is no such tensor, or the file cannot be read.
        """

    def extent(self, name: str) -> Extent | None:
        """(optional) Where the file stores the tensor ``name`` exactly as ``tensor`` returns it, for code that reads
        the file itself. Default: None, it does not."""
        del name
        return None

    def close(self) -> None:  # noqa: B027  # optional
        """(optional) Close the files, once the weights are loaded. Tensors that were returned stay valid, and
        ``tensor`` opens them again. Default: nothing."""


class WeightFile(StoredTensors):
    """One weight file of a model folder. The constructor takes the path and reads only the description of the tensors.

    Attributes:
        path: of the file.
        headers: as ``Checkpoint.headers``.
    """

    path: Path
    headers: Headers

    @abstractmethod
    def __init__(self, path: Path) -> None: ...


class Checkpoint(ModelFiles, StoredTensors):
    """Text files and weights. The constructor takes the path, and reads no more than ``config`` needs."""

    @property
    @abstractmethod
    def headers(self) -> Headers:
        """``{tensor: (dtype, shape)}`` of all stored tensors. The dtype is torch's name, or a key of ``quant.BLOCKS``;
        then the shape counts elements, not blocks.

        Raises:
            CheckpointError: there are no weights, or their description is broken or does not fit the file.
        """

    @cached_property
    def config(self) -> Mapping[str, Any]:
        """``config.json``.

        Raises:
            CheckpointError: there is no such file, or it is not a JSON object.
        """
        if self.text("config.json") is None:
            raise CheckpointError(f"{self.path} has no config.json; give a model folder that has it, or a .gguf file")
        return self.json("config.json")

    @property
    def architecture(self) -> str:
        """The name under which the model's class is registered: the first of ``architectures``.

        Raises:
            CheckpointError: ``config.json`` names none.
        """
        names = self.config.get("architectures")
        if not isinstance(names, list) or not names or not isinstance(names[0], str):
            raise CheckpointError(
                f"{self.where('config.json')} does not name an architecture; add the model's class, e.g. "
                '"architectures": ["LlamaForCausalLM"]'
            )
        return names[0]
