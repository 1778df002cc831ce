"""Groups of ranks on unlike devices: which are opened, and what they do with tensors of a device."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from evener_stages.host_groups import HostGroup, open_groups

from evener.backend_search import BackendSearch
from evener.contracts.communicator import Communicator
from evener.contracts.device import Device
from evener.distributed.world import RankGroups, RankPlacement, World
from evener_inspection.thread_communicator import ThreadCommunicator, run_on_threads

RANKS = 2


@pytest.fixture(scope="module")
def chip(simulated: None) -> Device:
    return BackendSearch("simulated").load({}).open_device(0)


def test_stages_on_different_backends_share_groups_in_host_memory_and_open_these_first(
    chip: Device, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened: list[tuple[str, str, Sequence[int]]] = []

    def factory(kind: str) -> Any:
        def opens(name: str, ranks: Sequence[int], *_: object) -> ThreadCommunicator:
            opened.append((kind, name, ranks))
            return run_on_threads(2, lambda group: group, name)[0]

        return opens

    monkeypatch.setattr("evener_stages.host_groups.open_host_group", factory("host"))
    place = RankPlacement(World.of(2, 2, 2), device=1, local_size=3)
    groups = open_groups(place, factory("own"), chip)
    assert opened == [("host", "pp", (0, 2)), ("host", "ids", (0, 2)), ("own", "tp", (2, 3))]
    assert (groups.device, groups.local_size) == (1, 3)
    assert isinstance(groups.pp, HostGroup) and isinstance(groups.ids, HostGroup)
    assert not isinstance(groups.tp, HostGroup), "devices of one backend have a library of their own"
    assert open_groups(groups, factory("own"), chip) == groups, "open groups stay"
    assert open_groups(RankGroups(), factory("own"), chip) == RankGroups()


@pytest.mark.parametrize(
    "call",
    [
        lambda group, mine: group.all_reduce(mine.clone()),
        lambda group, mine: group.all_gather(mine, 0),
        lambda group, mine: group.reduce_scatter(mine),
        lambda group, mine: group.all_to_all(mine, [3 - group.rank, 1 + group.rank], [3 - 2 * group.rank, 2]),
        lambda group, mine: group.broadcast(mine.clone(), 1),
        lambda group, mine: exchanged(group, mine, "isend", "irecv"),
        lambda group, mine: exchanged(group, mine, "send", "receive"),
    ],
)
def test_a_group_through_host_memory_does_with_a_devices_tensors_what_it_does_with_the_hosts(
    chip: Device, call: Callable[[Communicator, torch.Tensor], torch.Tensor]
) -> None:
    def each(where: torch.device) -> list[tuple[str, list[Any]]]:
        def run(group: ThreadCommunicator) -> tuple[str, list[Any]]:
            host = HostGroup(group, chip)
            assert (host.name, host.rank, host.size) == (group.name, group.rank, RANKS)
            mine = torch.arange(4.0).add(10 * group.rank).to(where)
            got = call(host, mine)
            host.barrier()
            return got.device.type, got.cpu().tolist()

        return run_on_threads(RANKS, run)

    on_host, on_chip = each(torch.device("cpu")), each(chip.torch_device)
    assert [kind for kind, _ in on_host] == ["cpu"] * RANKS
    assert [kind for kind, _ in on_chip] == [chip.torch_device.type] * RANKS and chip.torch_device.type != "cpu"
    assert [row for _, row in on_chip] == [row for _, row in on_host]
    assert [row for _, row in on_host] != [[0.0, 1.0, 2.0, 3.0], [10.0, 11.0, 12.0, 13.0]], "something was sent"


def exchanged(group: Communicator, mine: torch.Tensor, send: str, receive: str) -> torch.Tensor:
    """What the other rank has."""
    other = 1 - group.rank
    getattr(group, send)(mine, other)
    got = getattr(group, receive)(torch.zeros_like(mine), other)
    return got() if callable(got) else got
