"""Ranks that share the vocabulary find the id of the largest logit without having all logits."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from evener.ops.ranks import vocab_greedy
from evener_inspection.thread_communicator import ThreadCommunicator, run_on_threads


def picked(logits: torch.Tensor, ranks: int) -> list[list[int]]:
    """The ids that each of ``ranks`` finds, which have neighbouring columns of ``logits``; the last may have fewer."""
    vocab = logits.shape[1]
    columns = -(-vocab // ranks)

    def work(end: ThreadCommunicator) -> list[int]:
        mine = logits[:, end.rank * columns : (end.rank + 1) * columns]

        def use(op: str, **static: Any) -> Any:
            inner = {"head": lambda: mine, "greedy": lambda x: x.argmax(-1), "all_gather": end.all_gather}
            assert op != "head" or (static["vocab"], static["communicator"]) == (mine.shape[1], None)
            return inner[op]

        static = {"vocab": vocab, "weight": SimpleNamespace(rows=mine.shape[1]), "communicator": end}
        return vocab_greedy(static, use)().tolist()  # type: ignore[no-any-return]

    return run_on_threads(ranks, work)


@pytest.mark.parametrize("ranks", [2, 3])
def test_every_rank_finds_the_id_that_one_rank_would(ranks: int) -> None:
    logits = torch.randn(40, 101, generator=torch.Generator().manual_seed(1))
    assert picked(logits, ranks) == [logits.argmax(-1).tolist()] * ranks


def test_the_lowest_id_wins_ties_across_ranks() -> None:
    logits = torch.zeros(4, 10)
    logits[1, [4, 7]] = 1.0
    logits[2, [5, 9]] = 2.0
    logits[3] = -float("inf")
    assert picked(logits, 2) == [[0, 4, 5, 0]] * 2
