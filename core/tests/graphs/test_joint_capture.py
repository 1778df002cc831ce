"""Tensor parallel ranks replay the same steps: if one of them cannot capture a step, none does."""

from __future__ import annotations

import threading
from dataclasses import replace
from typing import Any

import pytest
import torch
from rerun_capture import Again, Reruns

from evener.config import from_overrides, to_flat
from evener.distributed.communicators import JointCapture
from evener.engine.wire.messages import NewRequest, Sampling
from evener.errors import EngineError
from evener_conformance.graph.device import GraphDevice
from evener_conformance.rank_threads import rank_threads
from evener_conformance.reference.engine import play
from evener_inspection import thread_communicator


def test_a_capture_that_fails_on_one_rank_fails_on_all() -> None:
    inner = [Reruns(frozenset({1})), Reruns(frozenset({3})), Reruns(frozenset())]

    def one(group: Any) -> list[str]:
        capture, said = JointCapture(inner[group.rank], group, torch.device("cpu")), []
        for _ in range(5):
            try:
                said.append("held" if isinstance(capture.capture(lambda: None), Again) else "?")
            except EngineError as error:
                said.append(str(error))
        capture.release()
        return said

    first, second, third = thread_communicator.run_on_threads(3, one)
    full = "out of room for graphs"
    assert first == ["held", full, "held", "rank 1 of 3 cannot capture it", "held"]
    assert second == ["held", "rank 0 of 3 cannot capture it", "held", full, "held"]
    assert third == ["held", "rank 0 of 3 cannot capture it", "held", "rank 1 of 3 cannot capture it", "held"]
    assert all(capture.released for capture in inner)


@pytest.mark.parametrize(
    "fails", [{0}, {1}, pytest.param({2, 3}, marks=pytest.mark.slow)], ids=["forward", "sample", "two sizes"]
)
def test_tokens_are_right_where_one_rank_cannot_capture_some_steps(
    start: Any, monkeypatch: pytest.MonkeyPatch, fails: set[int]
) -> None:
    alone = start("Llama", **{"infer.use_cuda_graph": False})
    made: dict[str, Reruns] = {}

    class Device(GraphDevice):
        def __init__(self, *arguments: Any) -> None:
            super().__init__(*arguments)
            rank = threading.current_thread().name.removeprefix("evener-rank-")
            self.capture: Any = made.setdefault(rank, Reruns(frozenset(fails if rank == "1" else ())))

    monkeypatch.setattr("evener_conformance.graph.device.GraphDevice", Device)
    monkeypatch.setattr(
        thread_communicator, "_CAPABILITIES", replace(thread_communicator._CAPABILITIES, capturable=True)
    )
    flat = to_flat(alone.worker.assembly.config.config) | {"infer.use_cuda_graph": True, "infer.tp_size": 2}
    messages = [
        NewRequest(
            id=f"r{i}", prompt=list(range(1 + 7 * i, 9 + 9 * i)), max_tokens=9 + 3 * i,
            sampling=Sampling(temperature=0.0),
        )
        for i in range(5)
    ]  # fmt: skip
    with rank_threads(from_overrides(flat.pop("model"), flat)) as (controller, _):
        played = play(controller, messages, arrivals={message.id: i for i, message in enumerate(messages)})
    assert played.tokens == alone.play(messages, every=1)
    runs = [[replay.runs for replay in made[rank].replays] for rank in ("0", "1")]
    assert made["1"].asked > max(fails), "the failures came"
    # The other rank holds what it captured for nothing, and never runs it.
    assert sum(runs[0]) == sum(runs[1]) > 10 and 0 in runs[0]
