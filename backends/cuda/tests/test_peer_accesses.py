"""The sum over ranks reaches its tensors and the memory that the ranks share, nothing else, and adds that up."""

from __future__ import annotations

import pytest
import torch
from interpreted import every_access_checked

from evener_backend_cuda.peer_kernel import peer_sum_kernel

BLOCKS, REGION, DATA, RANKS, EACH, TILE = 4, 64, 256, 2, 48, 32


def rank_memory() -> torch.Tensor:
    """Flags, and two buffers."""
    return torch.zeros(DATA + 2 * BLOCKS * REGION * 4, dtype=torch.uint8)


@pytest.mark.parametrize("count", [4 * EACH, 3 * EACH + 20, 4])
@pytest.mark.parametrize("rank", [0, 1])
def test_each_rank_sums_its_peers_data_and_signals_them(rank: int, count: int) -> None:
    """The peer has come already: programs of the interpreter do not wait for each other."""
    blocks, other = -(-count // EACH), 1 - rank
    shared = [rank_memory() for _ in range(RANKS)]
    x, theirs = torch.arange(count, dtype=torch.float32), torch.randn(count)
    rounds = torch.zeros(BLOCKS, dtype=torch.int32)
    peers = torch.tensor([each.data_ptr() for each in shared])
    for now in (1, 2, 3):
        region = shared[other][DATA:].view(torch.float32).view(2, BLOCKS, REGION)[now & 1]
        for block in range(blocks):
            part = theirs[block * EACH : (block + 1) * EACH]
            region[block, : len(part)] = part
            shared[rank][:DATA].view(torch.int32)[block * RANKS + other] = now
        y = x.clone()
        with every_access_checked(*shared):
            peer_sum_kernel[(blocks,)](
                y, peers, rounds, count, EACH, RANK=rank, RANKS=RANKS, BLOCKS=BLOCKS, REGION=REGION, DATA=DATA,
                TILE=TILE,
            )  # fmt: skip
        torch.testing.assert_close(y, x + theirs)
        told = shared[other][:DATA].view(torch.int32)[rank : blocks * RANKS : RANKS]
        assert told.tolist() == rounds[:blocks].tolist() == [now] * blocks


def test_a_region_that_is_too_small_for_a_block_is_detected() -> None:
    shared = [rank_memory()[: DATA + 4 * 40] for _ in range(RANKS)]
    for each in shared:
        each[:DATA].view(torch.int32).fill_(1)
    peers, rounds = torch.tensor([each.data_ptr() for each in shared]), torch.zeros(1, dtype=torch.int32)
    with every_access_checked(*shared), pytest.raises(Exception, match="peer_sum_kernel writes"):
        peer_sum_kernel[(1,)](
            torch.zeros(EACH), peers, rounds, EACH, EACH, RANK=0, RANKS=RANKS, BLOCKS=0, REGION=REGION, DATA=DATA,
            TILE=TILE,
        )  # fmt: skip
