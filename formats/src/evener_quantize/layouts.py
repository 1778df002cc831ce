"""The layouts in which integers in groups are stored anew: GPTQ, AWQ, and "halves", each from the numbers as packings
get them. Torch-free to import."""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from evener.contracts.checkpoint import Headers
from evener.contracts.quant import WeightPart
from evener.errors import ConfigError
from evener_formats.awq import in_words
from evener_formats.gptq import HALVES
from evener_formats.halves import RUN, in_runs
from evener_formats.words import least_count, pack

if TYPE_CHECKING:
    import torch


def bits_of(part: WeightPart) -> int:
    """Bits of a number: four or eight."""
    return 8 if part.format.storage == "int8" else 4


class Layout(ABC):
    """How a matrix [rows, columns] of integers in groups is stored.

    Attributes:
        name: the value of ``quant=``, and the name of the scheme that reads it.
    """

    name: str

    def refusal(self, part: WeightPart) -> str | None:
        """Why it cannot store a part; None if it can."""
        form = part.format
        if form.storage not in ("uint4", "int8") or form.group < 0 or form.group_out != 1:
            return f"it is stored as {form.elements}, not as integers of 4 or 8 bits in groups"
        if form.activation is not None:
            return f"activations may be rounded ({form.activation}), which {self.name} cannot say"
        return self._refusal(part)

    @abstractmethod
    def _refusal(self, part: WeightPart) -> str | None: ...

    @abstractmethod
    def headers(self, part: WeightPart) -> Headers:
        """Names, dtypes and shapes of the tensors of a part."""

    @abstractmethod
    def tensors(self, part: WeightPart) -> Mapping[str, torch.Tensor]:
        """These tensors, of a part that a scheme arranged."""

    @abstractmethod
    def settings(self, parts: Sequence[WeightPart], kept: Sequence[str], method: str) -> Mapping[str, Any]:
        """The ``quantization_config``.

        Args:
            parts: all that are stored so.
            kept: names of linear weights that stay unquantized.
            method: the name of the scheme that reads the original.

        Raises:
            ConfigError: one config cannot describe them all.
        """


class GptqLayout(Layout):
    """What the scheme "gptq" reads. Zero points are stored as "gptq" has them if they all are the middle, which every
    reader knows, and else as they are ("gptq_v2"): one less than 0 is read in two ways."""

    name = "gptq"

    def _refusal(self, part: WeightPart) -> str | None:
        unit = least_count(bits_of(part))
        if part.rows % unit or part.columns % unit or part.format.group % unit:
            return f"its rows, columns and groups are no multiples of {unit}"
        if part.format.groups and part.format.groups != -(-part.columns // part.format.group):
            return "it is a piece of a matrix in act-order"
        return None

    def headers(self, part: WeightPart) -> Headers:
        stem, bits, groups = part.name.removesuffix(".weight"), bits_of(part), part.format.row_scales(part.columns)
        return {
            f"{stem}.qweight": ("int32", (part.columns * bits // 32, part.rows)),
            f"{stem}.qzeros": ("int32", (groups, part.rows * bits // 32)),
            f"{stem}.scales": (str(part.format.scale), (groups, part.rows)),
            f"{stem}.g_idx": ("int32", (part.columns,)),
        }

    def tensors(self, part: WeightPart) -> Mapping[str, torch.Tensor]:
        import torch

        stem, bits = part.name.removesuffix(".weight"), bits_of(part)
        numbers, zeros, scales = _unsigned(part)
        stored = zeros - 1 if part.format.zero is None else zeros
        index = part.tensors.get("group_index")
        if index is None:
            index = torch.arange(part.columns) // (part.format.group or part.columns)
        return {
            f"{stem}.qweight": pack(numbers, bits).T.contiguous(), f"{stem}.qzeros": pack(stored.T.contiguous(), bits),
            f"{stem}.scales": scales.T.contiguous(), f"{stem}.g_idx": index.int(),
        }  # fmt: skip

    def settings(self, parts: Sequence[WeightPart], kept: Sequence[str], method: str) -> Mapping[str, Any]:
        if len({part.format.zero is None for part in parts}) > 1:
            raise ConfigError(
                "quant=gptq: some matrices have zero points and others do not, for which GPTQ has two forms; leave "
                "quant=auto"
            )
        group = _usual_group(parts)
        kinds = [
            (("bits", bits_of(part)), ("group_size", _said_group(part, group)), ("sym", part.format.zero is None),
             ("desc_act", part.format.order == "act")) for part in parts
        ]  # fmt: skip
        usual = Counter(kinds).most_common(1)[0][0]
        others = {
            f"+:^{re.escape(part.name.removesuffix('.weight'))}$": kind
            for part, kind in zip(parts, kinds, strict=True) if kind != usual
        }  # fmt: skip
        rules: dict[str, tuple[tuple[str, Any], ...]] = {
            f"-:^{re.escape(name.removesuffix('.weight'))}$": () for name in kept
        }
        dynamic = {key: dict(each) for key, each in {**others, **rules}.items()}
        form = "gptq" if parts[0].format.zero is None else "gptq_v2"
        return {
            "quant_method": "gptq", **dict(usual), "checkpoint_format": form, "lm_head": _has_head(parts),
            **({"dynamic": dynamic} if dynamic else {}),
        }  # fmt: skip


class AwqLayout(Layout):
    """What the scheme "awq" reads."""

    name = "awq"

    def _refusal(self, part: WeightPart) -> str | None:
        if part.format.storage != "uint4" or part.format.order != "row":
            return "AWQ has four bits, and groups of neighbouring columns"
        if part.rows % 8 or part.columns % 2 or part.format.group % 2:
            return "its rows are no multiple of 8, or its columns or groups odd"
        return None

    def headers(self, part: WeightPart) -> Headers:
        stem, groups = part.name.removesuffix(".weight"), part.format.row_scales(part.columns)
        return {
            f"{stem}.qweight": ("int32", (part.columns, part.rows // 8)),
            f"{stem}.qzeros": ("int32", (groups, part.rows // 8)),
            f"{stem}.scales": (str(part.format.scale), (groups, part.rows)),
        }

    def tensors(self, part: WeightPart) -> Mapping[str, torch.Tensor]:
        stem, (numbers, zeros, scales) = part.name.removesuffix(".weight"), _unsigned(part)
        return {
            f"{stem}.qweight": in_words(numbers.T), f"{stem}.qzeros": in_words(zeros.T),
            f"{stem}.scales": scales.T.contiguous(),
        }  # fmt: skip

    def settings(self, parts: Sequence[WeightPart], kept: Sequence[str], method: str) -> Mapping[str, Any]:
        stems = [name.removesuffix(".weight") for name in kept]
        return {
            "quant_method": "awq", "bits": 4, "group_size": _group(self.name, parts), "version": "gemm",
            "zero_point": True, "modules_to_not_convert": [*([] if _has_head(parts) else ["lm_head"]), *stems],
        }  # fmt: skip


class HalvesLayout(Layout):
    """What the scheme "halves" reads."""

    name = HALVES

    def _refusal(self, part: WeightPart) -> str | None:
        form = part.format
        if form.order != "row":
            return "it is in act-order, which this layout does not have"
        if form.storage == "int8":
            return "it has zero points, which this layout has only for four bits" if form.zero else None
        return "its columns are odd" if part.columns % 2 else None

    def headers(self, part: WeightPart) -> Headers:
        stem, form = part.name.removesuffix(".weight"), part.format
        scales = (str(form.scale), (form.row_scales(part.columns), part.rows))
        if form.storage == "int8":
            return {f"{stem}.qweight": ("int8", (part.rows, part.columns)), f"{stem}.scales": scales}
        width = -(-part.columns // RUN) * RUN // 2
        return {f"{stem}.qweight": ("uint8", (part.rows, width)), f"{stem}.qzeros": scales, f"{stem}.scales": scales}

    def tensors(self, part: WeightPart) -> Mapping[str, torch.Tensor]:
        stem = part.name.removesuffix(".weight")
        if part.format.storage == "int8":
            scale = part.tensors["scale"].reshape(part.rows, -1)
            return {f"{stem}.qweight": part.tensors["weight"], f"{stem}.scales": scale.T.contiguous()}
        numbers, zeros, scales = _unsigned(part)
        products = (zeros.to(scales.dtype) * scales).T.contiguous()
        if not bool(products.isfinite().all()):
            raise ConfigError(
                f"quant={self.name}: zero points of {part.name} times its scales are too large for {part.format.scale}"
            )
        scales = scales.T.contiguous()
        return {f"{stem}.qweight": in_runs(numbers), f"{stem}.qzeros": products, f"{stem}.scales": scales}

    def settings(self, parts: Sequence[WeightPart], kept: Sequence[str], method: str) -> Mapping[str, Any]:
        bits = {bits_of(part) for part in parts}
        if len(bits) > 1:
            raise ConfigError(f"quant={self.name}: some matrices have 4 bits and others 8; leave quant=auto")
        group = _group(self.name, parts)
        for part in parts if bits == {4} else ():
            if part.columns % RUN and (group < 0 or part.columns % group):
                raise ConfigError(
                    f"quant={self.name}: the {part.columns} columns of {part.name} are no multiple of {RUN} or of "
                    "their groups, so a reader could not tell how many there are; leave quant=auto"
                )
        symmetric = all(part.format.zero is None for part in parts)
        common = {"bits": bits.pop(), "group_size": group, "layout": self.name}
        if common["bits"] == 8:
            return {"quant_method": "w8a16", **common}
        if method == "awq" or not symmetric:
            return {"quant_method": method if method == "awq" else "gptq", **common, "sym": False, "desc_act": False}
        return {"quant_method": "gptq", **common, "sym": True, "desc_act": False}


LAYOUTS: Mapping[str, Layout] = {each.name: each for each in (GptqLayout(), AwqLayout(), HalvesLayout())}


def _unsigned(part: WeightPart) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Numbers uint8 [rows, columns], zero points uint8 [rows, groups] and scales [rows, groups] of an arranged part."""
    import torch

    stored, scales = part.tensors, part.tensors["scale"].reshape(part.rows, -1)
    zeros = stored["zero"] if part.format.zero else torch.zeros_like(scales, dtype=torch.int8)
    if part.format.storage == "int8":
        return stored["weight"].view(torch.uint8) ^ 128, zeros.view(torch.uint8) ^ 128, scales
    numbers = torch.stack((stored["weight"] & 15, stored["weight"] >> 4), -1).flatten(-2)
    return numbers, zeros if part.format.zero else torch.full_like(zeros, 8, dtype=torch.uint8), scales


def _has_head(parts: Sequence[WeightPart]) -> bool:
    """Whether the head is among them. Other readers ask the config for it, not the tensors."""
    return any(part.name.endswith("lm_head.weight") for part in parts)


def _usual_group(parts: Sequence[WeightPart]) -> int:
    """The group that most parts have which are not of whole rows; 0: all are."""
    found = Counter(part.format.group for part in parts if part.format.group)
    return found.most_common(1)[0][0] if found else 0


def _said_group(part: WeightPart, usual: int) -> int:
    """The ``group_size`` of a part: ``usual`` also for rows that are no longer than that; -1: whole rows."""
    return usual if not part.format.group and usual >= part.columns else part.format.group or -1


def _group(name: str, parts: Sequence[WeightPart]) -> int:
    """The ``group_size`` of all parts.

    Raises:
        ConfigError: they have different ones.
    """
    usual = _usual_group(parts)
    for part in parts:
        if _said_group(part, usual) != (usual or -1):
            raise ConfigError(
                f"quant={name}: {part.name} has groups of {part.format.group or part.columns} columns and others of "
                f"{usual}, and this layout has one size; leave quant=auto, or take quant=gptq"
            )
    return usual or -1
