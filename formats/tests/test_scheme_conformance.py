"""The schemes of this package answer to the conformance kit, whose own numbers of blocks are the gguf library's."""

from __future__ import annotations

import gguf
import pytest
import torch

from evener.contracts.quant import BLOCKS, QuantScheme, WeightPart, block_format
from evener_conformance.kit.cases.blocks import random_part, reference_dequantize
from evener_conformance.kit.formats import scheme_results
from evener_conformance.kit.outcome import Check
from evener_formats.gguf.scheme import GgufScheme
from evener_formats.plugin import evener_quant_schemes


@pytest.mark.parametrize("scheme", evener_quant_schemes(), ids=lambda scheme: scheme.name)
def test_a_scheme_of_this_package_passes_the_kit(scheme: QuantScheme) -> None:
    found = list(scheme_results(Check("formats", scheme.name, "models", lambda: ()), scheme, 3))
    assert found and {r.outcome for r in found} == {"passed"}, [str(r) for r in found if r.outcome != "passed"]


@pytest.mark.parametrize("storage", BLOCKS)
def test_the_kit_dequantizes_blocks_as_the_gguf_library_does(storage: str) -> None:
    part = random_part(storage, 5, 768, torch.Generator().manual_seed(2))
    kind = gguf.GGMLQuantizationType[storage.upper()]
    theirs = torch.from_numpy(gguf.quants.dequantize(part.tensors["weight"].numpy(), kind)).reshape(5, 768)
    assert torch.equal(reference_dequantize(part), theirs)


@pytest.mark.parametrize("storage", BLOCKS)
def test_the_numbers_of_a_block_are_those_that_make_the_weights_nan(storage: str) -> None:
    scheme, (elements, nbytes) = GgufScheme(), BLOCKS[storage]
    nan = torch.tensor([torch.nan], dtype=torch.float16).view(torch.uint8)
    for at in range(0, nbytes - 1, 2):
        block = torch.zeros(1, nbytes, dtype=torch.uint8)
        block[0, at : at + 2] = nan
        part = WeightPart("w", 1, elements, block_format(storage), {"weight": block})
        spoilt = bool(scheme.dequantize(part, "float32").isnan().any())
        assert any(bool(numbers.isnan().any()) for numbers in scheme.numbers(part)) == spoilt, at
