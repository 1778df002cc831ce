"""The dtype and limits that stages on unlike devices agree on, with made-up devices."""

from __future__ import annotations

import pytest
from evener_stages.assembly import agree

from evener.config import from_overrides
from evener.config.checkpoint import ModelFacts
from evener.config.resolve import DeviceFacts, resolve_config
from evener.distributed.agreement import Agreement
from evener.errors import ConfigError
from evener_inspection.thread_communicator import ThreadCommunicator, run_on_threads

MODEL = ModelFacts(path="/model", model_type="llama", dtype="bfloat16", max_positions=8192)


def agreed(*dtypes: str) -> list[tuple[str, int, int]]:
    """(dtype, infer.max_reqs, infer.step_tokens) of stages whose devices have these; the first is in host memory."""
    config = from_overrides("/model", {"infer.stages": ",".join("ab"[: len(dtypes)])})

    def stage(group: ThreadCommunicator) -> tuple[str, int, int]:
        rank = group.rank
        has = DeviceFacts(backend="ab"[rank], name=f"chip {rank}", dtypes=frozenset(dtypes[rank].split()),
                          host_memory=rank == 0, free=2**30)  # fmt: skip
        found = agree(resolve_config(config, MODEL, has), has, Agreement(group))
        return found.dtype, found.max_reqs, found.step_tokens

    return run_on_threads(len(dtypes), stage)


@pytest.mark.parametrize(
    ("first", "second", "dtype"),
    [
        ("float32 bfloat16", "bfloat16", "bfloat16"),
        ("float32 bfloat16", "float16 float32", "float32"),
        ("float16", "float16 bfloat16", "float16"),
        ("bfloat16 float16", "float16", "float16"),
    ],
)
def test_stages_take_a_dtype_that_all_have_and_the_smaller_limits(first: str, second: str, dtype: str) -> None:
    assert agreed(first, second) == [(dtype, 64, 2048)] * 2


def test_stages_without_a_common_dtype_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"chip \d has (bfloat16|float16), but the devices of the other stages"):
        agreed("bfloat16", "float16")
