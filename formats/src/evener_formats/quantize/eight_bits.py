"""The quantizers ``quant=fp8`` and ``quant=int8``: eight bits, and a float32 scale for each row. Imports torch only to
quantize."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from evener.contracts.checkpoint import Headers
from evener.contracts.conversion.quantizer import Matrix, Quantizer
from evener_formats.quantize.rules import NONE, Rules

if TYPE_CHECKING:
    import torch

#: By name: how the numbers are stored, and the largest of them.
_STORED: Mapping[str, tuple[str, float]] = {"fp8": ("float8_e4m3fn", 448.0), "int8": ("int8", 127.0)}
#: Elements that are quantized at a time.
_SLICE, _DEVICE_SLICE = 1 << 18, 1 << 24


class EightBitQuantizer(Quantizer):
    """A matrix is stored as compressed-tensors stores it with one scale for each row ("channel"): ``<name>`` and
    ``<name>_scale`` [rows, 1]. Heads, routers, and what is used as more than a matrix stay as they are unless a rule
    names them."""

    def __init__(self, name: str, options: Mapping[str, Any], matrices: Sequence[Matrix]) -> None:
        self._name, (self._dtype, self._largest) = name, _STORED[name]
        self._rules = Rules(options.get("quant_rules") or "", (name,))
        self._rules.check_used(matrices)
        kind = "float" if name == "fp8" else "int"
        kept = [each.name.removesuffix(".weight") for each in matrices if not self.stored(each)]
        weights = {"num_bits": 8, "type": kind, "symmetric": True, "strategy": "channel", "dynamic": False}
        self.settings: Mapping[str, Any] = {
            "quant_method": "compressed-tensors", "format": f"{kind}-quantized", "quantization_status": "compressed",
            "config_groups": {"group_0": {"targets": ["Linear"], "weights": weights, "input_activations": None}},
            "ignore": kept,
        }  # fmt: skip

    def stored(self, matrix: Matrix) -> Headers:
        ruled = self._rules.of(matrix.name)
        if ruled == NONE or (ruled is None and matrix.kind not in ("linear", "expert")):
            return {}
        scales = ("float32", (*matrix.shape[:-1], 1))
        return {matrix.name: (self._dtype, matrix.shape), f"{matrix.name}_scale": scales}

    def quantize(self, matrix: Matrix, values: torch.Tensor) -> Mapping[str, torch.Tensor]:
        import torch

        dtype = getattr(torch, self._dtype)
        flat = values.reshape(-1, values.shape[-1])
        out = torch.empty(flat.shape, dtype=dtype, device=values.device)
        scales = torch.empty(flat.shape[0], 1, device=values.device)
        step = max(1, (_SLICE if values.is_cpu else _DEVICE_SLICE) // flat.shape[1])
        for rows, place, scale in zip(flat.split(step), out.split(step), scales.split(step), strict=True):
            numbers = rows.float()
            found = numbers.abs().amax(1, keepdim=True) / self._largest
            scale.copy_(found.masked_fill(found == 0, 1))
            numbers = (numbers / scale).clamp_(-self._largest, self._largest)
            place.copy_(numbers.round_() if dtype == torch.int8 else numbers)
        return {
            matrix.name: out.view(values.shape), f"{matrix.name}_scale": scales.view(*values.shape[:-1], 1),
        }  # fmt: skip
