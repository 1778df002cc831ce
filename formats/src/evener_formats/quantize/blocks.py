"""The quantizers of GGUF's block formats: ``quant=q8_0``, ``q4_k`` and so on, and the mixtures ``q4_k_m`` and so on.
Imports torch only to quantize."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from evener.contracts.checkpoint import Headers
from evener.contracts.conversion.quantizer import Matrix, Quantizer
from evener.contracts.quant import BLOCKS
from evener.errors import ConfigError
from evener_formats.quantize.rules import NONE, Rules

if TYPE_CHECKING:
    import torch

#: Block formats that are written.
WRITTEN = ("q4_0", "q4_1", "q5_0", "q5_1", "q8_0", "q4_k", "q5_k", "q6_k")
#: Mixtures: the format of most matrices, and that of the head and of values and down projections in some layers.
MIXTURES: Mapping[str, tuple[str, str]] = {"q4_k_m": ("q4_k", "q6_k"), "q5_k_m": ("q5_k", "q6_k")}
#: What takes the place of a format whose blocks do not divide a matrix's columns, as llama.cpp does it.
INSTEAD: Mapping[str, str] = {"q4_k": "q5_0", "q5_k": "q5_1", "q6_k": "q8_0"}
_VALUES_OR_DOWN = re.compile(r".*(v_proj|down_proj|\bfc2|\bw2)(\.weight)?")
_LAYER = re.compile(r"\.(\d+)\.")
#: Elements that are quantized at a time: on the host so few that they stay in a core's cache.
_SLICE, _DEVICE_SLICE = 1 << 17, 1 << 24


class BlockQuantizer(Quantizer):
    """Stores a matrix in blocks. Routers, and weights that are used as more than a matrix (a tied embedding), stay as
    they are unless a rule names them; so does the head, except in a mixture."""

    settings: Mapping[str, Any] = {"quant_method": "gguf"}

    def __init__(self, name: str, options: Mapping[str, Any], matrices: Sequence[Matrix]) -> None:
        self._usual = MIXTURES[name][0] if name in MIXTURES else name
        self._better = MIXTURES[name][1] if name in MIXTURES else None
        self._rules = Rules(options.get("quant_rules") or "", WRITTEN)
        self._rules.check_used(matrices)
        self._layers = 1 + max((_layer(m.name) for m in matrices), default=-1)
        for matrix in matrices:
            wanted, columns = self._rules.of(matrix.name), matrix.shape[-1]
            if wanted not in (None, NONE) and columns % BLOCKS[wanted][0]:
                fit = [each for each in WRITTEN if columns % BLOCKS[each][0] == 0]
                raise ConfigError(
                    f"formats.quant_rules: {matrix.name} has {columns} columns, which {wanted} cannot store: blocks "
                    f"have {BLOCKS[wanted][0]}; what fits: {', '.join([*fit, NONE])}"
                )

    def format(self, matrix: Matrix) -> str | None:
        """The block format of ``matrix``; None: it stays as it is."""
        ruled = self._rules.of(matrix.name)
        if ruled is not None:
            return None if ruled == NONE else ruled
        if matrix.kind == "head" and self._better is not None:
            wanted = self._better
        elif matrix.kind in ("linear", "expert"):
            more = self._better is not None and _VALUES_OR_DOWN.fullmatch(matrix.name) and self._is_better_layer(matrix)
            wanted = self._better if more and self._better else self._usual
        else:
            return None
        columns = matrix.shape[-1]
        wanted = wanted if columns % BLOCKS[wanted][0] == 0 else INSTEAD.get(wanted, wanted)
        return wanted if columns % BLOCKS[wanted][0] == 0 else None

    def _is_better_layer(self, matrix: Matrix) -> bool:
        """The first and the last eighth of the layers, and every third between."""
        layer, count = _layer(matrix.name), self._layers
        return layer < count // 8 or layer >= 7 * count // 8 or (layer - count // 8) % 3 == 2

    def stored(self, matrix: Matrix) -> Headers:
        form = self.format(matrix)
        return {} if form is None else {matrix.name: (form, matrix.shape)}

    def quantize(self, matrix: Matrix, values: torch.Tensor) -> Mapping[str, torch.Tensor]:
        form = self.format(matrix)
        assert form is not None, "the matrix stays as it is"
        return {matrix.name: to_blocks(form, values)}


def to_blocks(form: str, values: torch.Tensor) -> torch.Tensor:
    """``values`` [..., columns], of a float dtype, in the block format ``form``: uint8 [..., bytes of a row]."""
    import torch

    from evener_formats.quantize.block_types import BLOCK_TYPES
    from evener_formats.quantize.k_types import K_TYPES

    make, (elements, nbytes) = {**BLOCK_TYPES, **K_TYPES}[form], BLOCKS[form]
    flat = values.reshape(-1, elements)
    out = torch.empty(flat.shape[0], nbytes, dtype=torch.uint8, device=values.device)
    step = (_SLICE if values.is_cpu else _DEVICE_SLICE) // elements
    for blocks, place in zip(flat.split(step), out.split(step), strict=True):
        place.copy_(make(blocks.float()))
    return out.view(*values.shape[:-1], -1)


def _layer(name: str) -> int:
    """The number of the layer in a tensor's name; -1 if it has none."""
    found = _LAYER.search(name)
    return -1 if found is None else int(found[1])
