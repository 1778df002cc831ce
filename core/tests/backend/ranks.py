"""One rank of a world of CPU processes: does everything a communicator can and writes what it got.

    python ranks.py RANK WORLD FOLDER

``expected`` in the test knows what must come out; inputs are functions of the rank alone.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch

from evener.backend.torch_communicator import open_torch_communicator
from evener.contracts.communicator import Communicator
from evener.errors import EngineError


def data(rank: int, *shape: int, salt: int = 0) -> np.ndarray[Any, Any]:
    """Small whole numbers, so that sums are exact in any order."""
    return np.random.default_rng([rank, salt]).integers(-50, 50, shape).astype(np.float32)


def splits(world: int) -> np.ndarray[Any, Any]:
    """[source, target]: rows of an all-to-all, none for some pairs."""
    return np.array([[(2 * source + target) % 3 for target in range(world)] for source in range(world)])


def error_of(call: Callable[[], object]) -> str:
    """The message of the error that a call must raise."""
    try:
        call()
    except EngineError as error:
        return str(error)
    return "no error"


def collectives(c: Communicator, world: int) -> dict[str, Any]:
    """Every method's result."""
    mine = {salt: torch.from_numpy(data(c.rank, 6, 4 * world, salt=salt)) for salt in range(8)}
    send, receive = splits(world)[c.rank].tolist(), splits(world)[:, c.rank].tolist()
    rows = torch.from_numpy(data(c.rank, sum(send), 3, salt=9))
    donated = mine[0]
    found: dict[str, Any] = {
        "all_reduce": c.all_reduce(donated),
        "all_reduce_in_place": donated,
        "all_gather_last": c.all_gather(mine[1]),
        "all_gather_first": c.all_gather(mine[2], dim=0),
        "all_gather_slice": c.all_gather(mine[2][:, 1:3]),
        "reduce_scatter": c.reduce_scatter(torch.from_numpy(data(c.rank, 2 * world, 5, salt=3))),
        "reduce_scatter_last": c.reduce_scatter(mine[4], dim=-1),
        "reduce_slice": c.all_reduce(mine[6][:, 1:3]),
        "all_to_all": c.all_to_all(rows, send, receive),
        "broadcast": c.broadcast(mine[5], source=world - 1),
        "ring": ring(c, torch.from_numpy(data(c.rank, 3, 2, salt=7))),
        "expected": expected(c, torch.from_numpy(data(c.rank, 3, 2, salt=8))),
        "bfloat16": c.all_reduce(mine[7].to(torch.bfloat16)).float(),
        "bytes": c.all_gather(mine[1][:1].to(torch.float8_e4m3fn), dim=0).float(),
        "integers": c.all_gather(mine[2].to(torch.int64), dim=0).float(),
        "turned": c.all_gather(mine[2].T, dim=0),
    }
    c.barrier()
    return found


def ring(c: Communicator, tensor: torch.Tensor) -> torch.Tensor:
    """Rank r's tensor goes to rank r + 1. Rank 0 sends first, so that nobody waits for ever."""
    got = torch.empty_like(tensor)
    following, before = (c.rank + 1) % c.size, (c.rank - 1) % c.size
    if c.rank == 0:
        c.send(tensor, following)
        return c.receive(got, before)
    c.receive(got, before)
    c.send(tensor, following)
    return got


def expected(c: Communicator, tensor: torch.Tensor) -> torch.Tensor:
    """As ``ring``, but all send at once: who is expected waits for nobody."""
    arrived = c.irecv(torch.zeros(3, 4)[:, 1:3], (c.rank - 1) % c.size)
    c.send(tensor, (c.rank + 1) % c.size)
    return arrived()


def main(rank: int, world: int, folder: Path) -> None:
    """Run one rank and write ``<rank>.npz``."""
    init = f"file://{folder / 'meet'}"
    c = open_torch_communicator("gloo", "tp", range(world), rank, world, init)
    found = collectives(c, world)
    texts = {
        "identity": f"{c.name} {c.rank}/{c.size}",
        "descending": error_of(lambda: open_torch_communicator("gloo", "ep", [1, 0], rank, world, init)),
        "no_sum": error_of(lambda: c.all_reduce(torch.zeros(2, dtype=torch.int64))),
        "indivisible": error_of(lambda: c.reduce_scatter(torch.zeros(world + 1))),
        "too_few": error_of(lambda: c.all_to_all(torch.zeros(4, 2), [1] * world, [1] * world)),
        "lengths": error_of(lambda: c.all_to_all(torch.zeros(4, 2), [4], [4])),
    }
    # A second group of the same world, without its first rank where there are three.
    pair = [world - 2, world - 1]
    if rank in pair:
        p = open_torch_communicator("gloo", "ep", pair, rank, world, init)
        texts["pair"] = f"{p.name} {p.rank}/{p.size}"
        found["pair_gather"] = p.all_gather(torch.tensor([float(rank)]))
        p.close()
    else:
        texts["outside"] = error_of(lambda: open_torch_communicator("gloo", "ep", pair, rank, world, init))
    c.barrier()
    c.close()
    np.savez(folder / f"{rank}.npz", **{k: np.array(v) for k, v in {**found, **texts}.items()})


if __name__ == "__main__":
    torch.set_num_threads(1)
    main(int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3]))
