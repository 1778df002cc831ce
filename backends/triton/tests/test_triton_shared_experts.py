"""One token's shared experts as choices that are always made."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, cast

import pytest
import torch
from interpreted import host_kernels, schemas

from evener.contracts.ops import Bucket, OpCall
from evener.contracts.statics import MoEStatic
from evener.layers.decoder import AttentionConfig
from evener.layers.experts import MoEConfig
from evener.layers.rotary import RotaryConfig
from evener.ops.reference.state import ReferenceState
from evener_conformance.kit.composites import TinyModel
from evener_conformance.kit.families import Family
from evener_conformance.reference.device import HostDevice
from evener_kernels_triton import single_token
from evener_kernels_triton.experts import TritonMoeBlock
from evener_kernels_triton.single_token import shared_choices
from evener_kernels_triton.tuning import Tuning

LARGE = Tuning(132, 227 << 10, False)
EXPERTS = MoEConfig(experts=6, top=2, inner=32, shared_inner=64)
ATTENTION = AttentionConfig(heads=2, kv_heads=1, head_dim=32, rotary=RotaryConfig(32))


@pytest.fixture(autouse=True)
def tiny_tensors(one_thread: None) -> None:
    """Every test here runs on one thread."""


def launched(monkeypatch: pytest.MonkeyPatch, tuning: Tuning, mlp: MoEConfig, dtype: str, **more: Any) -> list[int]:
    """The choices that are always made, of each launch of ``down`` while one token's layers agree with the
    reference."""
    family, every, seen = Family("shared", ATTENTION, mlp, hidden=96, **more), list(schemas().values()), list[int]()
    kernel = single_token.single_token_down_kernel

    class Recorded:
        def __getitem__(self, grid: tuple[int, ...]) -> Any:
            return lambda *args, **values: (seen.append(values["EXTRA"]), kernel[grid](*args, **values))

    monkeypatch.setattr(single_token, "single_token_down_kernel", Recorded())
    linears = [k for k in host_kernels(composite=False) if k.op == "linear"]
    block = TritonMoeBlock(HostDevice(0), tuning)
    model = TinyModel(HostDevice(0), dtype, family, [block, *linears], ReferenceState(), every)
    reference = TinyModel(HostDevice(0), "float32", family, (), ReferenceState(), every, model)
    noise, far = torch.Generator().manual_seed(8), 1e-3 if dtype == "float32" else 6e-2
    with torch.inference_mode():
        for before in (0, 1, 2):
            x = torch.randn(1, family.hidden, generator=noise)
            for got, want in zip(*(m.step(x, (before,), (1,)) for m in (model, reference)), strict=True):
                torch.testing.assert_close(got.float(), want, rtol=far, atol=far)
    return seen


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(
    ("changed", "more", "always"),
    [
        ({}, {}, 2),
        ({"shared_inner": 32}, {}, 1),
        ({"shared_gate": "gate", "scoring": "sigmoid", "correction": "correction", "scale": 2.5}, {}, 2),
        ({"inner": 48, "shared_inner": 96, "post_norm": "post_mlp"}, {"divided": True}, 2),
        ({"shared_inner": 48}, {}, 0),  # of another width
        ({"inner": 24, "shared_inner": 48}, {}, 0),  # rows that are not aligned
        ({"shared_inner": 96}, {}, 0),  # five choices in a tile of eight
    ],
    ids=["two", "one", "gated", "divided", "width", "alignment", "lines"],
)
def test_shared_experts_are_choices_where_they_fit(
    changed: Mapping[str, Any], more: Mapping[str, Any], always: int, dtype: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = launched(monkeypatch, LARGE, replace(EXPERTS, **changed), dtype, **more)
    assert set(found) == {always} and len(found) >= 6


def test_a_measured_change_gives_shared_experts_launches_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    apart = LARGE.with_changes({"shared.apart": 1})
    assert set(launched(monkeypatch, apart, EXPERTS, "float32")) == {0}


@pytest.mark.parametrize("stages", [1, 3])
def test_down_computes_the_same_with_tiles_under_way(stages: int, monkeypatch: pytest.MonkeyPatch) -> None:
    sizes = LARGE.with_changes({"down.stages": stages, "down.k": 16, "down.n": 4})
    assert set(launched(monkeypatch, sizes, replace(EXPERTS, inner=80, shared_inner=160), "float32")) == {2}


def test_a_model_with_shared_experts_has_their_own_launches_among_its_variants() -> None:
    model = TinyModel(
        HostDevice(0), "float32", Family("shared", ATTENTION, EXPERTS), (), ReferenceState(), list(schemas().values())
    )
    site = next(s for s in model.build.sites if s.op == "moe_block")
    static = cast(MoEStatic, site.static)
    assert shared_choices(LARGE, static) == 2
    found = TritonMoeBlock(HostDevice(0), LARGE).variants(
        OpCall("moe_block", site.static, Bucket(1, 1), HostDevice(0).capabilities)
    )
    assert {"shared.apart": 1} in found and {"down.stages": 3} in found
