"""What tests of random traffic share: how hypothesis runs, what is drawn, and what every request must have got."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st

from evener_conformance.reference.engine import RunResult

#: One request: the number of its prompt, how many tokens it asks for, and the step of its arrival.
Pick = tuple[int, int, int]

#: Which requests end early, and after how many tokens.
CUTS = st.dictionaries(st.integers(0, 6), st.integers(1, 5), max_size=2)
STEP_TOKENS = st.sampled_from([5, 24, 64])


def patient(examples: int, **more: Any) -> settings:
    """However long an example takes; ``more`` of hypothesis' own settings."""
    return settings(
        max_examples=examples,
        deadline=None,
        database=None,
        suppress_health_check=list(HealthCheck),
        # Shrinking a failure takes minutes, more than a test may; whoever looks for the cause deletes this line.
        phases=[Phase.generate],
        **more,
    )


def picks(prompts: int, least: int) -> st.SearchStrategy[list[Pick]]:
    """``least`` to 7 requests for ``prompts`` prompts."""
    one = st.tuples(st.integers(0, prompts - 1), st.integers(3, 14), st.integers(0, 9))
    return st.lists(one, min_size=least, max_size=7)


def check_tokens(
    played: RunResult, picked: Sequence[Pick], ended: Mapping[str, int], wanted: Callable[[int, int], list[int]]
) -> None:
    """Request ``r<i>`` got the tokens that are ``wanted`` of its prompt and number; the first of them if it was
    ``ended`` before it had all."""
    for i, (prompt, count, _) in enumerate(picked):
        name = f"r{i}"
        got = played.tokens[name]
        whole = name not in ended or played.reasons()[name] == "length"
        assert got == wanted(prompt, count)[: None if whole else len(got)]
