"""bitsandbytes' four bits: the numbers of the published layout, written here; broken states are refused."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest
import torch
from integer_files import headers_of

from evener.contracts.checkpoint import Checkpoint
from evener.contracts.quant import WeightPart
from evener.errors import CheckpointError
from evener_conformance.kit.formats import scheme_results
from evener_conformance.kit.outcome import Check
from evener_formats.bitsandbytes import BitsAndBytesScheme

NAME, CONFIG = "a.weight", {"quantization_config": {"quant_method": "bitsandbytes", "load_in_4bit": True}}
STATE = {"quant_type": "nf4", "blocksize": 64, "dtype": "bfloat16", "shape": [3, 128]}


class Held(Checkpoint):
    """Tensors in memory."""

    def __init__(self, tensors: Mapping[str, torch.Tensor]) -> None:
        self._tensors = tensors

    @property
    def headers(self) -> Any:
        return headers_of(dict(self._tensors))

    def tensor(self, name: str) -> torch.Tensor:
        return self._tensors[name]

    def text(self, name: str) -> str | None:
        return None


def stored(state: Any, nested: bool = False) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
    """A weight of 3 x 128, and its values."""
    random = torch.Generator().manual_seed(1)
    codes = torch.randint(0, 16, (3 * 128,), generator=random)
    table = torch.linspace(-1, 1, 16)
    absmax = torch.rand(6, generator=random) + 0.5
    tensors = {f"{NAME}.absmax": absmax}
    if nested:
        numbers, second = torch.randint(0, 256, (6,), generator=random), torch.linspace(-1, 1, 256)
        absmax = second[numbers] * 0.25 + 0.75
        tensors = {
            f"{NAME}.absmax": numbers.to(torch.uint8), f"{NAME}.nested_quant_map": second,
            f"{NAME}.nested_absmax": torch.tensor([0.25]),
        }  # fmt: skip
    tensors |= {
        NAME: (codes[::2] * 16 + codes[1::2]).to(torch.uint8)[:, None], f"{NAME}.quant_map": table,
        f"{NAME}.quant_state.bitsandbytes__nf4": torch.tensor(list(json.dumps(state).encode()), dtype=torch.uint8),
    }  # fmt: skip
    values = (table[codes] * absmax.repeat_interleave(64)).reshape(3, 128)
    return tensors, values


def read(tensors: Mapping[str, torch.Tensor]) -> tuple[Any, WeightPart]:
    checkpoint = Held(tensors)
    scheme = BitsAndBytesScheme().configured(CONFIG, checkpoint)
    part = scheme.part(NAME, checkpoint.headers)
    assert part is not None
    roles = scheme.tensors(NAME, checkpoint.headers)
    assert set(roles.values()) == set(tensors)
    return scheme, replace(part, tensors={role: tensors[name] for role, name in roles.items()})


def test_numbers_are_those_of_the_table_times_the_scale_of_their_block() -> None:
    tensors, values = stored(STATE)
    scheme, part = read(tensors)
    assert torch.equal(scheme.dequantize(part, "float32"), values)
    assert torch.equal(scheme.dequantize(scheme.cut(part, "in", 64, 128), "float32"), values[:, 64:])


def test_scales_may_be_numbers_of_a_second_table() -> None:
    state = STATE | {"nested_blocksize": 256, "nested_dtype": "float32", "nested_offset": 0.75}
    tensors, values = stored(state, nested=True)
    scheme, part = read(tensors)
    assert torch.allclose(scheme.dequantize(part, "float32"), values, rtol=1e-6)


def test_the_kit_passes_the_scheme_with_its_examples_and_their_cuts() -> None:
    results = list(scheme_results(Check("formats", "linear", "mine", lambda: ()), BitsAndBytesScheme(), 5))
    assert [r.detail for r in results if r.outcome != "passed"] == [] and len(results) > 8


@pytest.mark.parametrize(
    "change",
    [
        {"shape": [3]}, {"shape": [3, -128]}, {"shape": [1 << 40, 1 << 40]}, {"shape": "3x128"}, {"blocksize": 0},
        {"blocksize": 63}, {"blocksize": "x"}, {"quant_type": "int2"}, {"shape": [3, 100]}, {"shape": [4, 128]},
        {"nested_blocksize": -1}, {"nested_blocksize": 256}, {"nested_blocksize": 256, "nested_offset": 1e999},
    ],
)  # fmt: skip
def test_states_that_do_not_fit_are_refused(change: Mapping[str, Any]) -> None:
    tensors, _ = stored(STATE | dict(change))
    with pytest.raises(CheckpointError, match="fetch the files again"):
        read(tensors)


@pytest.mark.parametrize("text", [b"", b"[]", b"\xff", b"{", b"[" * 4000, b'{"shape": [3, 128]}'])
def test_states_that_are_not_json_are_refused(text: bytes) -> None:
    tensors, _ = stored(STATE)
    tensors[f"{NAME}.quant_state.bitsandbytes__nf4"] = torch.tensor(list(text), dtype=torch.uint8)
    with pytest.raises(CheckpointError, match="fetch the files again"):
        read(tensors)


def eight_bits(**other: torch.Tensor) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
    """A weight of 3 x 128 in eight bits, and its values."""
    numbers = (torch.arange(3 * 128).reshape(3, 128) % 255 - 127).to(torch.int8)
    largest = torch.tensor([0.5, 1.0, 2.0])
    tensors = {NAME: numbers, "a.SCB": largest, "a.weight_format": torch.tensor(0, dtype=torch.uint8)}
    return tensors | other, numbers * largest[:, None] / 127


def test_eight_bits_are_parts_of_the_largest_magnitude_of_their_row() -> None:
    tensors, values = eight_bits()
    scheme, part = read(tensors)
    torch.testing.assert_close(scheme.dequantize(part, "float32"), values, rtol=1e-6, atol=0)
    cut = scheme.cut(scheme.cut(part, "out", 1, 3), "in", 8, 50)
    torch.testing.assert_close(scheme.dequantize(cut, "float32"), values[1:, 8:50], rtol=1e-6, atol=0)


@pytest.mark.parametrize(
    ("other", "says"),
    [({"a.SCB": torch.ones(4)}, r"float32 \[rows\]"), ({NAME: torch.ones(3, 128)}, r"stored as float32 \[3, 128\]"),
     ({"a.weight_format": torch.tensor(2, dtype=torch.uint8)}, "save it again")],
)  # fmt: skip
def test_eight_bits_that_do_not_fit_are_refused(other: dict[str, torch.Tensor], says: str) -> None:
    tensors, _ = eight_bits(**other)
    with pytest.raises(CheckpointError, match=says):
        scheme, part = read(tensors)
        scheme.arrange(part)
