"""The default communicator over CPU processes, and the one over threads, against numpy."""

from __future__ import annotations

import importlib.util
import subprocess
import tempfile
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from warm import warm

from evener.errors import EngineError
from evener_inspection.thread_communicator import run_on_threads, thread_group

RANKS = Path(__file__).with_name("ranks.py")
_SPEC = importlib.util.spec_from_file_location("communicator_ranks", RANKS)
assert _SPEC is not None and _SPEC.loader is not None
ranks = importlib.util.module_from_spec(_SPEC)
_SPEC.loader.exec_module(ranks)


@pytest.fixture(scope="module", params=[2, 3])
def processes(request: pytest.FixtureRequest) -> list[dict[str, Any]]:
    """What each rank of a world of processes got."""
    return _processes(request.param)


@pytest.fixture(scope="module", params=["2 processes", "3 processes", "2 threads", "3 threads"])
def world(request: pytest.FixtureRequest) -> list[dict[str, Any]]:
    """What each rank of a world got, of either implementation of the contract."""
    size, kind = request.param.split()
    if kind == "processes":
        return _processes(int(size))
    found = run_on_threads(int(size), lambda end: ranks.collectives(end, int(size)))
    return [{name: value.numpy() for name, value in one.items()} for one in found]


@cache
def _processes(size: int) -> list[dict[str, Any]]:
    """Each world runs once, and does everything in that run."""
    with tempfile.TemporaryDirectory() as folder:
        return _results(size, Path(folder))


def _results(size: int, folder: Path) -> list[dict[str, Any]]:
    command = [warm() / "python", str(RANKS)]
    started = [
        subprocess.Popen([*command, str(r), str(size), str(folder)], stderr=subprocess.PIPE, text=True)
        for r in range(size)
    ]
    try:
        errors = [process.communicate(timeout=240)[1] for process in started]
    finally:
        for process in started:
            process.kill()
    assert [process.returncode for process in started] == [0] * size, "\n".join(errors)
    found = []
    for rank in range(size):
        with np.load(folder / f"{rank}.npz") as arrays:
            found.append(dict(arrays))
    return found


def inputs(size: int, salt: int) -> list[np.ndarray[Any, Any]]:
    return [ranks.data(rank, 6, 4 * size, salt=salt) for rank in range(size)]


def same(world: list[dict[str, Any]], name: str, wanted: list[np.ndarray[Any, Any]]) -> None:
    for rank, (got, want) in enumerate(zip(world, wanted, strict=True)):
        np.testing.assert_array_equal(got[name], want, err_msg=f"{name} on rank {rank}")


def test_all_reduce_sums_in_place_and_takes_slices(world: list[dict[str, Any]]) -> None:
    size = len(world)
    same(world, "all_reduce", [sum(inputs(size, 0))] * size)
    same(world, "all_reduce_in_place", [sum(inputs(size, 0))] * size)
    same(world, "reduce_slice", [sum(inputs(size, 6))[:, 1:3]] * size)


def test_all_gather_joins_in_rank_order_along_any_axis(world: list[dict[str, Any]]) -> None:
    size = len(world)
    same(world, "all_gather_last", [np.concatenate(inputs(size, 1), -1)] * size)
    same(world, "all_gather_first", [np.concatenate(inputs(size, 2), 0)] * size)
    same(world, "all_gather_slice", [np.concatenate([x[:, 1:3] for x in inputs(size, 2)], -1)] * size)


def test_reduce_scatter_keeps_each_ranks_part_of_the_sum(world: list[dict[str, Any]]) -> None:
    size = len(world)
    total = sum(ranks.data(rank, 2 * size, 5, salt=3) for rank in range(size))
    same(world, "reduce_scatter", np.split(total, size, 0))
    same(world, "reduce_scatter_last", np.split(sum(inputs(size, 4)), size, -1))


def test_all_to_all_moves_any_number_of_rows(world: list[dict[str, Any]]) -> None:
    size, table = len(world), ranks.splits(len(world))
    assert (table == 0).any()
    sent = [ranks.data(r, table[r].sum(), 3, salt=9) for r in range(size)]
    pieces = [np.split(rows, np.cumsum(table[r])[:-1]) for r, rows in enumerate(sent)]
    same(world, "all_to_all", [np.concatenate([pieces[s][r] for s in range(size)]) for r in range(size)])


def test_broadcast_gives_everyone_the_sources_tensor(world: list[dict[str, Any]]) -> None:
    size = len(world)
    same(world, "broadcast", [inputs(size, 5)[-1]] * size)


def test_send_and_receive_pass_a_ring(world: list[dict[str, Any]]) -> None:
    size = len(world)
    same(world, "ring", [ranks.data((r - 1) % size, 3, 2, salt=7) for r in range(size)])


def test_irecv_does_not_block_the_sender(world: list[dict[str, Any]]) -> None:
    size = len(world)
    same(world, "expected", [ranks.data((r - 1) % size, 3, 2, salt=8) for r in range(size)])


def test_low_precision_dtypes_are_reduced_and_bytes_are_gathered(world: list[dict[str, Any]]) -> None:
    size = len(world)
    same(world, "bfloat16", [sum(inputs(size, 7))] * size)
    eighths = [torch.from_numpy(x[:1]).to(torch.float8_e4m3fn).float().numpy() for x in inputs(size, 1)]
    same(world, "bytes", [np.concatenate(eighths)] * size)
    same(world, "integers", [np.concatenate(inputs(size, 2))] * size)
    same(world, "turned", [np.concatenate([x.T for x in inputs(size, 2)])] * size)


def test_ranks_know_their_group(processes: list[dict[str, Any]]) -> None:
    size = len(processes)
    assert [str(got["identity"]) for got in processes] == [f"tp {r}/{size}" for r in range(size)]
    assert [str(got["pair"]) for got in processes[-2:]] == ["ep 0/2", "ep 1/2"]
    assert [got["pair_gather"].tolist() for got in processes[-2:]] == [[size - 2.0, size - 1.0]] * 2


def test_errors_say_what_does_not_fit(processes: list[dict[str, Any]]) -> None:
    size = len(processes)
    for got in processes:
        assert str(got["indivisible"]) == (
            f"reduce_scatter: dimension 0 of size {size + 1} is not divisible by {size} ranks"
        )
        assert str(got["too_few"]) == (f"all_to_all in group 'tp': the splits send {size} rows, but the tensor has 4")
        assert str(got["lengths"]) == (
            f"all_to_all in group 'tp' of {size} ranks: 1 send and 1 receive splits; give one for each rank"
        )
        assert str(got["descending"]) == (
            "group 'ep' was asked for with the ranks [1, 0]; list each once, the lowest first"
        )
        assert "its library sums float32, not torch.int64; convert it" in str(got["no_sum"])
    for got in processes[:-2]:
        assert str(got["outside"]) == "rank 0 opened group 'ep', which has the ranks [1, 2]"


def test_the_error_of_a_failed_thread_is_raised_without_waiting() -> None:
    def work(end: Any) -> None:
        if end.rank == 1:
            raise ValueError("mine")
        end.barrier()

    with pytest.raises(ValueError, match="mine"):
        run_on_threads(3, work)


def test_a_receive_timeout_names_the_sender() -> None:
    [_, two] = thread_group("pp", 2, timeout=0.01)
    with pytest.raises(EngineError, match="rank 0 of group 'pp' sent nothing to rank 1"):
        two.receive(torch.zeros(1), 0)


def test_messages_of_a_dead_rank_are_received_before_the_error() -> None:
    one, two = thread_group("pp", 2, timeout=0.01)
    one.send(torch.ones(1), 1)
    one.abort()
    assert two.receive(torch.zeros(1), 0) == 1
    with pytest.raises(EngineError, match="a rank of group 'pp' has failed"):
        two.receive(torch.zeros(1), 0)
