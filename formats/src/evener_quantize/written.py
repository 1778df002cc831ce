"""The tensors of a quantized matrix as GPTQ and AWQ checkpoints store them, and what their ``config.json`` says."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from evener.contracts.checkpoint import Headers
from evener_formats.awq import in_words
from evener_formats.words import least_count, pack
from evener_quantize.settings import Settings

if TYPE_CHECKING:
    import torch

    from evener_quantize.rounding import Rounded

#: Rows that a word of zero points, or of AWQ's numbers, holds.
_WORD = 8


def rows_unit(settings: Settings) -> int:
    """The rows of a matrix must be a multiple of this."""
    return _WORD if settings.method == "awq" else least_count(settings.bits)


def headers_of(name: str, rows: int, columns: int, group: int, settings: Settings) -> Headers:
    """Names, dtypes and shapes of the tensors that are stored in place of the matrix ``name``."""
    stem, bits, groups = name.removesuffix(".weight"), settings.bits, columns // group
    if settings.method == "awq":
        return {
            f"{stem}.qweight": ("int32", (columns, rows // _WORD)),
            f"{stem}.qzeros": ("int32", (groups, rows // _WORD)),
            f"{stem}.scales": ("float16", (groups, rows)),
        }
    return {
        f"{stem}.qweight": ("int32", (columns * bits // 32, rows)),
        f"{stem}.qzeros": ("int32", (groups, rows * bits // 32)),
        f"{stem}.scales": ("float16", (groups, rows)),
        f"{stem}.g_idx": ("int32", (columns,)),
    }


def tensors_of(name: str, made: Rounded, settings: Settings) -> dict[str, torch.Tensor]:
    """These tensors, on the host."""
    stem, bits = name.removesuffix(".weight"), settings.bits
    scales = made.scales.T.contiguous().cpu()
    codes, zeros = made.codes.cpu(), made.zeros.cpu().T
    if settings.method == "awq":
        return {f"{stem}.qweight": in_words(codes.T), f"{stem}.qzeros": in_words(zeros), f"{stem}.scales": scales}
    return {
        f"{stem}.qweight": pack(codes, bits).T.contiguous(), f"{stem}.qzeros": pack(zeros - 1, bits),
        f"{stem}.scales": scales, f"{stem}.g_idx": made.index.cpu(),
    }  # fmt: skip


def quantization_config(settings: Settings, group: int, kept: Sequence[str]) -> Mapping[str, Any]:
    """The ``quantization_config`` of the result's ``config.json``.

    Args:
        group: columns of a group; 0: whole rows.
        kept: names of matrices that stay as they are, without the head.
    """
    stems = [name.removesuffix(".weight") for name in kept]
    common = {"quant_method": settings.method, "bits": settings.bits, "group_size": group or -1}
    if settings.method == "awq":
        return {**common, "version": "gemm", "zero_point": True, "modules_to_not_convert": ["lm_head", *stems]}
    act = settings.order == "groups"
    rules: Mapping[str, Any] = {"dynamic": {f"-:^{re.escape(stem)}$": {} for stem in stems}} if stems else {}
    return {
        **common, "checkpoint_format": "gptq", "desc_act": act and not settings.nearest, "sym": settings.symmetric,
        "lm_head": False, **rules,
    }  # fmt: skip
