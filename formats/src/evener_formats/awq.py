"""The scheme "awq": integers of 4 bits as AutoAWQ saves them in its layout "gemm".

A linear weight ``<layer>.weight`` [rows, columns] is stored as ``<layer>.qweight`` int32 [columns, rows / 8],
``qzeros`` int32 [groups, rows / 8] and ``scales`` [groups, rows]. A word holds the numbers of eight neighbouring rows,
from its lowest bits: rows 0, 2, 4, 6, 1, 3, 5 and 7. A layer without ``qweight`` is not quantized
(``modules_to_not_convert`` names the same layers). Imports torch only to read weights.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from math import lcm
from typing import TYPE_CHECKING, Any

from evener.contracts.checkpoint import Checkpoint, Headers
from evener.contracts.quant import QuantScheme, WeightPart
from evener.errors import CheckpointError
from evener_formats.beside import PLAIN, Along, Axes, BesideScheme
from evener_formats.gptq import HALVES, Layer, integer_format, integer_tensors
from evener_formats.rules import flag
from evener_formats.words import pack, unpack

if TYPE_CHECKING:
    import torch

_BITS, _WORD = 4, 8
#: Where in a word the number of each of its eight rows is.
PLACES = (0, 4, 1, 5, 2, 6, 3, 7)
_ROLES = ("qweight", "qzeros", "scales")


def in_words(numbers: torch.Tensor) -> torch.Tensor:
    """Numbers of four bits, uint8 [n, rows], as words int32 [n, rows / 8]."""
    order = sorted(range(_WORD), key=PLACES.__getitem__)
    return pack(numbers.unflatten(1, (-1, _WORD))[..., order].flatten(1), _BITS)


class AwqScheme(BesideScheme):
    """``"quant_method": "awq"``.

    Args:
        group: columns of a group; 0: the whole row.
    """

    name = "awq"

    def __init__(self, group: int = 128) -> None:
        self._layer = Layer(_BITS, group, symmetric=False)

    def detect(self, config: Mapping[str, Any]) -> bool:
        settings = config.get("quantization_config")
        if not isinstance(settings, Mapping) or settings.get("layout") == HALVES:
            return False
        return bool(settings.get("quant_method") == self.name)

    def configured(self, config: Mapping[str, Any], checkpoint: Checkpoint | None = None) -> QuantScheme:
        settings = config["quantization_config"]
        flag(settings, "zero_point", True)
        layer, version = Layer.of({**settings, "sym": False, "desc_act": False}, self.name), settings.get("version")
        if layer.bits != _BITS or str(version or settings.get("format") or "gemm").lower() != "gemm":
            raise CheckpointError(
                f"config.json's quantization_config has {layer.bits} bits and the version {str(version)[:40]!r}; awq "
                f"is read with {_BITS} bits in the version 'gemm'; use such a checkpoint"
            )
        return AwqScheme(layer.group)

    def tensors(self, name: str, headers: Headers) -> Mapping[str, str]:
        stem = name.removesuffix(".weight")
        if name == stem or f"{stem}.qweight" not in headers:
            return {"weight": name}
        return {role: f"{stem}.{role}" for role in _ROLES}

    def part(self, name: str, headers: Headers) -> WeightPart | None:
        roles = self.tensors(name, headers)
        if "qweight" not in roles:
            return super().part(name, headers)
        absent = ("nothing", ())
        (kind, words), (zero, zeros), (scale, scales) = (headers.get(roles[role], absent) for role in _ROLES)
        columns, rows = (words[0], words[1] * _WORD) if len(words) == 2 else (0, 0)
        group = 0 if self._layer.group >= columns else self._layer.group
        groups = -(-columns // group) if group else 1
        fits = (
            (kind, zero) == ("int32", "int32") and scale in PLAIN and min(rows, columns) > 0 and columns % 2 == 0
            and group % 2 == 0 and scales == (groups, rows) and zeros == (groups, rows // _WORD)
        )  # fmt: skip
        if not fits:
            raise CheckpointError(
                f"{name.removesuffix('.weight')} is stored as qweight {kind} {list(words)}, qzeros {zero} "
                f"{list(zeros)} and scales {scale} {list(scales)}, which are not those of groups of "
                f"{self._layer.group or 'whole rows'}: int32 [columns, rows / {_WORD}], int32 "
                f"[groups, rows / {_WORD}] and [groups, rows], columns and groups even; use the "
                "config.json that was published with these weights"
            )
        form = integer_format(self._layer, columns, group, scale)
        return WeightPart(name, rows, columns, replace(form, cut=(_WORD, lcm(2, max(1, group)))))

    def axes(self, part: WeightPart) -> Mapping[str, Axes]:
        groups = Along(0, part.format.group) if part.format.group else None
        return {
            "qweight": Axes(Along(1, _WORD), Along(0)), "qzeros": Axes(Along(1, _WORD), groups),
            "scales": Axes(Along(1), groups),
        }  # fmt: skip

    def arrange(self, part: WeightPart) -> WeightPart:
        if part.format.plain:
            return part
        numbers, zeros = (
            unpack(part.tensors[role], _BITS).unflatten(-1, (-1, _WORD))[..., list(PLACES)].flatten(-2).T
            for role in ("qweight", "qzeros")
        )
        return replace(part, tensors=integer_tensors(part, self._layer, numbers, zeros, part.tensors["scales"].T))

    def examples(self, name: str, seed: int) -> Iterator[tuple[Mapping[str, Any], Headers, Mapping[str, torch.Tensor]]]:
        import torch

        random, stem = torch.Generator().manual_seed(seed), name.removesuffix(".weight")
        rows, columns = 48, 192
        for group, kind in ((32, "float16"), (64, "bfloat16"), (-1, "float16")):
            groups = columns // group if group > 0 else 1
            sizes = {"qweight": (columns, rows // _WORD), "qzeros": (groups, rows // _WORD)}
            tensors = {
                f"{stem}.{role}": torch.randint(-(2**31), 2**31, size, generator=random).int()
                for role, size in sizes.items()
            }
            scales = torch.rand(groups, rows, generator=random) / 64 + 1 / 64
            tensors[f"{stem}.scales"] = scales.to(getattr(torch, kind))
            headers = {n: (str(t.dtype).removeprefix("torch."), tuple(t.shape)) for n, t in tensors.items()}
            settings = {"bits": _BITS, "group_size": group, "version": "gemm", "zero_point": True}
            yield {"quantization_config": {"quant_method": self.name, **settings}}, headers, tensors
        yield (
            {"quantization_config": {"quant_method": self.name, "bits": _BITS}},
            {name: ("bfloat16", (6, 10))}, {name: torch.randn(6, 10, generator=random).bfloat16()},
        )  # fmt: skip
