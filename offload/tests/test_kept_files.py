"""Blocks in files, between two runs of an engine: the tokens of one that keeps nothing, and fewer computed."""

from __future__ import annotations

import errno
import logging
import os
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from expert_families import Configured
from harsh_traffic import GREEDY, assert_same, shrink, traffic

from evener.config import from_overrides
from evener.config.schema import Config
from evener.engine.controller.controller import Controller
from evener.engine.processes.start import build_controller
from evener.engine.wire.messages import NewRequest
from evener.errors import ConfigError
from evener.plugins.discover import core_version
from evener_conformance.rank_threads import rank_threads
from evener_conformance.reference.engine import RunResult, play, small_config
from evener_kv.files import stored_blocks
from evener_kv.files.block_files import BlockFiles
from evener_kv.host import _layout
from evener_kv.host_blocks import HostBlocks

#: Blocks of 16 tokens. Host memory holds all blocks that leave, so that only a new run needs files.
HOST = {"infer.kv_host_memory": "4MiB", "infer.block_size": 16}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "kv"


@pytest.fixture
def config(tmp_path: Path, folder: Path) -> Config:
    heads = {"num_attention_heads": 4, "num_key_value_heads": 4}
    keys = {**HOST, "backend": "cpu", "offload.kv_files": str(folder)}
    return small_config(tmp_path / "model", "Llama", heads, **keys)


def asked(prefix: str = "") -> list[NewRequest]:
    """Prompts of four blocks, of which the pool holds one."""
    ids = [5 + 7 * i * i % 89 for i in range(200)]
    return [NewRequest(id=f"{prefix}{at}", prompt=ids[at : at + 70], max_tokens=6, sampling=GREEDY)
            for at in (0, 30, 60, 90, 120)]  # fmt: skip


def one_by_one(controller: Controller, blocks: int = 7) -> RunResult:
    shrink(controller, blocks)
    played = RunResult()
    for message in asked():
        got = play(controller, [message])
        played.tokens |= got.tokens
        played.cached |= got.cached
        assert set(got.reasons().values()) == {"length"}
    return played


@contextmanager
def run(config: Config) -> Iterator[Controller]:
    controller, _ = build_controller(config)
    try:
        yield controller
    finally:
        controller.close()


def kept(controller: Controller) -> Any:
    connector = controller.scheduler.connector
    assert isinstance(connector, HostBlocks) and connector.files is not None
    return connector.files


def files_in(folder: Path) -> list[Path]:
    return [path for path in folder.rglob("*-*") if path.is_file() and len(path.name) > 64]


def test_a_later_run_finds_the_blocks_of_an_earlier_one(config: Config, folder: Path) -> None:
    with run(config) as controller:
        first = one_by_one(controller)
        assert kept(controller).counters["kv_files_hits"] == 0
    assert len(files_in(folder)) >= 12
    with run(config) as controller:
        files = kept(controller)
        assert len(files) == len(files_in(folder)) and files.nbytes == sum(f.stat().st_size for f in files_in(folder))
        again = one_by_one(controller)
        assert again.tokens == first.tokens
        counters = controller.scheduler.stats.counters
        assert counters["kv_host_hits"] >= counters["kv_files_hits"]
        assert counters["kv_files_hits"] >= 3 and counters["kv_files_hit_tokens"] >= 3 * 64
        assert [again.cached[name] for name in ("0", "30", "60")] == [64, 64, 64] and first.cached["0"] == 0
        assert counters["kv_files_failures"] == 0 and controller.scheduler.state.pool.used == 0
        assert controller.scheduler.connector.places.used == 0  # type: ignore[attr-defined]


def test_blocks_that_come_while_the_engine_looks_for_them_are_used(
    config: Config, monkeypatch: pytest.MonkeyPatch
) -> None:
    with run(config) as controller:
        one_by_one(controller)
    with run(config) as controller:
        files = kept(controller)
        plain, reads = files.finished, controller.scheduler.connector._reads

        def late() -> Any:
            found = plain()
            time.sleep(0.001)  # steps are counted, and files that are still written need time
            for copy in [copy for read in reads.values() for copy in read.copies]:
                assert copy.over.wait(10)
            return found

        monkeypatch.setattr(files, "finished", late)
        monkeypatch.setattr("evener_kv.host_blocks._PAUSE", 0)
        one_by_one(controller)
        assert controller.scheduler.stats.counters["kv_files_hits"] >= 3


def test_changed_bytes_are_computed_again(config: Config, folder: Path) -> None:
    with run(config) as controller:
        first = one_by_one(controller)
    for path in files_in(folder):
        data = bytearray(path.read_bytes())
        data[-100] ^= 4
        path.write_bytes(data)
    with run(config) as controller:
        assert one_by_one(controller).tokens == first.tokens
        counters = controller.scheduler.stats.counters
        assert counters["kv_files_failures"] >= 12 and counters["kv_files_hits"] == 0


def test_another_model_finds_nothing(config: Config, tmp_path: Path) -> None:
    with run(config) as controller:
        one_by_one(controller)
    for other in (replace(config, seed=config.seed + 1), replace(config, dtype="bfloat16")):
        with run(other) as controller:
            assert len(kept(controller)) == 0


def test_other_layers_of_a_model_find_nothing(config: Config) -> None:
    first, second = (replace(config, infer=replace(config.infer, layers=(number,))) for number in ("0", "1"))
    with run(first) as controller:
        one_by_one(controller)
    with run(second) as controller:
        assert len(kept(controller)) == 0
    with run(first) as controller:
        assert len(kept(controller)) > 0


def test_state_of_another_version_of_the_models_package_is_not_used(config: Config) -> None:
    with run(config) as controller:
        assembly: Any = controller.executor.worker.assembly  # type: ignore[attr-defined]
        assert f"('evener-models', '{core_version()}')" in _layout(assembly)


def test_an_engine_whose_start_fails_gives_the_folder_back(config: Config, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as broken:
        broken.setattr("evener_kv.host.fingerprint", lambda config, facts: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            build_controller(config)
    with run(config) as controller:
        assert len(kept(controller)) == 0


def test_files_stay_within_their_bytes(config: Config, folder: Path) -> None:
    with run(config) as controller:
        one_by_one(controller)
        size = files_in(folder)[0].stat().st_size
    few = replace(config, options={"offload": {**config.options["offload"], "kv_files_bytes": 5 * size + 1}})
    for _ in range(2):
        with run(few) as controller:
            assert len(kept(controller)) <= 5
            one_by_one(controller)
        assert 0 < len(files_in(folder)) <= 5


def test_a_full_disk_costs_the_blocks_and_one_warning(
    config: Config, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    with run(config) as controller:
        first = one_by_one(controller)

    def full(*_: Any) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(BlockFiles, "write", full)
    monkeypatch.setattr(BlockFiles, "read", full)
    with caplog.at_level(logging.WARNING), run(config) as controller:
        assert one_by_one(controller).tokens == first.tokens
        assert controller.scheduler.stats.counters["kv_files_failures"] >= 4
    assert sum("No space left" in record.message for record in caplog.records) == 1


def test_the_end_does_not_wait_long_for_a_disk_that_hangs_and_says_nothing_when_it_answers_later(
    config: Config, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    hangs = threading.Event()
    monkeypatch.setattr(BlockFiles, "write", lambda *_: hangs.wait(60))
    monkeypatch.setattr(stored_blocks, "_END_SECONDS", 0.2)
    controller, _ = build_controller(config)
    one_by_one(controller)
    assert kept(controller).copying
    began = time.monotonic()
    controller.close()
    assert time.monotonic() - began < 5
    hangs.set()
    kept(controller)._thread.join(10)
    assert not [record for record in caplog.records if record.levelno >= logging.WARNING]


def test_ranks_that_do_not_answer_end_the_files_and_nothing_takes_the_places_that_they_may_still_read(
    config: Config, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    hangs = threading.Event()
    with run(config) as controller:
        first = one_by_one(controller)
    monkeypatch.setattr(BlockFiles, "read", lambda *_: hangs.wait(60))
    monkeypatch.setattr(stored_blocks, "PATIENCE", 0.1)
    monkeypatch.setattr(stored_blocks, "_COPY_SECONDS", 0.1)
    with caplog.at_level(logging.WARNING), run(config) as controller:
        assert one_by_one(controller).tokens == first.tokens
        assert controller.scheduler.stats.counters["kv_files_hits"] == 0
        assert controller.scheduler.connector.places.used == 4  # type: ignore[attr-defined]  # of the first request
        hangs.set()
    assert sum("are not used any more" in record.message for record in caplog.records) == 1


def test_each_rank_has_files_of_its_own_and_a_block_counts_if_all_have_it(config: Config, folder: Path) -> None:
    two = replace(config, infer=replace(config.infer, tp_size=2))
    counts = []
    for again in range(3):
        with rank_threads(two) as (controller, _):
            counts.append(len(kept(controller)))
            got = one_by_one(controller)
            hits = controller.scheduler.stats.counters["kv_files_hits"]
            controller.scheduler.connector.close()  # type: ignore[attr-defined]
        if again == 0:
            want, ranks = got.tokens, [path for path in folder.iterdir() if path.is_dir()]
            assert len(ranks) == 2 and hits == 0
        assert got.tokens == want and (hits >= 3) == (again == 1)
        if again == 1:
            for path in files_in(ranks[1]):
                path.unlink()
    assert counts[1] >= 12 and counts[2] == 0


def test_a_second_engine_in_the_same_folder_is_refused(config: Config, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("evener_kv.files.rank_files.lock_within", lambda *_: None)
    with pytest.raises(ConfigError, match=r"is used by another engine with this model and serve.port; give each"):
        build_controller(config)


@pytest.mark.parametrize(
    ("keys", "words"),
    [({}, "is a tier behind host memory: set infer.kv_host_memory=4GiB"),
     ({"infer.kv_host_memory": "1MiB", "offload.kv_files_bytes": 0}, "kv_files_bytes=0 must be more than 0")],
)  # fmt: skip
def test_settings_that_cannot_be_used_are_refused(tmp_path: Path, keys: dict[str, Any], words: str) -> None:
    made = small_config(tmp_path / "model", backend="cpu", **{"offload.kv_files": str(tmp_path / "kv"), **keys})
    with pytest.raises(ConfigError, match=words):
        build_controller(made)


def test_a_folder_that_others_can_use_is_refused(config: Config, folder: Path) -> None:
    folder.mkdir(mode=0o755)
    with pytest.raises(ConfigError, match="must belong to this user, and to nobody else"):
        build_controller(config)


@pytest.mark.slow
def test_streams_chunks_preemption_prefix_hits_and_aborts_go_together_with_files(
    configured: Configured, tmp_path: Path
) -> None:
    """On a device with streams and memory of its own; the second run finds files."""
    other = [NewRequest(id=f"other {n}", prompt=[7 + n] * 200, max_tokens=3, sampling=GREEDY) for n in range(3)]
    want = play(build_controller(configured("Qwen3Moe", backend="cpu", **{"infer.block_size": 128}))[0], **traffic())
    made = configured("Qwen3Moe", **{"infer.kv_host_memory": "64MiB", "offload.kv_files": str(tmp_path / "kv")})
    for again in range(2):
        with run(made) as controller:
            shrink(controller, 3)
            assert_same(play(controller, **traffic()), want)
            assert controller.scheduler.stats.preemptions and controller.scheduler.state.pool.used == 0
            assert (controller.scheduler.stats.counters["kv_files_hits"] > 0) == bool(again)
            assert not play(controller, other).dead  # takes the blocks of all that is left


def test_the_keys_can_be_given_on_the_command_line() -> None:
    found = from_overrides("/model", {"offload.kv_files": "/data/kv", "offload.kv_files_bytes": 1 << 30})
    assert found.options["offload"] == {"kv_files": "/data/kv", "kv_files_bytes": 1 << 30}
