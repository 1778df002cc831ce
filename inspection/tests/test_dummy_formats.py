"""Random quantized weights: in every format that core knows they have the size of a plain model's weights."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from evener.contracts.quant import QuantFormat, Rounding, WeightPart
from evener.errors import CheckpointError
from evener_conformance.kit.cases.blocks import STORAGES, format_of, random_part, reference_dequantize, unit_of
from evener_inspection.dummy_formats import QuantizedNoise

HOST = torch.device("cpu")
STD = 0.02


@pytest.mark.parametrize("storage", STORAGES)
def test_random_weights_of_a_format_have_the_size_of_a_models_weights(storage: str) -> None:
    form = format_of(storage)
    part = WeightPart("layer.weight", 256, 1024 if form.groups == 0 else 2560, form)
    made = replace(part, tensors=QuantizedNoise(3, STD).tensors(part, HOST))
    numbers = reference_dequantize(made)
    assert numbers.shape == (256, part.columns) and bool(numbers.isfinite().all())
    assert STD / 2 < float(numbers.std()) < 2 * STD and float(numbers.mean().abs()) < STD / 2
    other = QuantizedNoise(3, STD).tensors(replace(part, name="another"), HOST)
    assert not torch.equal(other["weight"].view(torch.uint8), made.tensors["weight"].view(torch.uint8))


#: The others are blocks of the same making.
FEW = [pytest.param(s, marks=pytest.mark.slow) if s in ("q2_k", "q4_k", "q5_k", "q4_0", "q5_0", "q5_1") else s
       for s in STORAGES]  # fmt: skip


@pytest.mark.parametrize("storage", FEW)
def test_their_tensors_are_those_of_the_format(storage: str) -> None:
    wanted = random_part(storage, 256, 40 * max(128, unit_of(storage)), torch.Generator().manual_seed(1))
    made = QuantizedNoise(0, STD).tensors(replace(wanted, tensors={}), HOST)
    kinds = [{role: (t.dtype, tuple(t.shape)) for role, t in sorted(each.items())} for each in (made, wanted.tensors)]
    assert kinds[0] == kinds[1]


def test_each_group_of_a_whole_weight_in_act_order_has_its_columns() -> None:
    for columns in (256, 320):
        form = QuantFormat("uint4", 128, scale="float16", order="act", groups=-(-columns // 128))
        index = QuantizedNoise(0, STD).tensors(WeightPart("a", 2, columns, form), HOST)["group_index"]
        assert torch.bincount(index).tolist() == [128, 128, 64][: form.groups]


def test_a_fixed_scale_of_activations_is_more_than_zero_and_an_unknown_format_is_refused() -> None:
    form = QuantFormat("float8_e4m3fn", -1, scale="float32", activation=Rounding("float8_e4m3fn", -1))
    made = QuantizedNoise(0, STD).tensors(WeightPart("a", 32, 32, form), HOST)
    assert float(made["activation_scale"]) > 0 and made["scale"].shape == ()
    with pytest.raises(CheckpointError, match=r"load=dummy cannot fill a, which is stored as int3; use load=auto"):
        QuantizedNoise(0, STD).tensors(WeightPart("a", 32, 32, QuantFormat("int3", 32, scale="float16")), HOST)
