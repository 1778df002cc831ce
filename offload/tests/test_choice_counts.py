"""In how many captured steps experts were chosen. Tensors of the host stand for those of the device."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from evener_offload import choice_counts
from evener_offload.choice_counts import ChoiceCounts, clearly


class Host:
    """What ``ChoiceCounts`` needs of a device. A readback is ready when it is asked for the second time."""

    @staticmethod
    def upload(array: np.ndarray[Any, Any]) -> torch.Tensor:
        return torch.from_numpy(array.copy())

    @staticmethod
    def readback(tensor: torch.Tensor) -> Any:
        ready, now = iter((False, True)), tensor.clone()
        return SimpleNamespace(ready=lambda: next(ready), wait=lambda: now)


def counts(layers: int = 2, experts: int = 6) -> ChoiceCounts:
    device: Any = Host()
    made = ChoiceCounts(device, layers, experts)
    made.prepare()
    return made


def step(made: ChoiceCounts, *ids: list[list[int]]) -> None:
    for layer, each in enumerate(ids):
        made.note(layer, torch.tensor(each, dtype=torch.int32))


def test_a_step_counts_once_however_many_tokens_choose_an_expert() -> None:
    made = counts()
    step(made, [[0, 1], [0, 2], [0, 1]], [[5, 4], [5, 4], [5, 4]])
    step(made, [[0, 3]], [[5, 0]])
    assert made._counts is not None
    assert made._counts.tolist() == [[2, 1, 1, 1, 0, 0], [1, 0, 0, 0, 1, 2]]


def test_counts_are_looked_at_now_and_then_and_age(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(choice_counts, "_REVIEW", 3)
    monkeypatch.setattr(choice_counts, "_AGEING", 0.5)
    made, new = counts(layers=1, experts=2), list[bool]()
    for _ in range(8):
        step(made, [[1]])
        new.append(made.replayed())
        if len(new) == 5:
            assert made.scores.tolist() == [[0.0, 3.0]], "of the steps before the look began"
    assert new == [False, False, False, False, True, False, False, True]
    assert made.scores.tolist() == [[0.0, 4.5]], "what is older counts for half"


def test_few_are_exchanged_before_it_is_known_how_long_one_takes(monkeypatch: pytest.MonkeyPatch) -> None:
    made = counts()
    assert made.most() == choice_counts._FIRST
    made.exchanged(4, 4e6)
    assert made.most() == 0
    made.exchanged(4, 4e-9)
    assert made.most() > 0


@pytest.mark.parametrize(("more", "less", "want"), [(8, 0, True), (7, 0, True), (6, 0, False), (20, 10, False),
                                                    (40, 10, True), (40, 30, False), (0, 0, False)])  # fmt: skip
def test_a_count_is_clearly_larger_if_chance_does_not_explain_it(more: int, less: int, want: bool) -> None:
    assert clearly(more, less) is want
