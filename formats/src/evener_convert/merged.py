"""The view of a folder whose parts of weights are stored together: queries, keys and values as one tensor, gate and up
as one. A model is declared by the parts, so the view gives these, as spans of the stored tensor. Torch-free.

``evener_merged.json`` says for each rank's file, or for the whole model, which parts each merged tensor has.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any

from evener.contracts.checkpoint import Checkpoint, Extent, Headers
from evener.contracts.conversion.views import CheckpointView, ViewRequest
from evener.errors import CheckpointError

if TYPE_CHECKING:
    import torch

INDEX, VERSION = "evener_merged.json", 1


@dataclass(frozen=True)
class MergedPart:
    """A part of a merged tensor: its name, and which ``size`` of the elements along ``axis`` it is; without an axis, it
    is all of the tensor, which the other parts have too."""

    name: str
    axis: int | None = None
    start: int = 0
    size: int = 0


class MergedCheckpoint(CheckpointView):
    """``inner``, with the parts in place of merged tensors.

    Args:
        inner: the checkpoint below.
        parts: of each merged tensor.

    Raises:
        CheckpointError: a merged tensor is missing, or its parts are not all of it.
    """

    changes = "files"

    def __init__(self, inner: Checkpoint, parts: Mapping[str, Sequence[MergedPart]]) -> None:
        super().__init__(inner)
        self._parts: dict[str, tuple[str, MergedPart]] = {}
        headers = {name: each for name, each in inner.headers.items() if name not in parts}
        for merged, found in parts.items():
            dtype, shape = inner.headers.get(merged, ("", ()))
            for part in found:
                if part.name in headers or (part.axis is not None and part.axis >= len(shape)):
                    raise _damaged(inner, merged)
                self._parts[part.name] = merged, part
                sizes = list(shape)
                if part.axis is not None:
                    sizes[part.axis] = part.size
                headers[part.name] = dtype, tuple(sizes)
            ends = {(part.axis, part.start + part.size) for part in found[-1:]}
            if not dtype or any(axis is not None and end != shape[axis] for axis, end in ends):
                raise _damaged(inner, merged)
        self._headers: Headers = headers

    @classmethod
    def of(cls, request: ViewRequest) -> MergedCheckpoint | None:
        """The view of a folder with such an index.

        Raises:
            CheckpointError: the index is of another version, or broken.
        """
        checkpoint, (tp_rank, tp_size), (pp_rank, _) = request.checkpoint, request.tp, request.stage
        if checkpoint.text(INDEX) is None:
            return None
        index = checkpoint.json(INDEX)
        files = index.get("files")
        if index.get("version") != VERSION or not isinstance(files, list) or not files:
            raise CheckpointError(
                f"{checkpoint.where(INDEX)} has version {index.get('version')!r}, not {VERSION}; convert it again"
            )
        rank = pp_rank * tp_size + tp_rank if len(files) > 1 else 0
        try:
            return cls(checkpoint, {str(name): _parts(each) for name, each in files[rank].items()})
        except (AttributeError, IndexError, KeyError, TypeError, ValueError) as error:
            raise CheckpointError(f"{checkpoint.where(INDEX)} is damaged ({error}); convert it again") from error

    @property
    def headers(self) -> Headers:
        return self._headers

    @cached_property
    def copied(self) -> frozenset[str]:  # type: ignore[override]
        inner = self.inner.copied
        mine = {name for name, (merged, part) in self._parts.items() if merged in inner or part.axis}
        return (inner & self._headers.keys()) | mine

    def tensor(self, name: str) -> torch.Tensor:
        if name not in self._parts:
            return self.inner.tensor(name)
        merged, part = self._parts[name]
        whole = self.inner.tensor(merged)
        return whole if part.axis is None else whole.narrow(part.axis, part.start, part.size).contiguous()

    def extent(self, name: str) -> Extent | None:
        if name not in self._parts:
            return self.inner.extent(name)
        merged, part = self._parts[name]
        found = self.inner.extent(merged)
        if found is None or part.axis:
            return None
        whole = self.inner.tensor(merged)
        row = whole.nbytes // whole.shape[0] if part.axis is not None and whole.shape[0] else 0
        return replace(found, offset=found.offset + part.start * row)


def merged_index(files: Sequence[Mapping[str, Sequence[MergedPart]]]) -> str:
    """The text of ``evener_merged.json``; ``files``: of each rank, or of the whole model."""
    short: list[dict[str, Any]] = [
        {
            name: {"axis": parts[0].axis, "parts": [[part.name, part.size] for part in parts]}
            for name, parts in each.items()
        }
        for each in files
    ]
    return json.dumps({"version": VERSION, "files": short}) + "\n"


def _parts(entry: Mapping[str, Any]) -> list[MergedPart]:
    axis, at, found = entry["axis"], 0, []
    if axis not in (None, 0, 1) or isinstance(axis, bool) or not entry["parts"]:
        raise ValueError(f"axis {axis!r}")
    for name, size in entry["parts"]:
        if type(name) is not str or type(size) is not int or size < 0:
            raise ValueError(f"the part {str(name)[:80]!r} has the size {str(size)[:20]!r}")
        found.append(MergedPart(name, axis, at, size))
        at += size
    return found


def _damaged(checkpoint: Checkpoint, name: str) -> CheckpointError:
    return CheckpointError(f"{checkpoint.where(INDEX)}: the parts of {name[:120]!r} are not those of the weight files; "
                           "convert the original model again")  # fmt: skip
