"""The schemas that the quick tests use are those of torch_npu's binaries; calls pass the vendor's shape inference.

Levels L1 and L2."""

from __future__ import annotations

import os
import re
from pathlib import Path

import npu_reference
import pytest
import torch
import torch_npu  # noqa: F401 - registers the ops

from evener_backend_ascend import calls


def _without_spaces(schema: str) -> str:
    return re.sub(r"\s+", "", schema)


def test_recorded_schemas_are_those_that_torch_npu_registers_L1() -> None:
    for name, recorded in npu_reference.recorded_schemas("2.13").items():
        namespace, _, op = name.rpartition("::")
        registered = getattr(getattr(torch.ops, namespace or "npu"), op).default._schema
        assert str(torch._C.parse_schema(recorded if namespace else f"npu::{recorded}")) == str(registered)


def test_recorded_schemas_of_the_older_release_are_in_its_binary_L1() -> None:
    main = Path(os.environ["ASCEND_OLDER_LIBRARY"])
    binary = main.read_bytes() + (main.parent / "libop_plugin_atb.so").read_bytes()
    texts = {_without_spaces(t.decode()) for t in re.findall(rb"_?npu_\w+\([\x20-\x7e]+->[\x20-\x7e]+", binary)}
    recorded = npu_reference.recorded_schemas("2.11").items()
    missing = [n for n, s in recorded if _without_spaces(s).removeprefix("atb::") not in texts]
    assert missing == []


def _empty(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.empty(*shape, dtype=dtype, device="meta")


def test_calls_pass_the_vendors_shape_inference_L2() -> None:
    assert calls.rms_norm(_empty(6, 512), _empty(512), 1e-5).shape == (6, 512)
    wide = _empty(6, 512, dtype=torch.float32)
    assert [t.shape for t in calls.add_rms_norm(wide, wide, wide[0], 1e-5)] == [(6, 512)] * 2
    assert calls.swiglu(_empty(6, 512)).shape == (6, 256)
    assert calls.rotate(_empty(6, 8, 64), _empty(6, 64), _empty(6, 64), False).shape == (6, 8, 64)
    logits = _empty(6, 256, dtype=torch.float32)
    weights, ids = calls.gate_experts(
        logits, logits[0], top=8, groups=8, top_groups=4, group_best=2, sigmoid=True, scale=2.5
    )
    assert (weights.shape, ids.shape, ids.dtype) == ((6, 8), (6, 8), torch.int32)
    counts = _empty(4, dtype=torch.int64)
    assert calls.grouped_matmul(_empty(6, 64), _empty(4, 32, 64).transpose(1, 2), counts).shape == (6, 32)
    codes, scales = _empty(64, 32, dtype=torch.int8), _empty(32, dtype=torch.float32)
    for product in (calls.int8_matmul, calls.int8_weight_matmul):
        for dtype in (torch.float16, torch.bfloat16):
            found = product(_empty(6, 64, dtype=dtype), codes, scales, scales)
            assert (found.shape, found.dtype) == ((6, 32), dtype)
    fixed = _empty(3, dtype=torch.float32)
    for dtype in (torch.float16, torch.bfloat16):
        found = calls.int8_matmul(_empty(6, 64, dtype=dtype), codes, scales, scales, fixed)
        assert (found.shape, found.dtype) == ((6, 32), dtype)
    stack, stacked = _empty(4, 64, 32, dtype=torch.int8), _empty(4, 32, dtype=torch.float32)
    for product in (calls.grouped_int8_matmul, calls.grouped_int8_weight_matmul):
        for dtype in (torch.float16, torch.bfloat16):
            found = product(_empty(6, 64, dtype=dtype), stack, stacked, counts)
            assert (found.shape, found.dtype) == ((6, 32), dtype)
    found = calls.grouped_int8_matmul(_empty(6, 64), stack, stacked, counts, fixed)
    assert (found.shape, found.dtype) == ((6, 32), torch.bfloat16)
    key, pages = _empty(6, 2, 64), _empty(10, 128, 2, 64)
    calls.write_pages(key, key, pages, pages, _empty(6, dtype=torch.int32))


def test_the_fused_way_into_latent_space_passes_the_vendors_shape_inference_L2() -> None:
    """On every chip: the vendor's inference refuses 950 for the older forms of this kernel alone."""
    for tokens, heads in (1, 32), (18, 128):
        query, turned, latent, key = calls.latent_prolog(
            _empty(tokens, 7168), _empty(7168, 1536), _empty(1536, heads * 192), _empty(heads, 128, 512),
            _empty(7168, 576), _empty(1536), _empty(512), _empty(tokens, 64), _empty(tokens, 64), 1e-6,
        )  # fmt: skip
        assert (query.shape, turned.shape) == ((tokens, heads, 512), (tokens, heads, 64))
        assert (latent.shape, key.shape) == ((tokens, 512), (tokens, 64))
        assert {each.dtype for each in (query, turned, latent, key)} == {torch.bfloat16}


@pytest.mark.parametrize("window", [None, 100])
def test_attention_passes_the_vendors_shape_inference_L2(window: int | None) -> None:
    pages, mask = _empty(10, 128, 128), _empty(2048, 2048, dtype=torch.int8)
    common = {
        "scale": 0.1, "table": _empty(3, 4, dtype=torch.int32), "query_ends": [2, 4, 6], "kv_lens": [100, 200, 300],
        "mask": mask,
    }  # fmt: skip
    found = calls.attention(_empty(6, 8, 64), pages, pages, kv_heads=2, window=window, **common)  # type: ignore[arg-type]
    assert found.shape == (6, 8, 64)
    latents, ropes = _empty(10, 128, 512), _empty(10, 128, 64)
    found = calls.attention(_empty(6, 32, 512), latents, latents, kv_heads=1, query_rope=_empty(6, 32, 64),
                            key_rope=ropes, **common)  # type: ignore[arg-type]  # fmt: skip
    assert found.shape == (6, 32, 512)
