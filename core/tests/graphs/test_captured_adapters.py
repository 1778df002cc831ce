"""Captured steps of requests with adapters give the tokens of eager ones, also where one takes the place of another."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from evener.contracts.adapters import AdapterLimits, AdapterTensor
from evener.engine.wire.messages import LoadAdapter, NewRequest, Sampling

EAGER = {"infer.use_cuda_graph": False}
GREEDY, WARM = Sampling(temperature=0.0), Sampling(temperature=1.0, seed=5)


def adapter(name: str, limits: AdapterLimits | None, rank: int, seed: int) -> LoadAdapter:
    """Random matrices for all targets, large enough to change what is sampled."""
    assert limits is not None
    draw = torch.Generator().manual_seed(seed)

    def matrix(*shape: int) -> bytes:
        return torch.randn(shape, generator=draw).numpy().tobytes()

    tensors = [
        AdapterTensor(target, rank, 0.2 / rank, "float32", matrix(rank, columns), matrix(rows, rank))
        for target, (rows, columns) in limits.targets.items()
    ]
    return LoadAdapter(name, tensors)


def requests(names: list[str], sampling: Sampling) -> list[NewRequest]:
    return [
        NewRequest(id=f"{i}", prompt=list(range(5 + 3 * i, 9 + 4 * i)), max_tokens=10 + i, sampling=sampling,
                   adapter=name, cache_salt=name) for i, name in enumerate(names)
    ]  # fmt: skip


def played(run: Any, names: list[str], sampling: Sampling = GREEDY) -> dict[str, list[int]]:
    limits = run.worker.facts.info.adapters
    run.controller.handle([adapter(name, limits, rank, seed) for seed, (name, rank) in enumerate(RANKS.items())])
    return run.play(requests(names, sampling), every=2)  # type: ignore[no-any-return]


RANKS = {"a": 2, "b": 5, "c": 8}


@pytest.mark.parametrize("sampling", [GREEDY, pytest.param(WARM, marks=pytest.mark.slow)], ids=["greedy", "random"])
def test_captured_and_eager_tokens_of_adapters_are_equal(start: Any, sampling: Any) -> None:
    runs = [start(**{"infer.max_loras": 2, **options}) for options in ({}, EAGER)]
    names = ["a", "", "b", "a", "c", "", "b", "c"]
    captured, eager = (played(run, names, sampling) for run in runs)
    assert captured == eager
    plain = start().play(requests([""] * len(names), sampling), every=2)
    assert [captured[f"{i}"] == plain[f"{i}"] for i in range(len(names))] == [not name for name in names]
    kinds = {key.adapted for key in runs[0].worker.graphs._captured}
    assert kinds == {True, False} and sum(replay.runs for replay in runs[0].replays) > 10
    assert runs[1].replays == []


def test_steps_without_an_adapter_are_replayed_as_those_of_a_model_without_places(start: Any) -> None:
    run = start(**{"infer.max_loras": 1})
    names = [""] * 4
    assert played(run, names) == start().play(requests(names, GREEDY), every=2)
    assert {key.adapted for key in run.worker.graphs._captured} == {False}


def test_a_place_that_is_written_anew_is_read_anew_by_captures(start: Any) -> None:
    run = start(**{"infer.max_loras": 1})
    alone = {name: played(start(**{"infer.max_loras": 1}), [name])["0"] for name in RANKS}
    assert len({tuple(tokens) for tokens in alone.values()}) == 3
    found = []
    for number, name in enumerate(["a", "b", "c", "a"]):
        request = requests([name], GREEDY)[0]
        if not number:
            played(run, [])
        tokens = run.play([NewRequest(id=f"n{number}", prompt=request.prompt, max_tokens=request.max_tokens,
                                      sampling=GREEDY, adapter=name)])  # fmt: skip
        found.append(tokens[f"n{number}"])
    assert found == [alone[name] for name in ("a", "b", "c", "a")]
    kinds = [key.samples for key in run.worker.graphs._captured if key.adapted]
    assert sorted(kinds) == [False, True], "one capture of prompts and one of decode steps served all"
