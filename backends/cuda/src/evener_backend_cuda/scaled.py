"""Which of torch's products of float8_e4m3fn with scales this GPU has: it depends on the GPU, on torch and on the
version of CUDA that torch was built with, so each is tried."""

from __future__ import annotations

import logging
from collections.abc import MutableMapping

import torch

log = logging.getLogger("evener.cuda")
#: Rows and columns of the products that are tried, and of a block.
_ROWS, _COLUMNS, _BLOCK = 256, 512, 128
#: Their tokens: with scales of rows kernels ask for any number, with scales of blocks for multiples of 16.
_ROW_TOKENS, _BLOCK_TOKENS = (65, 128), (80, 128)
#: What torch's products may take for partial sums, in KiB, as NVIDIA advises for Hopper. With less than 8.4 MB the
#: library computes 4,096 x 12,288 with 256 tokens in 64 tiles: 37.5 µs on an H200, 28.3 with columns in two halves.
_PARTIAL_SUMS = ("CUBLASLT_WORKSPACE_SIZE", "32768")
#: The largest relative error of results in bfloat16.
_CLOSE = 2.0**-7


def allow_partial_sums(environ: MutableMapping[str, str]) -> str:
    """Let torch's products have memory for partial sums, unless the user said how much: torch asks the environment at
    the first one, and there is no other way to tell it. Returns a feature, the bytes."""
    kibibytes = environ.setdefault(*_PARTIAL_SUMS)
    return f"scaled-bytes:{int(kibibytes) << 10 if kibibytes.isdecimal() else 0}"


def scaled_features(device: torch.device) -> set[str]:
    """``scaled-rows`` if products have scales of rows, ``scaled-blocks`` if they have scales of 128 columns of a token
    and of 128 x 128 blocks of the weight. Why one is missing is logged."""
    found = set[str]()
    for feature, blocks in (("scaled-rows", False), ("scaled-blocks", True)):
        try:
            tried = (_try(device, tokens, blocks) for tokens in (_BLOCK_TOKENS if blocks else _ROW_TOKENS))
            reason = next(filter(None, tried), "")
        except (RuntimeError, ValueError, TypeError, AttributeError) as error:  # torch refuses in several ways
            reason = f"{type(error).__name__}: {error}".splitlines()[0]
        if reason:
            log.info("torch's product of float8 with scales of %s is not used: %s", feature.split("-")[1], reason)
        else:
            found.add(feature)
    return found


def _try(device: torch.device, tokens: int, blocks: bool) -> str:
    """Multiply numbers of which each row, column and block has others; what is wrong with the result, or ""."""
    x = (torch.arange(tokens * _COLUMNS, device=device) % 7 + 1.0).view(tokens, _COLUMNS)
    w = (torch.arange(_ROWS * _COLUMNS, device=device) % 5 + 1.0).view(_ROWS, _COLUMNS)
    groups, high = (_COLUMNS // _BLOCK, _BLOCK) if blocks else (1, 1)
    of_x = torch.arange(1.0, groups * tokens + 1, device=device).view(groups, tokens) / tokens
    of_w = torch.arange(1.0, groups * _ROWS // high + 1, device=device).view(_ROWS // high, groups)
    got = torch._scaled_mm(
        x.to(torch.float8_e4m3fn), w.to(torch.float8_e4m3fn).t(), scale_a=of_x.t() if blocks else of_x.view(-1, 1),
        scale_b=of_w.t(), out_dtype=torch.bfloat16,
    )  # fmt: skip
    wide = _COLUMNS // groups
    exact = (x * of_x.t().repeat_interleave(wide, 1)).double()
    want = exact @ (w * of_w.repeat_interleave(high, 0).repeat_interleave(wide, 1)).double().t()
    off = float(((got.double() - want).abs() / want).max())
    return "" if off <= _CLOSE else f"its results are off by {off:.3g}"
