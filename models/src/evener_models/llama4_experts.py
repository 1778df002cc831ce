"""Llama 4 checkpoints with the quantized experts of a layer in one tensor, as ModelOpt stores them (NVFP4 and FP8).
Torch-free."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping
from functools import cached_property
from typing import TYPE_CHECKING, NamedTuple

from evener.contracts.checkpoint import Extent, Headers
from evener.contracts.conversion.views import CheckpointView, ViewRequest
from evener.errors import CheckpointError
from evener_models.llama4 import Llama4ForCausalLM

if TYPE_CHECKING:
    import torch

_STACK = re.compile(r"(.+\.feed_forward\.experts)\.(gate_up|down)_proj")
#: What is stored beside such a tensor, by the ending of its name.
_BESIDE = ("weight_scale", "weight_scale_2", "input_scale")
#: Names that a checkpoint may have here; Maverick has about 37,000.
_MOST = 1 << 20


class _Piece(NamedTuple):
    """What one expert has of a stored tensor: its matrix, then some of the columns; of a scale for a whole matrix, or
    for all of them, ``width`` is 0."""

    source: str
    expert: int
    start: int
    width: int


class Llama4Experts(CheckpointView):
    """Gives each expert tensors of its own. ``experts.gate_up_proj`` [experts, columns, rows] of a quantized checkpoint
    becomes ``experts.3.gate_proj.weight`` and ``experts.3.up_proj.weight`` [rows, columns], with the scales beside it;
    ``experts.down_proj`` in the same way. Columns may be packed. ``gate_up_proj_weight_scale`` has three axes too, or
    one number for each expert or for all."""

    changes = "names"

    @classmethod
    def of(cls, request: ViewRequest) -> Llama4Experts | None:
        if not issubclass(request.architecture, Llama4ForCausalLM):
            return None
        return cls(request.checkpoint) if any(_stacks(request.checkpoint.headers)) else None

    @cached_property
    def _pieces(self) -> Mapping[str, _Piece]:
        """What replaces the stacks: ``{name here: piece}``."""
        stored = self.inner.headers
        stacks = [match for match in _stacks(stored) if len(stored[match[0]][1]) == 3 and min(stored[match[0]][1])]
        if 4 * sum(2 * stored[match[0]][1][0] for match in stacks) > _MOST:
            raise CheckpointError(
                f"{stacks[0][0]} is {list(stored[stacks[0][0]][1])}, and {len(stacks)} tensors are like it: more "
                "experts than a Llama 4 has; fetch the files again"
            )
        found = dict[str, _Piece]()
        for match in stacks:
            experts, _, rows = stored[match[0]][1]
            words = ("gate_proj", "up_proj") if match[2] == "gate_up" else ("down_proj",)
            each = rows // len(words)
            beside = {end: f"{match[0]}_{end}" for end in _BESIDE if f"{match[0]}_{end}" in stored}
            for end, source in {"weight": match[0], **beside}.items():
                shape = stored[source][1]
                matrices = len(shape) == 3 and shape[0] == experts and shape[2] == rows
                if not matrices and math.prod(shape) not in (1, experts):
                    break  # it keeps its name, and the message about tensors that are left over names it
                for expert in range(experts):
                    for at, word in enumerate(words):
                        name = f"{match[1]}.{expert}.{word}.{end}"
                        found[name] = _Piece(source, expert, at * each, each if matrices else 0)
        return found

    @cached_property
    def headers(self) -> Headers:
        stored = self.inner.headers
        replaced = {piece.source for piece in self._pieces.values()}
        found = {name: header for name, header in stored.items() if name not in replaced}
        for name, piece in self._pieces.items():
            dtype, shape = stored[piece.source]
            found[name] = dtype, (piece.width, shape[1]) if piece.width else ()
        return found

    @cached_property
    def copied(self) -> frozenset[str]:  # type: ignore[override]  # known once the files are read
        return self.inner.copied | self._pieces.keys()

    def tensor(self, name: str) -> torch.Tensor:
        piece = self._pieces.get(name)
        if piece is None:
            return self.inner.tensor(name)
        whole = self.inner.tensor(piece.source)
        if piece.width:
            return whole[piece.expert].narrow(1, piece.start, piece.width).T.contiguous()
        numbers = whole.reshape(-1)
        return numbers[piece.expert if len(numbers) > 1 else 0].clone()

    def extent(self, name: str) -> Extent | None:
        return None if name in self._pieces else self.inner.extent(name)


def _stacks(stored: Headers) -> Iterator[re.Match[str]]:
    """The quantized stacks: those with scales beside them."""
    matches = (_STACK.fullmatch(name) for name in stored)
    return (match for match in matches if match and f"{match[0]}_weight_scale" in stored)
