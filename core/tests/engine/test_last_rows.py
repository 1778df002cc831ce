"""The last layer computes the rows that a step samples from: fewer rows, the same tokens."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from itertools import count, repeat
from typing import Any

import pytest

from evener.backend_search import BackendSearch
from evener.contracts.outputs import PromptOutputs
from evener.engine.processes.start import build_controller
from evener.engine.wire.messages import NewRequest, Sampling
from evener.engine.worker.last_rows import LastRows, last_call
from evener.engine.worker.worker import Worker
from evener.resolution.manifest import Manifest
from evener_conformance.oracle import teacher_forced

#: A prompt of 21 tokens is two chunks of 8 and one of 5.
CHUNKED = {"infer.step_tokens": 8, "infer.max_reqs": 4, "infer.max_seq_len": 64}
#: One op for the last layer, two ops, norms behind both halves, and a mixer before experts.
FAMILIES = ["Llama", "Qwen3Moe", "Gemma2", "Qwen3Next"]


def requests(outputs: bool = False) -> list[NewRequest]:
    def sampling(n: int) -> Sampling:
        return Sampling(temperature=0.0, prompt_outputs=PromptOutputs("hidden", [(0, n)]) if outputs else None)

    return [NewRequest(id=f"r{n}", prompt=[*range(3, 3 + n)], max_tokens=4, sampling=sampling(n)) for n in (21, 5, 13)]


@pytest.fixture
def computed(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int]]:
    """(rows given, rows returned) of each call of a last layer's second half or, if it is one op, of the layer."""
    seen: list[tuple[int, int]] = []

    def watch(name: str, at: int) -> None:
        plain = getattr(LastRows, name)

        def call(self: LastRows, *args: Any) -> Any:
            given = len(args[at])
            result = plain(self, *args)
            seen.append((given, len(result[0])))
            return result

        monkeypatch.setattr(LastRows, name, call)

    watch("_second", 2)
    watch("_layer", 3)
    return seen


def tokens(config: Any, messages: Sequence[NewRequest], every: bool, play: Any) -> Any:
    controller, _ = build_controller(config)
    if every:
        controller.executor.worker.runner.last_rows = None  # type: ignore[attr-defined]
    return play(controller, messages).tokens


@pytest.mark.parametrize("family", FAMILIES)
def test_tokens_are_the_same_and_a_chunk_that_samples_nothing_computes_no_row(
    make_lively: Any, play: Any, computed: list[tuple[int, int]], family: str
) -> None:
    config = make_lively(family, **CHUNKED)
    fewer = tokens(config, requests(), False, play)
    picked, computed[:] = list(computed), []
    assert (8, 0) in picked and any(given > returned > 0 for given, returned in picked)
    assert fewer == tokens(config, requests(), True, play)
    assert computed and all(given == returned for given, returned in computed)


def test_a_request_that_wants_hidden_states_gets_those_of_all_tokens(
    make_lively: Any, play: Any, computed: list[tuple[int, int]]
) -> None:
    played = tokens(make_lively("Llama", **CHUNKED), requests(outputs=True), False, play)
    assert all(len(each) == 4 for each in played.values())
    assert computed and all(given == returned for given, returned in computed)


def test_who_runs_a_model_without_sampling_gets_all_rows(make_lively: Any) -> None:
    worker = Worker(make_lively("Llama", **{**CHUNKED, "infer.step_tokens": 64}), BackendSearch("reference"))
    assert worker.runner.last_rows is not None
    assert len(teacher_forced(worker, range(3, 12))) == 9


def test_a_layer_is_not_divided_where_the_reference_would_compute_a_part_of_it(
    make_lively: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    config, divided = make_lively("Llama", **CHUNKED), list[bool]()
    # The same op has fallen back before and after, or one more at each look.
    for numbers in (repeat(1), count()):
        monkeypatch.setattr(Manifest, "fallback_lines", lambda self, numbers=numbers: [f"linear (at {next(numbers)})"])
        a = Worker(config, BackendSearch("reference")).assembly
        site = last_call(a.model)
        assert site is not None
        divided.append(isinstance(site.table[0], partial))
    assert divided == [True, False]
