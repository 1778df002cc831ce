"""Every kind of matrix that the schemes read, in each layout that can store it: headers are predicted, and the
numbers stay."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from evener_quantize.layouts import LAYOUTS, Layout
from integer_files import headers_of

from evener.contracts.quant import WeightPart
from evener.errors import ConfigError
from evener_formats.plugin import evener_quant_schemes

NAME = "layers.0.example.weight"
SCHEMES = {scheme.name: scheme for scheme in evener_quant_schemes()}
#: How many of a scheme's own examples each layout can store.
STORED = {
    ("gptq", "awq"): 4, ("gptq", "halves"): 4, ("awq", "gptq"): 3, ("awq", "halves"): 2, ("halves", "gptq"): 5,
    ("halves", "awq"): 4, ("compressed-tensors", "gptq"): 8, ("compressed-tensors", "awq"): 4,
    ("compressed-tensors", "halves"): 5,
}  # fmt: skip


@pytest.mark.parametrize(("source", "target"), STORED)
def test_a_matrix_keeps_its_numbers_in_every_layout_that_can_store_it(source: str, target: str) -> None:
    layout, found = LAYOUTS[target], 0
    for config, headers, tensors in SCHEMES[source].examples(NAME, 3):
        scheme = SCHEMES[source].configured(config)
        part = scheme.part(NAME, headers)
        assert part is not None
        if part.format.plain or layout.refusal(part):
            continue
        full = replace(part, tensors={role: tensors[each] for role, each in scheme.tensors(NAME, headers).items()})
        try:
            read = stored(layout, scheme.arrange(full), source)
        except ConfigError as error:
            assert "no multiple of 128" in str(error)
            continue
        assert torch.equal(read, scheme.dequantize(full, "float32"))
        found += 1
    assert found == STORED[source, target]


def stored(layout: Layout, part: WeightPart, source: str) -> torch.Tensor:
    """The numbers of an arranged part, from what the layout made of it."""
    config = {"quantization_config": layout.settings([part], [], source)}
    made = layout.tensors(part)
    headers = headers_of(dict(made))
    assert headers == layout.headers(part)
    [reader] = [scheme for scheme in SCHEMES.values() if scheme.detect(config)]
    assert reader.name == layout.name
    scheme = reader.configured(config)
    found = scheme.part(NAME, headers)
    assert found is not None and (found.rows, found.columns) == (part.rows, part.columns)
    full = replace(found, tensors={role: made[each] for role, each in scheme.tensors(NAME, headers).items()})
    return scheme.dequantize(full, "float32")
