"""A package with a fused kernel serves a model that was not edited: same tokens, four calls fewer a layer."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from types import FrameType
from typing import Any

import pytest

from evener.engine.controller.controller import Controller
from evener.engine.facts.manifest_report import OpChoice, Refusal
from evener.engine.processes.start import build_controller
from evener.engine.wire.messages import NewRequest, Sampling
from evener.errors import ResolveError
from evener_conformance.distributions import write_distribution
from evener_conformance.reference.engine import play

LAYERS = 3

DESCRIPTOR = """
from evener.contracts.descriptor import Descriptor, Option

descriptor = Descriptor(
    name="fused",
    summary="one kernel for everything before attention",
    contracts={"ops": 2},
    module="fused_package.kernels",
    ops=("norm_qkv_rotary_write",),
    needs=frozenset({"namespace:cpu"}),
    options={
        "up_to": Option(type=int, default=1 << 20, help="Most tokens of a step that it serves."),
        "layout": Option(type=str, default="reference", help="State layout that it writes."),
    },
)
"""

KERNELS = """
import torch

from evener.contracts.hooks import hookimpl
from evener.contracts.ops import Kernel


class FusedEntry(Kernel):
    op = "norm_qkv_rotary_write"
    name = "entry"

    def __init__(self, up_to, layout):
        self.up_to, self.state_layout = up_to, layout

    def supports(self, call):
        if call.static["qk_norm"] or call.static["interleaved"] or call.layouts["qkv"] != "plain":
            return "serves plain weights, no head norms and rotary by halves"
        return None if call.bucket.high <= self.up_to else f"serves at most {self.up_to} tokens"

    def build(self, call):
        s = call.static
        sizes = [s["heads"] * s["head_dim"], s["kv_heads"] * s["head_dim"], s["kv_heads"] * s["value_dim"]]

        def fused_entry(x, residual, positions, norm, qkv, bias, q_norm, k_norm, cos_sin, views, meta):
            stream = x.float() if residual is None else x + residual
            wide = stream
            wide = (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + s["eps"])).to(x.dtype) * norm
            q, k, v = torch.nn.functional.linear(wide, qkv.data, bias).split(sizes, -1)
            cos, sin = cos_sin.index_select(0, positions)[:, None].chunk(2, -1)
            q, k = (turn(t.unflatten(-1, (-1, s["head_dim"])), cos, sin) for t in (q, k))
            views[0][meta.blocks, meta.offsets] = k
            views[1][meta.blocks, meta.offsets] = v.unflatten(-1, (-1, s["value_dim"]))
            return q, stream

        return fused_entry


def turn(x, cos, sin):
    a, b = x.chunk(2, -1)
    return torch.cat((a * cos - b * sin, b * cos + a * sin), -1)


@hookimpl
def evener_kernels(device, options):
    return [FusedEntry(options["up_to"], options["layout"])]
"""


@pytest.fixture
def fused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The package installed into a folder of its own."""
    site = tmp_path / "site"
    package = site / "fused_package"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text(DESCRIPTOR, "utf-8")
    (package / "kernels.py").write_text(KERNELS, "utf-8")
    write_distribution(site, "evener-fused", {"evener.kernels": {"fused": "fused_package:descriptor"}})
    monkeypatch.syspath_prepend(str(site))
    yield
    for name in [n for n in sys.modules if n.partition(".")[0] == "fused_package"]:
        del sys.modules[name]


def messages() -> list[NewRequest]:
    prompts = [[5, 9, 2], list(range(40)), list(range(100, 119))]
    return [
        NewRequest(id=str(i), prompt=p, max_tokens=10, sampling=Sampling(temperature=0.0))
        for i, p in enumerate(prompts)
    ]


def tokens(controller: Controller) -> dict[str, list[int]]:
    return play(controller, messages()).tokens


def calls_of_one_step(controller: Controller) -> Counter[str]:
    """Python functions of ops and state that one decode step calls."""
    controller.handle([NewRequest(id="x", prompt=[1, 2, 3], max_tokens=8)])
    controller.step()
    controller.step()
    found: Counter[str] = Counter()

    def see(frame: FrameType, event: str, _: Any) -> None:
        module, name = frame.f_globals.get("__name__", ""), frame.f_code.co_name
        if event == "call" and name in ("run", "write", "fused_entry"):
            found[f"{module.rpartition('.')[2]}.{name}"] += 1

    sys.setprofile(see)
    try:
        controller.step()
    finally:
        sys.setprofile(None)
    return found


def ops(ready: Any, name: str) -> list[OpChoice]:
    return [row for row in ready.info.manifest.ops if row.op == name]


def test_a_composite_replaces_four_calls_of_a_model_that_was_not_edited(make_config: Any, fused: None) -> None:
    with_it, ready = build_controller(make_config())
    without, _ = build_controller(make_config(**{"ops.norm_qkv_rotary_write": "reference"}))
    (row,) = ops(ready, "norm_qkv_rotary_write")
    assert (row.provider, row.sites, row.refused) == ("fused/entry", LAYERS, [])
    assert tokens(with_it) == tokens(without)
    new, old = calls_of_one_step(with_it), calls_of_one_step(without)
    assert new["kernels.fused_entry"] == LAYERS and not old["kernels.fused_entry"]
    gone = {name: old[name] - new[name] for name in ("norm.run", "linear.run", "rotary.run", "state.write")}
    # The first layer has no residual to add: a bare norm instead of one inside add_rms_norm's run.
    assert gone == {"norm.run": 2 * LAYERS - 1, "linear.run": LAYERS, "rotary.run": LAYERS, "state.write": LAYERS}


def test_a_kernel_for_some_buckets_leaves_the_rest_to_the_expansion_with_equal_tokens(
    make_config: Any, fused: None
) -> None:
    some, ready = build_controller(make_config(**{"fused.up_to": 4}))
    ours, rest = ops(ready, "norm_qkv_rotary_write")
    assert (ours.provider, ours.buckets) == ("fused/entry", ["1", "2", "3..4"])
    assert (rest.provider, rest.buckets) == ("expanded", ["5..8", "9..16", "17..24"])
    assert rest.refused == [Refusal("fused/entry", "serves at most 4 tokens")]
    whole, _ = build_controller(make_config(**{"ops.norm_qkv_rotary_write": "reference"}))
    assert tokens(some) == tokens(whole)


def test_a_model_that_the_kernel_refuses_is_expanded_and_the_manifest_has_its_reason(
    make_config: Any, fused: None
) -> None:
    controller, ready = build_controller(make_config("Qwen3"))
    (row,) = ops(ready, "norm_qkv_rotary_write")
    assert row.provider == "expanded" and "head norms" in row.refused[0].reason
    assert all(len(answer) == 10 for answer in tokens(controller).values())


def test_a_kernel_for_another_state_layout_is_not_used(make_config: Any, fused: None) -> None:
    _, ready = build_controller(make_config(**{"fused.layout": "elsewhere"}))
    (row,) = ops(ready, "norm_qkv_rotary_write")
    assert row.provider == "expanded" and "'elsewhere'" in row.refused[0].reason


def test_an_engine_without_fallbacks_refuses_to_start_and_names_what_is_missing(make_config: Any, fused: None) -> None:
    with pytest.raises(ResolveError, match=r"max_fallback=none, but only the reference serves .*linear \(at 1\.\."):
        build_controller(make_config(max_fallback="none"))


@pytest.mark.parametrize("allowed", ["any", "listed"])
def test_fallbacks_that_are_to_be_listed_are_a_warning_each_when_the_engine_starts(
    allowed: str, make_config: Any, fused: None, caplog: pytest.LogCaptureFixture
) -> None:
    _, ready = build_controller(make_config(max_fallback=allowed))
    said = [r.getMessage() for r in caplog.records if r.levelname == "WARNING" and "only the reference" in r.message]
    ops = {line.removeprefix("only the reference serves ").split(" (at ")[0] for line in said}
    assert ops == (set(ready.info.manifest.fallbacks) if allowed == "listed" else set())  # type: ignore[index]
    assert len(said) == len(ops)


def test_the_manifest_lists_the_fallbacks(make_config: Any, fused: None) -> None:
    _, ready = build_controller(make_config())
    fallbacks = ready.info.manifest.fallbacks  # type: ignore[index]
    assert {"linear", "attention", "greedy"} <= set(fallbacks) and "rotary" not in fallbacks
