"""Schemes: unquantized tensors, how they are cut, and how a checkpoint's scheme is found."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest
import torch

from evener.errors import CheckpointError, UnknownNameError
from evener.loading.scheme import Unquantized, pick_scheme

FP8 = {"quantization_config": {"quant_method": "fp8"}}


class Fp8(Unquantized):
    name = "fp8"

    def detect(self, config: Mapping[str, Any]) -> bool:
        return config.get("quantization_config", {}).get("quant_method") == "fp8"


class OtherFp8(Fp8):
    name = "other"


def test_a_plain_checkpoint_is_unquantized() -> None:
    assert pick_scheme({}, [Fp8()]).name == "unquantized"
    assert pick_scheme({"quantization_config": None}, []).name == "unquantized"


def test_a_registered_scheme_is_detected() -> None:
    assert pick_scheme(FP8, [Fp8()]).name == "fp8"
    assert pick_scheme(FP8, [Fp8()], "fp8").name == "fp8"


@pytest.mark.parametrize("config", [FP8, {"compression_config": {"quant_method": "fp8"}}])
def test_an_unsupported_quant_method_raises_and_lists_installed_schemes(config: dict[str, Any]) -> None:
    with pytest.raises(CheckpointError, match=r"'fp8', which no installed package reads \(installed: unquantized\)"):
        pick_scheme(config, [])


def test_two_schemes_that_fit_one_checkpoint_are_an_error_that_names_both() -> None:
    with pytest.raises(CheckpointError, match="'fp8' and 'other' both fit"):
        pick_scheme(FP8, [Fp8(), OtherFp8()])


def test_a_scheme_asked_for_must_exist_and_fit() -> None:
    with pytest.raises(UnknownNameError, match="did you mean 'fp8'"):
        pick_scheme(FP8, [Fp8()], "fp88")
    with pytest.raises(CheckpointError, match="quant=fp8, but the checkpoint is stored as 'unquantized'"):
        pick_scheme({}, [Fp8()], "fp8")


def test_a_part_is_read_from_headers() -> None:
    part = Unquantized().part("a.weight", {"a.weight": ("float16", (3, 5))})
    assert part is not None
    assert (part.rows, part.columns, part.format.storage, part.format.plain) == (3, 5, "float16", True)
    assert Unquantized().part("b.weight", {}) is None


def test_a_quantized_tensor_without_a_quantization_config_is_refused() -> None:
    with pytest.raises(CheckpointError, match=r"stored as float8_e4m3fn, but config\.json has no quantization_config"):
        Unquantized().part("a.weight", {"a.weight": ("float8_e4m3fn", (3, 5))})


def test_slices_along_either_axis_reassemble_to_the_whole() -> None:
    scheme, whole = Unquantized(), torch.arange(35.0).view(7, 5)
    part = scheme.part("w", {"w": ("float32", (7, 5))})
    assert part is not None
    part = replace(part, tensors={"weight": whole})
    rows = [scheme.cut(part, "out", a, b) for a, b in ((0, 2), (2, 7))]
    columns = [scheme.cut(part, "in", a, b) for a, b in ((0, 4), (4, 5))]
    assert [(p.rows, p.columns) for p in (*rows, *columns)] == [(2, 5), (5, 5), (7, 4), (7, 1)]
    assert torch.equal(torch.cat([p.tensors["weight"] for p in rows]), whole)
    assert torch.equal(torch.cat([p.tensors["weight"] for p in columns], dim=1), whole)
    with pytest.raises(CheckpointError, match=r"cannot cut 3\.\.8 out of the 7 out-features of w"):
        scheme.cut(part, "out", 3, 8)


def test_none_reads_unquantized_weights_and_names_what_a_quantized_checkpoint_is() -> None:
    assert pick_scheme({}, [Fp8()], "none").name == "unquantized"
    with pytest.raises(CheckpointError, match="quant=none, but the checkpoint is stored as 'fp8'"):
        pick_scheme(FP8, [Fp8()], "none")


def test_an_unknown_scheme_lists_the_installed_ones() -> None:
    with pytest.raises(UnknownNameError, match=r"fp9.*did you mean 'fp8'"):
        pick_scheme({}, [Fp8()], "fp9")


def test_a_builtin_scheme_of_the_same_name_does_not_count_twice() -> None:
    assert pick_scheme({}, [Unquantized()]).name == "unquantized"
    assert pick_scheme({}, [Unquantized()], "none").name == "unquantized"
