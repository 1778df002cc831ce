"""Which sums of ranks go where; the sums themselves are checked on GPUs (``benchmarks/rank_check.py``)."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch

from evener_backend_cuda import communicator as module
from evener_backend_cuda.communicator import PEER_SUM_MAX_BYTES, open_communicator
from evener_backend_parts.gpu import connect_pairs
from evener_conformance.mirror_communicator import MirrorCommunicator
from evener_inspection.thread_communicator import ThreadCommunicator, run_on_threads


@pytest.fixture
def opened(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """What ``open_communicator`` does, over ranks that are not there."""
    told: dict[str, Any] = {"reachable": True, "peers": [], "connected": []}
    monkeypatch.setattr(
        module, "open_torch_communicator", lambda library, name, ranks, *_: MirrorCommunicator(len(ranks))
    )
    monkeypatch.setattr(module, "connect_pairs", lambda base, where: told["connected"].append(base))
    monkeypatch.setattr(module, "_can_access_peers", lambda base: told["reachable"])
    monkeypatch.setattr(module, "PeerCommunicator", lambda base, limit: told["peers"].append((base.size, limit)))
    return told


@pytest.mark.parametrize(
    ("name", "size", "reachable", "peers"),
    [("tp", 2, True, True), ("tp", 4, True, True), ("tp", 3, True, False), ("pp", 2, True, False),
     ("tp", 2, False, False)],
)  # fmt: skip
def test_small_all_reduces_use_peer_memory_only_for_connected_tp_ranks(
    name: str, size: int, reachable: bool, peers: bool, opened: dict[str, Any]
) -> None:
    opened["reachable"] = reachable
    end = open_communicator(name, range(size), 0, size, "file:///nowhere")
    assert opened["peers"] == ([(size, PEER_SUM_MAX_BYTES[size])] if peers else [])
    assert isinstance(end, MirrorCommunicator) != peers
    assert opened["connected"] == ([end] if name == "pp" else []), "stages meet before the first of them sends"


def test_connecting_all_pairs_in_both_directions_does_not_deadlock() -> None:
    sent: list[tuple[int, int]] = []

    class Meeting(ThreadCommunicator):
        """Who sends waits until it is received, as NCCL does for the first message from one rank to another."""

        def send(self, tensor: torch.Tensor, target: int) -> None:
            super().send(tensor, target)
            sent.append((self.rank, target))
            super().receive(tensor, target)

        def receive(self, tensor: torch.Tensor, source: int) -> torch.Tensor:
            super().receive(tensor, source)
            super().send(tensor, source)
            return tensor

    def work(end: ThreadCommunicator) -> None:
        end.__class__ = Meeting
        connect_pairs(end, torch.device("cpu"))

    run_on_threads(4, work)
    assert sorted(sent) == list(itertools.permutations(range(4), 2)), "streams go up and ids come down"
