"""The whole engine on the simulated device with every constraint on gives the reference backend's tokens."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from evener.engine.wire.messages import LogitBias, NewRequest, Sampling
from evener.errors import ConfigError
from evener_conformance.distributions import write_distribution

ONE_LAYER = {"num_hidden_layers": 1}
REFERENCE = {"backend": "reference"}
GREEDY = Sampling(temperature=0.0)
WARM = Sampling(temperature=0.9, top_p=0.9, seed=5)


def requests(count: int = 4, sampling: Sampling = GREEDY, tokens: int = 10) -> list[NewRequest]:
    """Prompts of 20 to 300 token ids below 97; every second one begins with the same 140."""
    shared = [7 * i % 89 + 1 for i in range(140)]
    prompts = [[*(shared if i % 2 else []), *(i + 3 * n % 71 for n in range(20 + 60 * i % 150))] for i in range(count)]
    return [NewRequest(id=f"r{i}", prompt=p, max_tokens=tokens + i, sampling=sampling) for i, p in enumerate(prompts)]


def both(start: Any, messages: Sequence[NewRequest], *args: Any, **options: Any) -> Any:
    """Run on the reference and on the simulated device and compare the tokens; returns the simulated run."""
    common = {k: v for k, v in options.items() if not k.startswith("simulated.")}
    want = start(*args, **{**common, **REFERENCE}).play(messages)
    run = start(*args, **options)
    got = run.play(messages)
    assert not got.dead, got.dead
    assert got.tokens == want.tokens and got.reasons() == want.reasons()
    return run


@pytest.mark.parametrize(
    ("depth", "sampling"),
    [(2, WARM), *(pytest.param(*case, marks=pytest.mark.slow) for case in ((1, WARM), (1, GREEDY), (2, GREEDY)))],
    ids=["2-sampled", "1-sampled", "1-greedy", "2-greedy"],
)
def test_every_constraint_is_on_and_the_tokens_are_right(start: Any, sampling: Sampling, depth: int) -> None:
    run = both(start, requests(sampling=sampling), "Llama", **{"infer.depth": depth})
    assert run.device.host_fallbacks() == 0, run.device.fallbacks()
    assert run.device.launch.launches["simulated.attend"] > 0
    assert run.worker.assembly.geometry.block_size == 128
    replays = run.device.capture.replays
    assert sum(r.runs for r in replays) > 5 and all(r.updates == r.runs for r in replays)


@pytest.mark.parametrize("chip", ["older", pytest.param("newer", marks=pytest.mark.slow)])
def test_chips_of_one_backend_differ_by_variant_types_and_captures(start: Any, chip: str) -> None:
    run = both(start, requests(6), "Llama", ONE_LAYER, **{"simulated.chip": chip, "infer.max_reqs": 6})
    can = run.device.capabilities
    assert can.variant == chip and ("bfloat16" in can.dtypes) == (chip == "newer")
    auto = start("Llama", {**ONE_LAYER, "torch_dtype": "bfloat16"}, **{"simulated.chip": chip, "dtype": "auto"})
    assert auto.worker.assembly.config.dtype == ("bfloat16" if chip == "newer" else "float32")
    refused = [c for c in run.worker.assembly.resolver.manifest.choices if c.op == "sample" and c.refused]
    assert bool(refused) == (chip == "older")


def test_a_dtype_that_a_chip_lacks_is_refused_with_those_that_it_has(start: Any) -> None:
    with pytest.raises(ConfigError, match="bfloat16"):
        start("Llama", ONE_LAYER, **{"simulated.chip": "older", "dtype": "bfloat16"})


def test_steps_beyond_the_limit_of_captures_run_eagerly_and_say_so(
    start: Any, caplog: pytest.LogCaptureFixture
) -> None:
    run = both(start, requests(6), "Llama", ONE_LAYER, **{"simulated.max_captures": 2, "infer.max_reqs": 6})
    assert len(run.device.capture.replays) == 2
    assert "holds 2 captures at once" in caplog.text


def test_windows_are_served_by_the_chips_own_layout(start: Any) -> None:
    run = both(start, requests(3), "Gemma3")
    assert {g.provider.name for g in run.worker.assembly.geometry.groups} == {"simulated.paged"}


@pytest.fixture
def mixed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """Installs the made-up model with every kind of state; returns its limits."""
    write_distribution(tmp_path / "mixed", "mixed", {"evener.plugins": {"mixed": "mixed_model:descriptor"}})
    monkeypatch.syspath_prepend(str(tmp_path / "mixed"))
    return {"infer.snapshot_every": 128, "infer.max_seq_len": 256}


def test_every_kind_of_state_lives_in_one_pool_of_large_blocks(start: Any, mixed: Any) -> None:
    run = both(start, requests(3), "Mixed", **mixed)
    providers = {g.spec.kind: g.provider.name for g in run.worker.assembly.geometry.groups}
    assert providers == dict.fromkeys(("full", "window", "chunk"), "simulated.paged") | dict.fromkeys(
        ("latent", "index", "recurrent"), "simulated.rows"
    )
    assert run.worker.assembly.geometry.block_size == 128
    assert run.device.host_fallbacks() == 0, run.device.fallbacks()


def test_ops_forced_onto_the_reference_fall_back_to_the_host_and_are_counted(start: Any, mixed: Any) -> None:
    run = both(start, requests(2), "Mixed", **mixed, **{"infer.attn_type": "ref"})
    assert {g.provider.name for g in run.worker.assembly.geometry.groups} == {"reference"}
    assert {"aten::sort", "aten::convolution"} <= run.device.fallbacks().keys(), "the chip has neither"


def test_every_sampling_option_runs_on_the_chip(start: Any) -> None:
    penalized = Sampling(
        temperature=0.7, seed=2, repetition_penalty=0.7, presence_penalty=0.5, bias=[LogitBias(5, 3.0)]
    )
    scored = NewRequest(id="p", prompt=[5, 6], max_tokens=5, sampling=Sampling(temperature=0.0, logprobs=3))
    messages = [*requests(2, penalized), scored]
    run = both(start, messages, "Llama", ONE_LAYER, **{"simulated.missing": "refuse"})
    assert {"simulated.penalize", "simulated.add_bias", "simulated.logprobs"} <= run.device.launch.launches.keys()


def test_expert_weights_are_in_the_chips_layout(start: Any) -> None:
    run = both(start, requests(2), "Qwen3Moe", **{"simulated.missing": "refuse"})
    assert run.device.launch.launches["simulated.grouped_linear"] > 0


def test_prefixes_of_whole_blocks_are_reused(start: Any) -> None:
    messages = requests(4)
    run = start("Llama", ONE_LAYER)
    played = run.play(messages, arrivals={"r3": 30})
    assert played.cached["r3"] == 128
    assert played.tokens == start("Llama", ONE_LAYER, **REFERENCE).play(messages, arrivals={"r3": 30}).tokens


def test_a_small_pool_preempts_and_the_tokens_stay_the_same(start: Any) -> None:
    messages = [NewRequest(id=f"r{i}", prompt=[3 + i] * 110, max_tokens=40, sampling=GREEDY) for i in range(4)]
    small = start("Llama", ONE_LAYER, **{"infer.depth": 1})
    small.shrink(5)
    played = small.play(messages)
    assert small.controller.scheduler.stats.preemptions > 0
    assert played.tokens == start("Llama", ONE_LAYER, **REFERENCE).play(messages).tokens


def test_aborts_give_every_block_back(start: Any) -> None:
    run = start("Llama", ONE_LAYER)
    played = run.play(requests(4, tokens=30), aborts={"r1": 2, "r2": 5})
    assert {n for n, why in played.reasons().items() if why == "abort"} == {"r1", "r2"}
    assert run.controller.scheduler.state.pool.used == 0


LIFTED = [
    {"simulated.block_128": False, "infer.block_size": 16},
    {"simulated.transposed_values": False},
    {"simulated.host_lengths": False, "simulated.graph_update": False},
    {"simulated.alignment": 1},
    {"simulated.int64": True},
    {"simulated.graphs": False},
    {"simulated.missing": "none"},
    {"simulated.host_reads": True},
]


@pytest.mark.parametrize("options", LIFTED, ids=lambda options: next(iter(options)))
def test_switching_a_constraint_off_changes_no_token(start: Any, options: dict[str, Any]) -> None:
    both(start, requests(2), "Llama", ONE_LAYER, **options)


def test_baked_lengths_without_an_update_are_never_captured(start: Any) -> None:
    run = both(start, requests(2), "Llama", ONE_LAYER, **{"simulated.graph_update": False})
    assert "steps run eagerly: simulated.paged cannot be captured" in run.notes and not run.device.capture.replays
