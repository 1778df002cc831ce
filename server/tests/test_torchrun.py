"""Processes that torchrun has started: what its variables say, and how the ranks find the controller."""

from __future__ import annotations

import os

import pytest
from evener_torchrun.ranks import TorchrunEnv
from torch.distributed import HashStore

from evener.config import from_overrides
from evener.distributed.contact import Contact
from evener.distributed.world import RankPlacement, World
from evener.engine.processes.launch import join_ranks, join_script
from evener.errors import ConfigError
from evener.plugins.catalog import Catalog

STARTED = {"RANK": "5", "WORLD_SIZE": "8", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "4", "MASTER_ADDR": "127.0.0.1",
           "MASTER_PORT": "29500"}  # fmt: skip


def test_torchrun_environment_is_read() -> None:
    torchrun = TorchrunEnv.from_environ(STARTED)
    assert torchrun == TorchrunEnv(5, 8, 1, 4, "127.0.0.1") and torchrun.interface == "127.0.0.1"
    assert TorchrunEnv(0, 2, 0, 2, "::1").interface == "[::1]"
    assert TorchrunEnv.from_environ({}) is None and TorchrunEnv.from_environ({**STARTED, "WORLD_SIZE": "1"}) is None
    with pytest.raises(ConfigError, match=r"MASTER_ADDR=no.such.machine.invalid cannot be resolved"):
        _ = TorchrunEnv(0, 2, 0, 2, "no.such.machine.invalid").interface


def test_incomplete_torchrun_environment_is_an_error() -> None:
    with pytest.raises(ConfigError, match=r"RANK=one is no number; start them with torchrun"):
        TorchrunEnv.from_environ({**STARTED, "RANK": "one"})
    del (rest := dict(STARTED))["MASTER_PORT"]
    with pytest.raises(ConfigError, match=r"WORLD_SIZE=8 .* MASTER_PORT is not set"):
        TorchrunEnv.from_environ(rest)


def test_only_one_engine_can_publish_its_address(monkeypatch: pytest.MonkeyPatch) -> None:
    store = HashStore()
    monkeypatch.setattr(TorchrunEnv, "_store", lambda _: store)
    torchrun = TorchrunEnv(0, 2, 0, 2, "127.0.0.1")
    torchrun.publish(Contact(["here", "there"]))
    assert torchrun.find() == Contact(["here", "there"])
    with pytest.raises(ConfigError, match="has already started an engine, and ranks of torchrun can only work for"):
        torchrun.publish(Contact(["elsewhere"]))


def test_a_rank_joins_the_others_at_its_place() -> None:
    place = TorchrunEnv(5, 8, 1, 4, "here").place(2, 4)
    assert place == RankPlacement(World.of(5, 2, 4), 1, 4, "env://")


def test_without_the_package_that_knows_torchrun_its_ranks_are_refused_and_a_process_alone_needs_none(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("evener.engine.processes.launch.installed_catalog", Catalog)
    config = from_overrides("/model", {"infer.tp_size": 8})
    with pytest.raises(ConfigError, match=r"WORLD_SIZE=8 says .* pip install evener-server, or unset WORLD_SIZE"):
        join_ranks(config, STARTED)
    join_ranks(config, {})
    for name in os.environ.keys() & STARTED:
        monkeypatch.delenv(name)
    join_script(config)
