"""The scheme "mxfp4": its numbers are transformers', its cuts are cuts of the numbers, and broken files are named."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest
import torch

from evener.contracts.quant import MXFP4, WeightPart, plain
from evener.errors import CheckpointError
from evener_formats.mxfp4 import Mxfp4Scheme

SCHEME = Mxfp4Scheme()
HEADERS = {
    "e.gate_blocks": ("uint8", (3, 10, 4, 16)), "e.gate_scales": ("uint8", (3, 10, 4)),
    "one_blocks": ("uint8", (6, 2, 16)), "one_scales": ("uint8", (6, 2)), "q": ("bfloat16", (5, 7)),
    "stack": ("bfloat16", (3, 5, 7)), "lone_blocks": ("uint8", (6, 2, 16)), "odd": ("uint8", (6, 2)),
    "flat_blocks": ("uint8", (6, 32)), "flat_scales": ("uint8", (6, 2)),
    "wide_blocks": ("uint8", (6, 2, 32)), "wide_scales": ("uint8", (6, 2)),
}  # fmt: skip


def random_part(rows: int, blocks: int, low: int = 0, high: int = 255) -> WeightPart:
    noise = torch.Generator().manual_seed(rows)
    weight = torch.randint(0, 256, (rows, blocks, 16), generator=noise, dtype=torch.uint8)
    scale = torch.randint(low, high, (rows, blocks), generator=noise, dtype=torch.uint8)
    return WeightPart("w", rows, blocks * 32, MXFP4, {"weight": weight, "scale": scale})


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_random_blocks_of_every_scale_dequantize_as_in_transformers(dtype: str) -> None:
    from transformers.integrations.mxfp4 import convert_moe_packed_tensors

    part = random_part(37, 60, low=8, high=248)
    blocks, scales = (part.tensors[role][None] for role in ("weight", "scale"))
    theirs = convert_moe_packed_tensors(blocks, scales, dtype=getattr(torch, dtype))[0].T
    ours = SCHEME.dequantize(part, dtype)
    assert ours.shape == (37, 1920) and ours.dtype == getattr(torch, dtype)
    assert len(ours.abs().unique()) > 400 and torch.equal(ours, theirs)


def test_a_block_is_sixteen_bytes_of_pairs_and_one_power_of_two() -> None:
    weight = torch.zeros(1, 2, 16, dtype=torch.uint8)
    weight[0, 0, 0], weight[0, 1, 15] = 0x72, 0xF1  # 1.0 then 6.0; 0.5 then -6.0
    scale = torch.tensor([[128, 126]], dtype=torch.uint8)
    row = SCHEME.dequantize(WeightPart("w", 1, 64, MXFP4, {"weight": weight, "scale": scale}), "float32")[0]
    assert row.nonzero().flatten().tolist() == [0, 1, 62, 63]
    assert row[row != 0].tolist() == [2.0, 12.0, 0.25, -3.0]


def test_largest_scale_is_nan() -> None:
    part = random_part(1, 2)
    part.tensors["scale"][0, 1] = 255
    assert SCHEME.dequantize(part, "float32").isnan().tolist() == [[False] * 32 + [True] * 32]
    assert [numbers.isnan().tolist() for numbers in SCHEME.numbers(part)] == [[[False, True]]]


def test_parts_are_read_from_headers_and_count_their_bytes() -> None:
    gate, one, q, stack = (SCHEME.part(name, HEADERS) for name in ("e.gate", "one", "q", "stack"))
    assert gate == WeightPart("e.gate", 10, 128, MXFP4) and one == WeightPart("one", 6, 64, MXFP4)
    assert q == WeightPart("q", 5, 7, plain("bfloat16")) and stack == WeightPart("stack", 5, 7, plain("bfloat16"))
    assert MXFP4.nbytes(10, 128) == 10 * 4 * 17 and not MXFP4.plain
    assert SCHEME.tensors("e.gate", HEADERS) == {"weight": "e.gate_blocks", "scale": "e.gate_scales"}
    assert SCHEME.part("nothing", HEADERS) is None and SCHEME.part("lone", HEADERS) is None
    assert SCHEME.detect({"quantization_config": {"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]}})
    assert not SCHEME.detect({"quantization_config": {"quant_method": "fp8"}}) and not SCHEME.detect({})


@pytest.mark.parametrize("name", ["flat", "wide", "odd"])
def test_a_tensor_of_a_wrong_dtype_or_shape_is_named(name: str) -> None:
    with pytest.raises(CheckpointError, match=rf"{name} is stored .*fetch the files again"):
        SCHEME.part(name, HEADERS)


@pytest.mark.parametrize(("axis", "start", "stop"), [("out", 3, 7), ("out", 0, 12), ("in", 32, 96), ("in", 0, 160)])
def test_a_cut_has_the_requested_numbers_and_stays_packed(axis: str, start: int, stop: int) -> None:
    part = random_part(12, 5)
    whole, cut = SCHEME.dequantize(part, "float32"), SCHEME.cut(part, axis, start, stop)  # type: ignore[arg-type]
    wanted = whole[start:stop] if axis == "out" else whole[:, start:stop]
    assert cut.format == MXFP4 and (cut.rows, cut.columns) == tuple(wanted.shape)
    assert sum(t.nbytes for t in cut.tensors.values()) == cut.format.nbytes(cut.rows, cut.columns)
    assert torch.equal(SCHEME.dequantize(cut, "float32"), wanted)
    bare = SCHEME.cut(replace(part, tensors={}), axis, start, stop)  # type: ignore[arg-type]
    assert (bare.rows, bare.columns) == (cut.rows, cut.columns)


def test_a_cut_inside_a_block_is_refused_with_the_sizes_that_fit() -> None:
    message = "cannot cut 40..96 out of the in-features of w: they are stored in blocks of 32, so both ends must be "
    with pytest.raises(CheckpointError, match=re.escape(message + "multiples of 32, such as 32 and 96")):
        SCHEME.cut(random_part(4, 5), "in", 40, 96)
    with pytest.raises(CheckpointError, match=r"cannot cut 0\.\.13 out of the 12 out-features of w"):
        SCHEME.cut(random_part(12, 5), "out", 0, 13)
    odd = WeightPart("q", 5, 7, plain("float32"), {"weight": torch.randn(5, 7)})
    assert SCHEME.cut(odd, "in", 1, 4).tensors["weight"].shape == (5, 3)
