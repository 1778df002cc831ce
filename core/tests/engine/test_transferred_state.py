"""Prompts computed by one engine and answered by another: the tokens are those of the naive engine, and nothing that was
fetched is computed again."""

from __future__ import annotations

import socket
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from evener.config.schema import Config
from evener.engine.controller.controller import Controller
from evener.engine.processes.start import build_controller
from evener.engine.wire.messages import Abort, GetStats, NewRequest, Sampling, StatsReport
from evener.errors import ConfigError
from evener_conformance.naive.model import NaiveModel
from evener_kv.transfer.connection import TransferError, connect
from evener_kv.transfer.messages import Done, Drop, Fetch, Found, Lookup, Read, Release, Released
from evener_kv.transfer.settings import Address

GREEDY = Sampling(temperature=0.0)
KEY = b"0123456789abcdef-key"


@pytest.fixture(autouse=True)
def tiny_tensors(one_thread: None) -> None:
    """Every test here runs on one thread."""


def free_ports(count: int) -> int:
    """The first of ``count`` free ports that follow one another."""
    while True:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            first = probe.getsockname()[1]
        try:
            for port in range(first, first + count):
                with socket.socket() as probe:
                    probe.bind(("127.0.0.1", port))
        except (OSError, OverflowError):
            continue
        return first


@pytest.fixture
def started(tmp_path: Path) -> Iterator[Callable[..., Controller]]:
    """``started(config, own, peers)``: an engine that shares blocks; ``own`` and ``peers`` are ports."""
    (tmp_path / "key").write_bytes(KEY)
    engines: list[Controller] = []

    def start(config: Config, own: int, *peers: int, key: str = "key", **more: Any) -> Controller:
        addresses = ",".join(f"127.0.0.1:{port}" for port in peers)
        offload = {"kv_transfer": f"127.0.0.1:{own}", "kv_peers": addresses or None,
                   "kv_key_file": str(tmp_path / key), **more}  # fmt: skip
        controller, _ = build_controller(replace(config, options={**config.options, "offload": offload}))
        engines.append(controller)
        return controller

    yield start
    for engine in engines:
        engine.close()


@pytest.fixture
def pair(started: Any) -> Callable[..., tuple[Controller, Controller, str]]:
    """``pair(config)``: what computes prompts, what answers, and the address of the first."""

    def start(config: Config, second: Config | None = None, **more: Any) -> tuple[Controller, Controller, str]:
        one, two = free_ports(4), free_ports(4)
        producer = started(config, one, **more)
        return producer, started(second or config, two, one, **more), f"127.0.0.1:{one}"

    return start


def prompts() -> list[list[int]]:
    """Of different lengths, two of which begin alike."""
    noise = torch.Generator().manual_seed(2)
    made = [torch.randint(3, 90, (length,), generator=noise).tolist() for length in (44, 37, 64, 49)]
    made[3] = made[0][:33] + made[3][:16]
    return made


def hold(controller: Controller, play: Any, prompt: list[int], name: str = "p") -> int:
    """Compute a prompt for another engine. Returns its first token."""
    message = NewRequest(id=name, prompt=list(prompt), max_tokens=1, sampling=GREEDY, transfer="hold")
    (token,) = play(controller, [message]).tokens[name]
    return int(token)


def counters(controller: Controller) -> dict[str, int]:
    (report,) = controller.handle([GetStats()])
    assert isinstance(report, StatsReport)
    return {**report.counters, **controller.scheduler.connector.counters}


CASES: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "full": ("Llama", {}, {}),
    "full, small steps": ("Llama", {"infer.depth": 3, "infer.step_tokens": 9}, {}),
    "window": ("Gemma3", {}, {}),
    "latent": ("DeepseekV3", {}, {}),
    "latent in 8 bits": ("DeepseekV3", {"infer.kv_dtype": "fp8_e4m3"}, {"state_dtype": "float8_e4m3fn"}),
    "sparse": ("DeepseekV32", {"infer.step_tokens": 7}, {}),
    "recurrent": ("Qwen3Next", {"infer.snapshot_every": 16}, {}),
}


@pytest.mark.parametrize("case", CASES)
def test_an_engine_goes_on_with_prompts_that_another_has_computed(
    case: str, make_lively: Any, play: Any, pair: Any
) -> None:
    family, options, choices = CASES[case]
    config = make_lively(family, **options)
    alone = NaiveModel(config.model, max_positions=128, **choices)
    first, second, address = pair(config)
    for index, prompt in enumerate(prompts()):
        token = hold(first, play, prompt, f"p{index}")
        message = NewRequest(id="d", prompt=prompt, max_tokens=9, sampling=GREEDY, transfer=f"{address}/p{index}")
        played = play(second, [message])
        assert played.tokens["d"] == alone.greedy(prompt, 9) and played.tokens["d"][0] == token
        assert played.cached["d"] == (len(prompt) - 1) // 16 * 16
    found = counters(second)
    assert found["kv_transfer_hits"] == 4 and found["kv_transfer_failures"] == 0
    computed = second.scheduler.stats.computed_tokens
    assert computed == sum((len(prompt) - 1) % 16 + 1 + 8 for prompt in prompts())
    first.scheduler.connector.moves()  # what was read is released
    assert first.scheduler.state.pool.used == second.scheduler.state.pool.used == 0
    assert found["kv_transfer_received_bytes"] == counters(first)["kv_transfer_sent_bytes"] > 0 or computed
