"""The checkpoint contract: where a model's files and weights come from.

Whatever it is on disk, a checkpoint gives what a model folder saved for transformers has: text files by name and
tensors by name. The core reads folders. A package adds the reader of another kind of file, by its ending::

    Descriptor(name="my-reader", checkpoints={".xyz": "my_reader:XyzCheckpoint"}, …)

Opening one and reading its texts and headers imports no torch, and believes nothing that the file's size contradicts.
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

Headers = Mapping[str, tuple[str, tuple[int, ...]]]


@dataclass(frozen=True)
class Extent:
    """Where the bytes of a stored tensor lie, one after another: a file, and the offset of the first in it."""

    file: Path
    offset: int


class ModelFiles(ABC):
    """The text files of a model: ``config.json``, ``generation_config.json``, ``tokenizer.json``,
    ``tokenizer_config.json``, ``chat_template.jinja``, …

    Attributes:
        path: what it was opened from.
    """

    path: Path

    @abstractmethod
    def text(self, name: str) -> str | None:
        """The text of the file ``name``; None if the model has none.

        Raises:
            CheckpointError: it cannot be read.
        """

    def names(self, pattern: str) -> Sequence[str]:
        """(optional) Names of the files that fit a glob pattern, sorted. Default: none."""
        del pattern
        return ()

    def where(self, name: str) -> str:
        """(optional) What messages call the file ``name``. Default: a file under ``path``."""
        return str(self.path / name)

    def json(self, name: str) -> dict[str, Any]:
        """The object in a JSON file; empty if there is no such file.

        Raises:
            CheckpointError: the file is not a JSON object.
        """
        text = self.text(name)
        if text is None:
            return {}
        try:
            value = json.loads(text)
        except (ValueError, RecursionError) as error:
            detail = str(error) or type(error).__name__
            raise CheckpointError(f"{self.where(name)} is not valid JSON ({detail}); fetch the file again") from error
        if not isinstance(value, dict):
            raise CheckpointError(f"{self.where(name)} must hold a JSON object, not a {type(value).__name__}")
        return value


class Checkpoint(ModelFiles):
    """Text files and weights. A reader is constructed with the path, and reads no more than it needs for ``config``.

    Attributes:
        copied: names of tensors that ``tensor`` makes anew, where others are mapped.
    """

    copied: frozenset[str] = frozenset()

    @property
    @abstractmethod
    def headers(self) -> Headers:
        """``{tensor: (dtype, shape)}`` of all that is stored. Dtypes as torch names them, or a key of ``quant.BLOCKS``:
        the shape is then that of the numbers, not of the blocks.

        Raises:
            CheckpointError: there are no weights, or what describes them is broken or lies.
        """

    @abstractmethod
    def tensor(self, name: str) -> torch.Tensor:
        """The tensor called ``name``, memory-mapped where the file has it as it is; one of blocks as uint8 [rows, bytes
        of a row]. Do not write into it.

        Raises:
            CheckpointError: there is none of that name, or the file cannot be read.
        """

    def extent(self, name: str) -> Extent | None:
        """(optional) Where the file has the tensor ``name`` as ``tensor`` gives it, for readers that go to the file
        themselves. Default: None, nowhere."""
        del name
        return None

    def close(self) -> None:
        """(optional) Let go of the files. Tensors that were handed out stay valid."""

    @cached_property
    def config(self) -> Mapping[str, Any]:
        """``config.json``.

        Raises:
            CheckpointError: there is none, or it is not a JSON object.
        """
        if self.text("config.json") is None:
            raise CheckpointError(f"{self.path} has no config.json; give a model folder as saved for transformers")
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
