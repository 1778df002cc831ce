"""``evener bench-engine``: an engine's steps, of all layers or of some, and the estimate for the whole model."""

from __future__ import annotations

import json
import weakref
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from evener.cli.main import main
from evener.config import from_overrides
from evener.engine.wire.messages import Finished, FromController, Tokens
from evener.engine.worker.worker import Worker
from evener_conformance.distributions import install_reference_backend
from evener_conformance.naive.model import find_architecture
from evener_inspection.kind_costs import CostRun, Costs, cost_runs, costs, estimate
from evener_inspection.layer_facts import LayerFacts, ModelFacts, model_facts
from evener_inspection.step_times import Load, TimedClient

SHORT = ("--batch-size", "1,3", "--input-len", "9", "--output-len", "5", "--repeats", "1", "--json")
DUMMY = ("load=dummy", "infer.kv_memory=4MiB", "infer.threads=1", "backend=reference")


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """``folder("LlamaForCausalLM", num_hidden_layers=4)``: a folder with only a config.json."""
    install_reference_backend(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))

    def make(name: str, **changes: Any) -> Path:
        path = tmp_path / "model"
        path.mkdir(exist_ok=True)
        shape = {**find_architecture(name).tiny_config(), "architectures": [name], **changes}
        (path / "config.json").write_text(json.dumps(shape))
        return path

    return make


def bench(capsys: Any, *words: object) -> dict[str, Any]:
    assert main(["bench-engine", *map(str, words), *SHORT, *DUMMY]) == 0
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    return found


DEEPSEEK = {"num_hidden_layers": 6, "num_attention_heads": 4, "num_key_value_heads": 4}


def test_some_layers_of_a_model_of_experts_are_timed_and_the_whole_is_estimated(folder: Any, capsys: Any) -> None:
    model = folder("DeepseekV3ForCausalLM", **DEEPSEEK)
    found = bench(capsys, model, "infer.layers=0,2-3")
    assert found["layers"] == [0, 2, 3] and found["layer_count"] == 6 and found["weights"] == "random"
    dense, experts = found["kinds"]
    assert dense["run"] == [0] and experts["run"] == [2, 3] and "experts" in experts["kind"]
    assert "3 of the model's 6 layers ran" in found["notes"][0] and "not the model's" in found["notes"][0]
    assert [row["batch_size"] for row in found["rows"]] == [1, 3]
    for row in found["rows"]:
        assert row["steps"] == 5 and 0 < row["step_ms"] <= row["step_p90_ms"] and row["prefill_s"] > 0
        assert [each["kind"] for each in row["by_layer"]] == [dense["kind"], experts["kind"], "the rest"]
        times = {each["kind"]: each["step_ms"] for each in row["by_layer"]}
        if None not in times.values():
            whole = times["the rest"] + times[dense["kind"]] * len(dense["layers"])
            whole += times[experts["kind"]] * len(experts["layers"])
            assert row["estimate"]["step_ms"] == pytest.approx(whole)
        else:  # so small layers may differ by less than chance, and then nothing is invented
            assert row["estimate"]["step_ms"] is None


def test_one_set_of_layers_has_left_the_device_before_the_next_is_loaded(
    folder: Any, capsys: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    workers: list[Any] = []
    was = Worker.__init__

    def watched(self: Worker, *args: Any, **kwargs: Any) -> None:
        workers.append((weakref.ref(self), [each() is None for each, _ in workers]))
        was(self, *args, **kwargs)

    monkeypatch.setattr(Worker, "__init__", watched)
    bench(capsys, folder("DeepseekV3ForCausalLM", **DEEPSEEK), "infer.layers=0,2-3")
    assert [gone for _, gone in workers] == [[], [True], [True, True]]


def test_two_ranks_run_some_layers(folder: Any, capsys: Any) -> None:
    model = folder("DeepseekV3ForCausalLM", **DEEPSEEK)
    found = bench(capsys, model, "infer.layers=0", "infer.tp_size=2", "executor=inline")
    assert found["tp_size"] == 2 and found["rows"][0]["step_ms"] > 0
    assert any("it takes two layers of a kind" in note for note in found["notes"])


def test_a_whole_model_is_timed_without_an_estimate_as_a_table(folder: Any, capsys: Any) -> None:
    model = folder("LlamaForCausalLM")
    assert main(["bench-engine", str(model), *SHORT[:-1], *DUMMY]) == 0
    said = capsys.readouterr().out
    assert "all layers" in said and "decode tok/s" in said and "estimated" not in said
    assert "infer.layers=0-3 runs some of them" in said


def test_the_table_of_some_layers_says_what_is_measured_and_what_is_not(folder: Any, capsys: Any) -> None:
    model = folder("LlamaForCausalLM", num_hidden_layers=4)
    assert main(["bench-engine", str(model), "infer.layers=1,3", *SHORT[:-1], *DUMMY]) == 0
    said = capsys.readouterr().out
    assert "measured, with 2 of 4 layers only" in said and "estimated for all 4 layers, not measured" in said


def test_layers_of_hybrid_models_are_told_apart_and_their_bytes_counted(folder: Any) -> None:
    model = folder("Qwen3NextForCausalLM")
    facts = model_facts(from_overrides(str(model), {"load": "dummy", "infer.layers": "3"}))
    kinds = facts.kinds()
    names = "recurrent state, experts", "recurrent state, dense", "full attention, experts"
    assert kinds == dict(zip(names, [[0, 1], [2], [3]], strict=True))
    first, last = facts.layers[0], facts.layers[3]
    # Recurrent state is read whole, whatever the context is.
    assert first.state_bytes(2, 10) == first.state_bytes(2, 1000) == 2 * first.state_bytes(1, 10)
    assert last.state_bytes(1, 20) == 2 * last.state_bytes(1, 10) > 0 and facts.head > 0


def test_experts_that_a_step_reads_grow_with_the_batch_up_to_all() -> None:
    layer = LayerFacts(0, "experts", 100, 8, 10, 2, ())
    assert layer.weight_bytes(1) == pytest.approx(100 + 2 * 10)
    assert layer.weight_bytes(2) == pytest.approx(100 + 8 * 10 * (1 - 0.75**2))
    assert layer.weight_bytes(1000) == pytest.approx(100 + 8 * 10)
    dense = LayerFacts(1, "dense", 100, 0, 0, 0, ())
    assert dense.weight_bytes(7) == 100
    assert ModelFacts((layer, dense), 5, 64).kinds() == {"experts": [0], "dense": [1]}


KINDS = {"dense": [0, 1, 2], "experts": list(range(3, 61))}


@pytest.mark.parametrize(
    ("chosen", "expected"),
    [
        ([0, 1, 5], [CostRun("dense", (5,), 2), CostRun("experts", (0, 1), 1)]),
        ([0, 1, 2], [CostRun("dense", (0,), 2)]),
        ([7], []),
    ],
)
def test_runs_with_fewer_layers_show_each_kinds_cost(chosen: list[int], expected: list[CostRun]) -> None:
    assert cost_runs(chosen, KINDS) == expected


@pytest.mark.parametrize("chosen", [[0, 1, 5], [0, 5, 6, 7], [2, 60]])
def test_costs_and_estimate_are_those_of_the_layers(chosen: list[int]) -> None:
    truth = {"dense": 3.0, "experts": 10.0}

    def step(layers: Sequence[int]) -> float:
        return 7.0 + sum(truth[kind] for n in layers for kind, numbers in KINDS.items() if n in numbers)

    held = {kind: len(set(chosen) & set(numbers)) for kind, numbers in KINDS.items()}
    found = costs(step(chosen), [(run, step(run.layers)) for run in cost_runs(chosen, KINDS)], held)
    assert found == Costs(truth, 7.0)
    assert estimate(found, {kind: len(numbers) for kind, numbers in KINDS.items()}) == step(range(61))


def test_a_cost_below_chance_or_of_a_kind_that_did_not_run_is_not_invented() -> None:
    found = costs(5.0, [(CostRun("dense", (0,), 2), 5.5)], {"dense": 3})
    assert found.layers == {"dense": None} and estimate(found, {"dense": 9}) is None
    assert estimate(Costs({"dense": 1.0}, 2.0), {"dense": 3, "experts": 58}) is None


class Played:
    """A client that gives these lists of events."""

    def __init__(self, *events: list[FromController]) -> None:
        self._events = list(events)

    def receive(self, timeout: float | None) -> list[FromController]:
        del timeout
        return self._events.pop(0)


def test_a_step_counts_once_for_each_request_that_got_a_token() -> None:
    done = Finished(id="b", reason="length")
    client = TimedClient(Played(  # type: ignore[arg-type]
        [Tokens(id="a", ids=[1]), Tokens(id="b", ids=[2])], [Tokens(id="a", ids=[])], [Tokens(id="b", ids=[3]), done],
    ))  # fmt: skip
    for _ in range(3):
        client.receive(None)
    assert [count for _, count in client.arrivals] == [2, 1]
    assert Load(4, 1000, 16).new_tokens(2048) == 16 + 2 + 2


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--batch-size", "0"], "--batch-size 0 is not valid; it takes a number from 1 to 4096"),
        (["--batch-size", "1,x"], "--batch-size x is not valid"),
        (["--input-len", "99999999999999999999"], "it takes a number from 1 to 1048576"),
        (["--repeats", "-1"], "--repeats -1 is not valid"),
        (["infer.layers=4"], "there is no layer 4|the model has layers 0 to 3"),
        (["infer.layers=a"], "'a' is no layer and no range of layers; write them as in 3-20,40"),
        (["infer.drafter=ngram"], "leave infer.drafter and infer.draft_model out"),
        (["infer.max_reqs=2", "--batch-size", "3"], "leave infer.max_reqs out"),
        (["infer.max_seq_len=16"], "infer.max_seq_len=16: leave it out"),
        (["--input-len", "5000"], "make requests of up to 50.. tokens, and the model has 256 positions: lower --input"),
    ],
)
def test_wrong_measurements_are_refused_with_what_to_type(
    words: list[str], message: str, folder: Any, capsys: Any
) -> None:
    import re

    model = folder("LlamaForCausalLM", num_hidden_layers=4)
    assert main(["bench-engine", str(model), *words, *DUMMY]) == 2
    assert re.search(message, capsys.readouterr().err)


def test_ranks_of_torchrun_are_refused(folder: Any, capsys: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert main(["bench-engine", str(folder("LlamaForCausalLM"))]) == 2
    assert "leave torchrun out, and set infer.tp_size=2" in capsys.readouterr().err
