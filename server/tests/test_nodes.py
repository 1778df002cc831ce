"""One process on each machine: what torchrun is told, and what is wrong with the variables."""

from __future__ import annotations

import os
import sys

import pytest

from evener.errors import ConfigError
from evener_server.command import main
from evener_server.nodes import torchrun_args

NODE = {"WORLD_SIZE": "2", "NODE_RANK": "1", "MASTER_HOST": "10.0.0.1", "MASTER_PORT": "7000"}
TOLD = ["--nnodes=2", "--node_rank=1", "--master_addr=10.0.0.1", "--master_port=7000"]


@pytest.fixture(autouse=True)
def alone(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in (*NODE, "RANK"):
        monkeypatch.delenv(name, raising=False)


class ExecCalled(Exception):
    pass


def test_server_started_once_per_node_execs_torchrun_with_the_same_arguments(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def execv(path: str, words: list[str]) -> None:
        raise ExecCalled(path, words)

    monkeypatch.setattr(os, "execv", execv)
    typed = ["/m", "infer.tp_size=4", "--drain-timeout", "3", "--port", "8080", "serve.api_keys=sk-secret"]
    for name, value in NODE.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(ExecCalled) as became:
        main(typed)
    words = [*TOLD, "--nproc_per_node=2", "-m", "evener", "serve", *typed]
    assert became.value.args == (sys.executable, [sys.executable, "-m", "torch.distributed.run", *words])
    said = capsys.readouterr().err
    assert f"starting torchrun here: {' '.join(words[: -len(typed)])} …" in said and "sk-secret" not in said
    # Its own ranks have all these variables and torchrun's: they are none of it.
    for name in ("RANK", "LOCAL_RANK", "LOCAL_WORLD_SIZE"):
        monkeypatch.setenv(name, "1")
    with pytest.raises(ConfigError, match="MASTER_ADDR is not set; start them with torchrun"):
        main(typed)


def test_each_machine_has_its_part_of_the_ranks() -> None:
    assert torchrun_args(NODE, 8, 2) == [*TOLD, "--nproc_per_node=8"]
    assert torchrun_args(NODE, 1, 2) == [*TOLD, "--nproc_per_node=1"]
    with pytest.raises(
        ConfigError, match=r"3 ranks .* cannot be divided equally among WORLD_SIZE=2 machines; set infer.pp_size=2"
    ):
        torchrun_args(NODE, 3, 1)


@pytest.mark.parametrize("name", ["NODE_RANK", "MASTER_HOST", "MASTER_PORT"])
def test_a_variable_that_is_not_set_is_named(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for other in NODE.keys() - {name}:
        monkeypatch.setenv(other, NODE[other])
    with pytest.raises(ConfigError, match=f"ask for one process per machine, but {name} is not set; set WORLD"):
        main(["/m", "infer.pp_size=2"])


@pytest.mark.parametrize(
    ("name", "value", "words"),
    [
        ("NODE_RANK", "one", "NODE_RANK=one is not a number"),
        ("WORLD_SIZE", "-2", "WORLD_SIZE=-2 is not a number"),
        ("NODE_RANK", "2", "NODE_RANK=2 is not a machine of WORLD_SIZE=2; set it from 0 to 1"),
    ],
)
def test_a_variable_that_is_wrong_is_named(name: str, value: str, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        torchrun_args({**NODE, name: value}, 1, 2)
