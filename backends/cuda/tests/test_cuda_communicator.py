"""Which sums of ranks go where; the sums themselves are checked on GPUs (``benchmarks/rank_check.py``)."""

from __future__ import annotations

from typing import Any

import pytest

from evener.testing.communicators import Mirror
from evener_backend_cuda import communicator as module
from evener_backend_cuda.communicator import SMALL, open_communicator


@pytest.fixture
def opened(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """What ``open_communicator`` does, over ranks that are not there."""
    told: dict[str, Any] = {"reachable": True, "peers": []}
    monkeypatch.setattr(module, "open_torch_communicator", lambda library, name, ranks, *_: Mirror(len(ranks)))
    monkeypatch.setattr(module, "_reachable", lambda base: told["reachable"])
    monkeypatch.setattr(module, "PeerCommunicator", lambda base, limit: told["peers"].append((base.size, limit)))
    return told


@pytest.mark.parametrize(
    ("name", "size", "reachable", "peers"),
    [("tp", 2, True, True), ("tp", 4, True, True), ("tp", 3, True, False), ("pp", 2, True, False),
     ("tp", 2, False, False)],
)  # fmt: skip
def test_ranks_that_share_layers_and_reach_each_other_add_up_small_sums_themselves(
    name: str, size: int, reachable: bool, peers: bool, opened: dict[str, Any]
) -> None:
    opened["reachable"] = reachable
    end = open_communicator(name, range(size), 0, size, "file:///nowhere")
    assert opened["peers"] == ([(size, SMALL[size])] if peers else [])
    assert isinstance(end, Mirror) != peers
