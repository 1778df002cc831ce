"""Calls of mcoplib, against the schemas of its public source."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from stand_ins import installed, source_is_cited

from evener.contracts.ops import Bucket, Kernel, OpCall
from evener.ops.parts import load_reference
from evener.ops.schemas import PRIMITIVES
from evener_backend_muxi.chips import CHIPS, UNNAMED, capabilities, chip_of
from evener_backend_muxi.plugin import mcoplib
from evener_backend_parts.vllm_ops import VendorActAndMul, VendorNorm

NORM = {"hidden": 24, "eps": 1e-5, "offset": 0.0, "dtype": "bfloat16"}
ACT = {"inner": 24, "activation": "silu", "dtype": "bfloat16"}


def call(op: str, **static: Any) -> OpCall:
    return OpCall(op, {**(NORM if op == "rms_norm" else ACT), **static}, Bucket(1, 8), capabilities("C550", 104, 65536))


def kernel(op: str) -> Kernel:
    return (VendorNorm if op == "rms_norm" else VendorActAndMul)(mcoplib(), "mcoplib")


def test_every_schema_names_its_repository_commit_file_and_line_L1() -> None:
    assert source_is_cited(mcoplib().published)
    assert mcoplib().published.repository.endswith("MetaX-MACA/mcoplib")


@pytest.mark.parametrize(
    ("op", "static"), [("rms_norm", {}), *(("act_and_mul", {"activation": a}) for a in ("silu", "gelu", "gelu_tanh"))]
)
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_calls_fit_the_schema_and_compute_the_op_L1(op: str, static: Any, dtype: str, tmp_path: Path) -> None:
    asked = call(op, **static, dtype=dtype)
    with installed(tmp_path, mcoplib()):
        assert kernel(op).supports(asked) is None
        run = kernel(op).build(asked)
        schema = next(each for each in PRIMITIVES if each.name == op)
        torch.manual_seed(0)
        kind = getattr(torch, dtype)
        # Columns of a wider tensor: the vendor's ops want contiguous rows.
        inputs = [torch.randn(5, 60).to(kind)[:, : 24 if op == "rms_norm" else 48]]
        inputs += [torch.randn(24)] if op == "rms_norm" else []
        want = load_reference(schema)(asked.static, None)(*inputs)
        relative, absolute = schema.tolerance[dtype]
        torch.testing.assert_close(run(*inputs), want, rtol=relative, atol=absolute)
        assert run(*[t[:0] if t.dim() > 1 else t for t in inputs]).shape == want[:0].shape


@pytest.mark.parametrize(
    ("op", "change", "word"),
    [
        ("rms_norm", {"offset": 1.0}, "not by weight + 1.0"),
        ("rms_norm", {"dtype": "float32"}, "not in float32"),
        ("act_and_mul", {"activation": "clamped_swiglu"}, "not clamped_swiglu"),
    ],
)
def test_calls_that_the_vendors_op_does_not_compute_are_refused_L1(
    op: str, change: Any, word: str, tmp_path: Path
) -> None:
    with installed(tmp_path, mcoplib()):
        assert word in (kernel(op).supports(call(op, **change)) or "")


def test_without_mcoplib_its_kernels_say_so_L1() -> None:
    assert "mcoplib 0 or later is not installed" in (kernel("rms_norm").supports(call("rms_norm")) or "")


def test_wrong_arguments_do_not_pass_the_schema_L1(tmp_path: Path) -> None:
    x = torch.ones(1, 24)
    with installed(tmp_path, mcoplib()):
        norm = mcoplib().function("_C::rms_norm")
        for planted in (
            {"out": x, "input": x, "weight": x[0], "epsilon": 1e-5},
            {"result": x, "input": x, "weight": x[0], "epsilon": 1e-5, "residual": x},
            {"result": x, "input": x, "weight": x[0]},
            {"result": x, "input": x, "weight": x[0], "epsilon": "1e-5"},
        ):
            with pytest.raises((RuntimeError, TypeError)):
                norm(**planted)


@pytest.mark.parametrize(("name", "chip"), [("MetaX C500", "C500"), ("metax c550", "C550"), ("Device 4001", UNNAMED)])
def test_a_chip_is_told_by_its_name_L3(name: str, chip: str) -> None:
    assert chip_of(name) == chip
    assert capabilities(chip, 104, 65536).variant == chip
    assert "C550" in CHIPS
