"""The schemes "fp8" and "compressed-tensors": formats from headers, numbers, cuts, and files that do not fit."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest
import torch

from evener.contracts.quant import QuantFormat, Rounding, WeightPart, plain
from evener.errors import CheckpointError
from evener_formats.compressed import CompressedTensors
from evener_formats.scaled import Fp8Scheme

SCHEME = Fp8Scheme()
E4M3 = "float8_e4m3fn"


def part_of(rows: int, columns: int, scale: torch.Tensor) -> WeightPart:
    """A part as it comes from a file, with random numbers."""
    noise = torch.Generator().manual_seed(rows)
    weight = (torch.randn(rows, columns, generator=noise) * 20).to(torch.float8_e4m3fn)
    dtype = str(scale.dtype).removeprefix("torch.")
    headers = {"w": (E4M3, (rows, columns)), "w_scale_inv": (dtype, tuple(scale.shape))}
    part = SCHEME.part("w", headers)
    assert part is not None and SCHEME.tensors("w", headers) == {"weight": "w", "scale": "w_scale_inv"}
    return replace(part, tensors={"weight": weight, "scale": scale})


@pytest.mark.parametrize(
    ("shape", "scales", "group", "group_out"),
    [
        ((256, 384), (2, 3), 128, 128), ((200, 300), (2, 3), 128, 128), ((64, 64), (1, 4), 16, 128),
        ((96, 64), (3, 2), 32, 32), ((6, 10), (), -1, 1), ((6, 10), (1,), -1, 1), ((6, 10), (6,), 0, 1),
        ((6, 10), (6, 1), 0, 1), ((512, 512), (2, 2), 256, 256),
    ],
)  # fmt: skip
def test_scales_say_what_shares_them(
    shape: tuple[int, int], scales: tuple[int, ...], group: int, group_out: int
) -> None:
    part = SCHEME.part("w", {"w": (E4M3, shape), "w_scale": ("float32", scales)})
    assert part is not None
    form = part.format
    assert (part.rows, part.columns) == shape and (form.group, form.group_out) == (group, group_out)
    assert form.storage == E4M3 and form.scale == "float32" and not form.plain
    count = torch.zeros(scales).numel()
    assert abs(form.nbytes(*shape) - (shape[0] * shape[1] + 4 * count)) <= 1


def test_a_matrix_smaller_than_a_block_has_the_blocks_that_the_config_says() -> None:
    """A rank's part of a split model: one block of 16 rows is no block of 128."""
    headers = {"w": ("float8_e4m3fn", (16, 64)), "w_scale_inv": ("float32", (1, 4))}
    settings = {"quant_method": "fp8", "weight_block_size": [16, 16]}
    for said, high in ((settings, 16), ({"quant_method": "fp8"}, 128), (settings | {"weight_block_size": None}, 128)):
        part = Fp8Scheme().configured({"quantization_config": said}).part("w", headers)
        assert part is not None and (part.format.group_out, part.format.group) == (high, 16)


def test_each_number_is_multiplied_with_its_blocks_scale() -> None:
    part = part_of(200, 300, torch.tensor([[1.0, 2.0, 4.0], [8.0, 16.0, 32.0]]))
    stored, numbers = part.tensors["weight"].float(), SCHEME.dequantize(part, "float32")
    assert torch.equal(numbers[127, 127:129], stored[127, 127:129] * torch.tensor([1.0, 2.0]))
    assert torch.equal(numbers[128, 255:257], stored[128, 255:257] * torch.tensor([16.0, 32.0]))
    assert SCHEME.dequantize(part, "bfloat16").dtype == torch.bfloat16


def test_scales_that_are_powers_of_two_are_read() -> None:
    powers = torch.tensor([[0.5, 1.0], [2.0, 4.0]])
    part = part_of(256, 256, powers.to(torch.float8_e8m0fnu))
    expected = part.tensors["weight"].float() * powers.repeat_interleave(128, 0).repeat_interleave(128, 1)
    assert torch.equal(SCHEME.dequantize(part, "float32"), expected)


def test_a_large_matrix_is_dequantized_in_slices_of_whole_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    part = part_of(300, 200, torch.rand(3, 2))
    whole = SCHEME.dequantize(part, "float32")
    monkeypatch.setattr("evener_formats.scaled._SLICE", 1)
    assert torch.equal(SCHEME.dequantize(part, "float32"), whole)


@pytest.mark.parametrize(
    ("axis", "start", "stop"), [("out", 128, 300), ("in", 0, 128), ("in", 128, 200), ("out", 0, 256)]
)
def test_a_cut_has_the_numbers_of_that_piece(axis: str, start: int, stop: int) -> None:
    part = part_of(300, 200, torch.rand(3, 2))
    whole, cut = SCHEME.dequantize(part, "float32"), SCHEME.cut(part, axis, start, stop)  # type: ignore[arg-type]
    assert torch.equal(SCHEME.dequantize(cut, "float32"), whole[start:stop] if axis == "out" else whole[:, start:stop])


def test_a_cut_inside_of_a_block_says_which_sizes_are_possible() -> None:
    with pytest.raises(CheckpointError, match=r"multiples of 128, such as 0 and 128"):
        SCHEME.cut(part_of(300, 200, torch.rand(3, 2)), "out", 10, 100)
    with pytest.raises(CheckpointError, match=r"cannot cut 0..301"):
        SCHEME.cut(part_of(300, 200, torch.rand(3, 2)), "out", 0, 301)


def test_a_matrix_is_cut_anywhere_along_an_axis_without_shared_scales() -> None:
    part = part_of(6, 10, torch.rand(6, 1))
    whole = SCHEME.dequantize(part, "float32")
    assert torch.equal(SCHEME.dequantize(SCHEME.cut(part, "in", 3, 7), "float32"), whole[:, 3:7])
    assert torch.equal(SCHEME.dequantize(SCHEME.cut(part, "out", 2, 5), "float32"), whole[2:5])


@pytest.mark.parametrize(
    "headers",
    [
        {"w": (E4M3, (6, 10))},
        {"w": (E4M3, (6, 10)), "w_scale": ("float32", (5,))},
        {"w": (E4M3, (600, 10)), "w_scale": ("float32", (7, 1))},
        {"w": (E4M3, (6,)), "w_scale": ("float32", ())},
        {"w": (E4M3, (0, 10)), "w_scale": ("float32", ())},
        {"w": ("int64", (6, 10)), "w_scale": ("float32", ())},
        {"w": (E4M3, (6, 10)), "w_scale": ("int8", ())},
    ],
)
def test_files_that_do_not_fit_are_refused_with_the_tensors_name(
    headers: dict[str, tuple[str, tuple[int, ...]]],
) -> None:
    with pytest.raises(CheckpointError, match=r"w is stored as .*fetch the files again"):
        SCHEME.part("w", headers)


def test_zero_points_are_refused() -> None:
    headers = {"w": ("int8", (6, 10)), "w_scale": ("float32", (6, 1)), "w_zero_point": ("int8", (6, 1))}
    with pytest.raises(CheckpointError, match="zero points"):
        CompressedTensors().part("w", headers)


def test_weights_without_scales_are_unquantized_and_others_are_not_there() -> None:
    assert SCHEME.part("w", {"w": ("bfloat16", (5, 7))}) == WeightPart("w", 5, 7, plain("bfloat16"))
    assert SCHEME.part("w", {}) is None
    assert isinstance(plain("float32"), QuantFormat)


def test_each_scheme_takes_its_own_checkpoints() -> None:
    def config(method: str) -> dict[str, object]:
        return {"quantization_config": {"quant_method": method}}

    assert SCHEME.detect(config("fp8")) and SCHEME.detect(config("fbgemm_fp8"))
    assert CompressedTensors().detect(config("compressed-tensors")) and not SCHEME.detect(config("compressed-tensors"))
    assert not SCHEME.detect({}) and not SCHEME.detect({"quantization_config": "fp8"})


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"format": "marlin-24"}, "the format 'marlin-24'"),
        ({"format": "float-quantized", "config_groups": {"a": {"format": "marlin-24"}}}, "marlin-24"),
        ({"format": "int-quantized", "sparsity_config": {"format": "sparse-24-bitmask"}}, "sparse weights"),
        ({"format": "float-quantized", "transform_config": {"config_groups": {}}}, "transforms"),
    ],
)
def test_unread_settings_that_would_change_the_results_are_refused(settings: dict[str, object], said: str) -> None:
    with pytest.raises(CheckpointError, match=said):
        CompressedTensors().configured({"quantization_config": {"quant_method": "compressed-tensors", **settings}})


def test_scales_of_activations_belong_to_their_weight() -> None:
    headers = {"a.weight": (E4M3, (6, 10)), "a.weight_scale": ("float32", ()), "a.input_scale": ("float32", ())}
    assert SCHEME.tensors("a.weight", headers) == {
        "weight": "a.weight", "scale": "a.weight_scale", "activation_scale": "a.input_scale",
    }  # fmt: skip


FIXED_SCALE = {"a.input_scale": ("float32", ())}


def rounding_of(scheme: Any, more: Mapping[str, Any]) -> Rounding | None:
    """How activations may be rounded before products with a weight of 6 x 10, as a configured scheme says."""
    headers = {"a.weight": (E4M3, (6, 10)), "a.weight_scale": ("float32", (6, 1)), **more}
    found = scheme.part("a.weight", headers)
    assert found is not None
    return found.format.activation  # type: ignore[no-any-return]


@pytest.mark.parametrize(
    ("settings", "more", "want"),
    [
        ({"activation_scheme": "dynamic"}, {}, Rounding(E4M3)), ({}, {}, None),
        ({"activation_scheme": "static"}, FIXED_SCALE, Rounding(E4M3, -1)), ({"activation_scheme": "static"}, {}, None),
        ({"activation_scheme": "dynamic", "quant_method": "fbgemm_fp8"}, {}, None),
    ],
)  # fmt: skip
def test_the_scheme_fp8_says_how_activations_are_rounded(
    settings: dict[str, Any], more: dict[str, Any], want: Rounding | None
) -> None:
    scheme = SCHEME.configured({"quantization_config": {"quant_method": "fp8", **settings}})
    assert rounding_of(scheme, more) == want


def test_activations_have_scales_for_as_many_columns_as_blocks_of_the_weight() -> None:
    scheme = SCHEME.configured({"quantization_config": {"quant_method": "fp8", "activation_scheme": "dynamic"}})
    headers = {"a.weight": (E4M3, (256, 384)), "a.weight_scale_inv": ("float32", (2, 3))}
    found = scheme.part("a.weight", headers)
    assert found is not None and found.format.activation == Rounding(E4M3, 128)


@pytest.mark.parametrize(
    ("activations", "more", "want"),
    [
        ({"type": "float", "dynamic": True, "strategy": "token"}, {}, Rounding(E4M3)),
        ({"type": "int", "dynamic": True, "strategy": "token"}, {}, Rounding("int8")),
        ({"type": "float", "dynamic": True, "strategy": "tensor"}, {}, Rounding(E4M3)),
        ({"type": "float", "dynamic": True, "strategy": "group", "group_size": 128}, {}, Rounding(E4M3, 128)),
        ({"type": "float", "dynamic": False, "strategy": "tensor"}, FIXED_SCALE, Rounding(E4M3, -1)),
        ({"type": "int", "dynamic": False, "strategy": "tensor"}, FIXED_SCALE, Rounding("int8", -1)),
        ({"type": "int", "dynamic": False, "strategy": "tensor"},
         {**FIXED_SCALE, "a.input_zero_point": ("int8", ())}, None),
        ({"type": "int", "dynamic": True, "strategy": "token", "symmetric": False}, {}, None),
        ({"type": "float", "dynamic": False, "strategy": "channel"}, FIXED_SCALE, None),
        ({"type": "float", "dynamic": "local", "strategy": "token"}, {}, None),
        ({"type": "float", "num_bits": 4, "dynamic": True}, {}, None), (None, FIXED_SCALE, None),
    ],
)  # fmt: skip
def test_compressed_tensors_say_how_activations_are_rounded(
    activations: Any, more: dict[str, Any], want: Rounding | None
) -> None:
    how = {"num_bits": 8, "symmetric": True, **activations} if isinstance(activations, dict) else activations
    groups = {"group_0": {"targets": ["Linear"], "weights": {"num_bits": 8}, "input_activations": how}}
    settings = {"quant_method": "compressed-tensors", "format": "float-quantized", "config_groups": groups}
    assert rounding_of(CompressedTensors().configured({"quantization_config": settings}), more) == want


def test_a_scale_of_activations_that_is_not_a_single_number_is_refused_with_its_name() -> None:
    scheme = SCHEME.configured({"quantization_config": {"quant_method": "fp8", "activation_scheme": "static"}})
    for wrong in (("float32", (2,)), ("int8", ())):
        with pytest.raises(CheckpointError, match=r"a\.input_scale is stored as .*one number"):
            rounding_of(scheme, {"a.input_scale": wrong})


def test_a_scale_of_activations_is_more_than_zero() -> None:
    scheme = SCHEME.configured({"quantization_config": {"quant_method": "fp8", "activation_scheme": "static"}})
    headers = {"a.weight": (E4M3, (6, 10)), "a.weight_scale": ("float32", ()), **FIXED_SCALE}
    part = scheme.part("a.weight", headers)
    assert part is not None
    given = {"weight": torch.zeros(6, 10).to(torch.float8_e4m3fn), "scale": torch.ones(())}
    assert scheme.arrange(replace(part, tensors={**given, "activation_scale": torch.tensor([0.5])})).tensors
    for wrong in (0.0, -1.0):
        with pytest.raises(CheckpointError, match=r"input_scale of a\.weight"):
            scheme.arrange(replace(part, tensors={**given, "activation_scale": torch.tensor([wrong])}))


def test_a_scheme_of_before_that_names_only_the_element_type_means_a_scale_for_each_token() -> None:
    form = QuantFormat("int8", scale="float32", activation="int8")  # type: ignore[arg-type]
    assert form == QuantFormat("int8", scale="float32", activation=Rounding("int8"))
    assert form.nbytes(4, 8) == 4 * 8 + 4 * 4


def gptqmodel(**other: object) -> dict[str, object]:
    settings = {"quant_method": "fp8", "weight_scale_semantics": "inverse"}
    return {"quantization_config": settings | other}


def test_scales_of_gptqmodel_divide() -> None:
    numbers = torch.randn(6, 10, generator=torch.Generator().manual_seed(2)).to(torch.float8_e4m3fn)
    scale = torch.rand(6, generator=torch.Generator().manual_seed(3)) * 100 + 1
    scheme, headers = SCHEME.configured(gptqmodel()), {"w": (E4M3, (6, 10)), "w_scale_inv": ("float32", (6,))}
    part = scheme.part("w", headers)
    assert part is not None
    full = replace(part, tensors={"weight": numbers, "scale": scale})
    wanted = numbers.float() / scale[:, None]
    torch.testing.assert_close(scheme.dequantize(full, "float32"), wanted, rtol=1e-6, atol=0)
    arranged = scheme.arrange(full).tensors
    torch.testing.assert_close(arranged["weight"].float() * arranged["scale"][:, None], wanted, rtol=1e-6, atol=0)
    with pytest.raises(CheckpointError, match="which divides, is zero"):
        scheme.arrange(replace(part, tensors={"weight": numbers, "scale": torch.zeros(6)}))
    with pytest.raises(CheckpointError, match="scales that divide are read in float32"):
        scheme.part("w", headers | {"w_scale_inv": ("bfloat16", (6,))})
    with pytest.raises(CheckpointError, match="weight_scale_semantics 'other'"):
        SCHEME.configured(gptqmodel(weight_scale_semantics="other"))
