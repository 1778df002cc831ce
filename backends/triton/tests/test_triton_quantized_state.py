"""Quantized keys and values in "triton.paged", under the interpreter."""

from __future__ import annotations

import pytest
import torch
from interpreted import host_kernels, host_states, schemas

from evener.contracts.quantized.state import QuantizedState
from evener.contracts.state import AttentionSpec, StateSpec, StateStep, StateTensor
from evener.layers.decoder import AttentionConfig, MLPConfig
from evener.layers.rotary import RotaryConfig
from evener.ops.reference.state import ReferenceState
from evener.state_pages.elements import quantize
from evener_conformance.kit.composites import TinyModel
from evener_conformance.kit.families import Family
from evener_conformance.kit.shapes import QUANTIZED
from evener_conformance.kit.state import check_provider
from evener_conformance.reference.device import HostDevice

STORED = ["float8_e4m3fn", "float8_e5m2", "int8"]


def paged() -> QuantizedState:
    return next(provider for provider in host_states() if isinstance(provider, QuantizedState))


def hostile_numbers() -> torch.Tensor:
    """Numbers [tokens, 2, 16]: every float8 and what lies just beside and in the middle of two, and far beyond."""
    every = torch.arange(256, dtype=torch.uint8)
    both = [every.view(getattr(torch, kind)).float() for kind in ("float8_e4m3fn", "float8_e5m2")]
    finite = torch.cat([kind[kind.isfinite()] for kind in both]).unique()
    middle = torch.cat(((finite[1:] + finite[:-1]) / 2, torch.arange(-130, 130) + 0.5))
    found = torch.cat((finite, middle, middle * (1 + 2**-20), middle / 3,
                       torch.tensor([1e30, -1e30, torch.inf, -torch.inf, torch.nan, 1e-30, -0.0, 0.0])))  # fmt: skip
    return torch.nn.functional.pad(found, (0, -len(found) % 32)).view(-1, 2, 16)


@pytest.mark.parametrize("stored", STORED)
def test_every_element_is_the_reference_s(stored: str) -> None:
    values = hostile_numbers()
    count, provider = len(values), paged()
    blocks = -(-count // 16) + 1
    spec = StateSpec("full", tuple(StateTensor(name, (2, 16), stored, "float32") for name in ("key", "value")))
    scales = [torch.tensor([1.0, 0.37]), torch.tensor([2.0, 0.011])]
    views = provider.bind_scaled(torch.zeros(blocks, 16 * spec.nbytes, dtype=torch.uint8), spec, 16, scales)
    at = torch.arange(count, dtype=torch.int32)
    step = StateStep(
        tokens=count, requests=1, max_query=count, max_kv=count, positions=at, slot_mapping=at + 16,
        query_start=torch.tensor([0, count], dtype=torch.int32), kv_lens=torch.tensor([count], dtype=torch.int32),
        block_table=torch.arange(1, blocks, dtype=torch.int32)[None], host_query_lens=[count], host_kv_lens=[count],
    )  # fmt: skip
    provider.write(views, provider.prepare(step, spec, AttentionSpec(2, 16, 0.25), 16), values, values)
    for pages, scale in zip((views.keys, views.values), scales, strict=True):
        got = pages.transpose(1, 2).flatten(0, 1)[16 : 16 + count]
        want = quantize(values, scale, getattr(torch, stored))
        assert torch.equal(got.contiguous().view(torch.uint8), want.view(torch.uint8))


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_it_keeps_the_contract_of_quantized_state(dtype: str) -> None:
    report = check_provider(paged(), HostDevice(0), dtype, QUANTIZED)
    assert report.problems == [] and report.refused == [] and len(report.checked) == len(QUANTIZED)


@pytest.mark.parametrize("stored", ["float8_e4m3fn", "int8"])
def test_the_launch_after_a_projection_writes_elements_too(stored: str) -> None:
    """A key that is rounded elsewhere before it is divided may become the next element, so one step is allowed."""
    attention = AttentionConfig(heads=4, kv_heads=2, head_dim=32, rotary=RotaryConfig(32), qk_norm=True)
    family = Family("quantized", attention, MLPConfig(inner=64), hidden=64, state=stored)
    kernels = [k for k in host_kernels(composite=True) if k.op in ("attention_block", "norm_qkv_rotary_write")]
    every, place = list(schemas().values()), HostDevice(0)
    model = TinyModel(place, "float32", family, kernels, paged(), every)
    reference = TinyModel(place, "float32", family, (), ReferenceState(), every, model)
    served = [choice.provider for choice in model.resolver.manifest.choices if choice.op == "attention_block"]
    assert served and not {"expanded", "reference"} & set(served)
    noise = torch.Generator().manual_seed(6)
    for before, counts in (((0, 0), (5, 2)), ((5, 2), (1, 1))):
        x = torch.randn(sum(counts), family.hidden, generator=noise)
        with torch.inference_mode():
            got, want = (m.step(x, before, counts)[0] for m in (model, reference))
        assert (got - want).abs().max() <= 2e-2 * want.abs().max()
    have, need = (m.written((6, 3)) for m in (model, reference))
    assert have.keys() == need.keys() and len(need) == 8
    largest = max(max(part) for slot in model.build.slots for part in slot.scales)
    for name, numbers in need.items():
        step = largest if stored == "int8" else numbers.abs() / 8 + largest
        assert ((have[name] - numbers).abs() <= step * 1.01).all(), name
        assert (have[name] == numbers).float().mean() > 0.99
