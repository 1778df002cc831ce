"""Quantized keys and values in "cpu.paged": elements, attention, memory."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from evener.contracts.state import AttentionSpec, StateSpec, StateStep, StateTensor
from evener.state_pages.elements import quantize
from evener_backend_cpu.device import CpuDevice
from evener_backend_cpu.state import PagedState
from evener_conformance.kit.shapes import QUANTIZED, Shape
from evener_conformance.kit.state import check_provider

STORED = ["float8_e4m3fn", "float8_e5m2", "int8"]


def hostile_numbers() -> torch.Tensor:
    """Numbers [tokens, 2, 16]: every float8 and what lies just beside and in the middle of two, and far beyond."""
    every = torch.arange(256, dtype=torch.uint8)
    both = [every.view(getattr(torch, kind)).float() for kind in ("float8_e4m3fn", "float8_e5m2")]
    finite = torch.cat([kind[kind.isfinite()] for kind in both]).unique()
    middle = (finite[1:] + finite[:-1]) / 2
    middle = torch.cat((middle, torch.arange(-130, 130) + 0.5))
    found = torch.cat((finite, middle, middle * (1 + 2**-20), middle * (1 - 2**-20), middle / 3,
                       torch.tensor([1e30, -1e30, torch.inf, -torch.inf, torch.nan, 1e-30, -0.0, 0.0])))  # fmt: skip
    return torch.nn.functional.pad(found, (0, -len(found) % 32)).view(-1, 2, 16)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("stored", STORED)
def test_every_element_is_the_reference_s(device: CpuDevice, stored: str, dtype: str) -> None:
    values = hostile_numbers().to(getattr(torch, dtype))
    count = len(values)
    blocks = -(-count // 16) + 1
    spec = StateSpec("full", tuple(StateTensor(name, (2, 16), stored, dtype) for name in ("key", "value")))
    how, scales = AttentionSpec(2, 16, 0.25, dtype=dtype), [torch.tensor([1.0, 0.37]), torch.tensor([2.0, 0.011])]
    provider = PagedState(device)
    views = provider.bind_scaled(torch.zeros(blocks, 16 * spec.nbytes, dtype=torch.uint8), spec, 16, scales)
    table, at = torch.arange(1, blocks, dtype=torch.int32)[None], torch.arange(count)
    step = StateStep(
        tokens=count, requests=1, max_query=count, max_kv=count, block_table=table, positions=at,
        query_start=torch.tensor([0, count], dtype=torch.int32), kv_lens=torch.tensor([count], dtype=torch.int32),
        slot_mapping=at + 16, host_query_lens=[count], host_kv_lens=[count],
    )  # fmt: skip
    provider.write(views, provider.prepare(step, spec, how, 16), values, values)
    lanes = 2 if dtype == "bfloat16" else 1
    keys = views.keys.permute(0, 2, 4, 1, 3, 5).reshape(-1, 2, 16)[16 : 16 + count]
    rest = views.values.permute(0, 2, 3, 5, 1, 4).reshape(-1, 2, 16)[16 : 16 + count]
    assert views.keys.shape[-1] == lanes
    for got, scale in zip((keys, rest), scales, strict=True):
        want = quantize(values, scale, getattr(torch, stored))
        assert torch.equal(got.view(torch.uint8), want.view(torch.uint8))


@pytest.mark.parametrize("dtype", [pytest.param("float32", marks=pytest.mark.slow), "bfloat16"])
def test_it_keeps_the_contract_of_quantized_state(device: CpuDevice, dtype: str) -> None:
    report = check_provider(PagedState(device), device, dtype, QUANTIZED)
    assert report.problems == [] and report.refused == [] and len(report.checked) == len(QUANTIZED)


def test_a_block_has_one_byte_an_element(device: CpuDevice) -> None:
    shape = Shape(8, 2, 128, 64)
    spec, small = shape.spec("bfloat16"), replace(shape, stored="float8_e4m3fn").spec("bfloat16")
    provider = PagedState(device)
    assert provider.bytes_per_block(spec, 32) == 2 * provider.bytes_per_block(small, 32) == 32 * 2 * 192 * 2


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"dtype": "int8"}, "stores keys and values in one dtype, not int8 and float8_e4m3fn"),
        ({"wide": "float16"}, "computes and stores in float32 or bfloat16"),
    ],
)
def test_formats_that_it_cannot_mix_are_refused(device: CpuDevice, change: dict[str, Any], reason: str) -> None:
    key, value = Shape(2, 1, 32, 32, stored="float8_e4m3fn").spec("bfloat16").tensors
    spec = StateSpec("full", (replace(key, **change), value))
    refusal = PagedState(device).supports(spec, AttentionSpec(2, 32, 0.2, dtype="bfloat16"), device.capabilities)
    assert refusal is not None and reason in refusal


def test_scales_of_another_number_of_heads_are_refused(device: CpuDevice) -> None:
    spec = Shape(2, 2, 32, 32, stored="int8").spec("float32")
    storage = torch.zeros(2, 16 * spec.nbytes, dtype=torch.uint8)
    with pytest.raises(ValueError, match="the scale of the key is"):
        PagedState(device).bind_scaled(storage, spec, 16, [torch.ones(1), torch.ones(1)])
