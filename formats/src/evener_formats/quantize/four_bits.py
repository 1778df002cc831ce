"""The quantizer ``quant=int4``: four bits, and a float16 scale for each group of up to 128 columns. Imports torch only
to quantize."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from evener.contracts.checkpoint import Headers
from evener.contracts.conversion.quantizer import Matrix, Quantizer
from evener_formats.quantize.rules import NONE, Rules
from evener_formats.words import pairs

if TYPE_CHECKING:
    import torch

#: Columns of a group, the first that divides a matrix's columns; a matrix that none divides stays as it is.
GROUPS = (128, 64, 32)
#: What the largest number of a group may become. The one with the least squared error is taken: a smaller scale clips
#: the largest numbers and is finer for the rest.
LARGEST = (7.0, 7.5, 8.0, 8.5, 9.0)
_MOST_HALF = 65504.0
#: Elements that are quantized at a time.
_SLICE, _DEVICE_SLICE = 1 << 17, 1 << 24


class FourBitQuantizer(Quantizer):
    """A matrix is stored as compressed-tensors stores it in "pack-quantized", symmetric: ``<name>_packed`` int32 [rows,
    columns / 8] and ``<name>_scale`` [rows, groups]. Heads, routers, and what is used as more than a matrix stay as
    they are unless a rule names them."""

    def __init__(self, name: str, options: Mapping[str, Any], matrices: Sequence[Matrix]) -> None:
        self._rules = Rules(options.get("quant_rules") or "", (name,))
        self._rules.check_used(matrices)
        names: dict[int, list[str]] = {}
        for matrix in matrices:
            names.setdefault(self._group(matrix), []).append(matrix.name.removesuffix(".weight"))
        kept = names.pop(0, [])
        usual = max(names, key=lambda group: len(names[group]), default=GROUPS[0])
        groups = {usual: ["Linear"], **{group: each for group, each in names.items() if group != usual}}
        self.settings: Mapping[str, Any] = {
            "quant_method": "compressed-tensors", "format": "pack-quantized", "quantization_status": "compressed",
            "config_groups": {
                f"group_{number}": {"targets": targets, "weights": _weights(group), "input_activations": None}
                for number, (group, targets) in enumerate(groups.items())
            },
            "ignore": kept,
        }  # fmt: skip

    def _group(self, matrix: Matrix) -> int:
        """Columns of a group of ``matrix``; 0: it stays as it is."""
        ruled = self._rules.of(matrix.name)
        if ruled == NONE or (ruled is None and matrix.kind not in ("linear", "expert")):
            return 0
        return next((group for group in GROUPS if matrix.shape[-1] % group == 0), 0)

    def stored(self, matrix: Matrix) -> Headers:
        group, (*stack, rows, columns) = self._group(matrix), matrix.shape
        if not group:
            return {}
        found: dict[str, tuple[str, tuple[int, ...]]] = {
            f"{matrix.name}_packed": ("int32", (*stack, rows, columns // 8)),
            f"{matrix.name}_scale": ("float16", (*stack, rows, columns // group)),
        }
        return found if stack else {**found, f"{matrix.name}_shape": ("int64", (2,))}

    def quantize(self, matrix: Matrix, values: torch.Tensor) -> Mapping[str, torch.Tensor]:
        import torch

        group, (*stack, rows, columns) = self._group(matrix), values.shape
        flat = values.reshape(-1, group)
        codes = torch.empty(flat.shape[0], group // 2, dtype=torch.uint8, device=values.device)
        scales = torch.empty(flat.shape[0], dtype=torch.float16, device=values.device)
        step = (_SLICE if values.is_cpu else _DEVICE_SLICE) // group
        for numbers, place, scale in zip(flat.split(step), codes.split(step), scales.split(step), strict=True):
            made, found = _rounded(numbers.float())
            place.copy_(pairs(made))
            scale.copy_(found)
        tensors = {
            f"{matrix.name}_packed": codes.view(torch.int32).view(*stack, rows, columns // 8),
            f"{matrix.name}_scale": scales.view(*stack, rows, columns // group),
        }
        return tensors if stack else {**tensors, f"{matrix.name}_shape": torch.tensor([rows, columns])}


def _rounded(numbers: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Groups [n, columns] of float32 as codes uint8 in the same shape, 8 for zero, and scales float16 [n]."""
    import torch

    most = numbers.abs().amax(1)
    best, scale = torch.full_like(most, torch.inf), torch.ones_like(most)
    codes = torch.empty_like(numbers, dtype=torch.uint8)
    # Squares of large numbers would be infinite, and no scale the best.
    unit = most.masked_fill(most == 0, 1)[:, None]
    for largest in LARGEST:
        tried = (most / largest).clamp_(max=_MOST_HALF).half().float()
        tried = tried.masked_fill(tried == 0, 1)
        made = (numbers / tried[:, None]).round_().clamp_(-8, 7)
        error = ((made * tried[:, None] - numbers) / unit).square_().sum(1)
        better = error < best
        best = torch.where(better, error, best)
        scale = torch.where(better, tried, scale)
        codes = torch.where(better[:, None], (made + 8).to(torch.uint8), codes)
    return codes, scale.half()


def _weights(group: int) -> Mapping[str, Any]:
    return {
        "num_bits": 4, "type": "int", "symmetric": True, "strategy": "group", "group_size": group, "dynamic": False,
        "actorder": None,
    }  # fmt: skip
