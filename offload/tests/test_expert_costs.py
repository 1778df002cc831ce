"""Which missing experts the host computes: so many that it and the copies of the others are done soonest."""

from __future__ import annotations

from itertools import combinations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from evener_offload.expert_costs import ExpertCosts, Indices, host_share


def arrays(rows: dict[int, int]) -> tuple[Indices, Indices]:
    """The experts, ascending, and the rows of each."""
    experts = np.array(sorted(rows), np.int64)
    return experts, np.array([rows[expert] for expert in experts.tolist()], np.int64)


@pytest.mark.parametrize(
    ("costs", "rows", "chosen"),
    [
        (ExpertCosts(copy=1.0, first=2.0, more=0.0), {3: 1}, []),
        (ExpertCosts(copy=2.0, first=1.0, more=0.0), {3: 1}, [3]),
        (ExpertCosts(copy=2.0, first=1.0, more=0.5), {3: 9, 4: 1}, [4]),
        (ExpertCosts(copy=1.0, first=1.0, more=0.0), {1: 1, 2: 1, 3: 1, 4: 1}, [1, 2]),
        (ExpertCosts(copy=1.0, first=1.0, more=0.0), {}, []),
    ],
)
def test_the_host_gets_what_it_does_sooner(costs: ExpertCosts, rows: dict[int, int], chosen: list[int]) -> None:
    assert host_share(*arrays(rows), costs).tolist() == chosen


@given(
    st.dictionaries(st.integers(0, 20), st.integers(1, 9), max_size=6),
    st.integers(1, 40), st.integers(1, 40), st.integers(0, 10),
)  # fmt: skip
def test_no_other_division_is_done_sooner(rows: dict[int, int], copy: int, first: int, more: int) -> None:
    costs = ExpertCosts(copy, first, more)

    def seconds(host: tuple[int, ...]) -> float:
        return max(sum(costs.on_host(rows[expert]) for expert in host), copy * (len(rows) - len(host)))

    every = [host for count in range(len(rows) + 1) for host in combinations(rows, count)]
    assert seconds(tuple(host_share(*arrays(rows), costs))) == min(map(seconds, every))
