"""Every family that is registered equals its oracle: one runner over one table."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest
from family_runner import check
from family_table import TABLE, Row
from family_table import architecture as class_of

from evener.layers import Builder
from evener_models import descriptor

#: Between them they take each path through the layers: norms before and behind blocks, parallel blocks, biases, slopes,
#: windows and chunks, sinks, latents, selected tokens, recurrent state, and experts routed in every way. The other rows
#: combine the same, and are slow.
QUICK = {"llama with llama3 rope", "gemma 3", "gpt-oss", "llama 4", "chatglm", "command r", "mpt, with linear biases",
         "glm 4.5 with groups", "deepseek V3.2", "qwen2 moe", "qwen3-next"}  # fmt: skip


@pytest.mark.parametrize(
    "name", [name if name in QUICK else pytest.param(name, marks=pytest.mark.slow) for name in TABLE]
)
@pytest.mark.filterwarnings("ignore::UserWarning:transformers")
def test_a_family_gives_its_oracles_logits_and_sixty_four_greedy_tokens(
    name: str, tmp_path: Path, one_thread: None
) -> None:
    result = check(TABLE[name], tmp_path)
    print(f"{name}: {result.tokens} tokens, ties: {result.ties}")


def test_every_registered_architecture_has_a_row() -> None:
    assert TABLE.keys() >= QUICK
    assert {row.architecture for row in TABLE.values()} == set(descriptor.architectures)


@pytest.mark.parametrize("architecture", descriptor.architectures)
def test_the_oracle_that_an_architecture_names_is_the_tables(architecture: str) -> None:
    names = {row.oracle.name for row in TABLE.values() if row.architecture == architecture}
    assert class_of(architecture).oracle == ", ".join(sorted(names))


@cache
def model_of(name: str) -> Builder:
    """What the model of a row declares."""
    build = Builder("float32", 128)
    class_of(TABLE[name].architecture)(TABLE[name].config, build)
    return build


def declared(architecture: str) -> Iterator[tuple[Row, Builder]]:
    """The rows of an architecture, those of other names of its class too, and what each of their models declares."""
    for name, row in TABLE.items():
        if class_of(row.architecture) is class_of(architecture):
            yield row, model_of(name)


@pytest.mark.parametrize("architecture", descriptor.architectures)
def test_the_rows_of_an_architecture_have_odd_sizes_and_both_extremes_of_heads_and_groups(architecture: str) -> None:
    heads, kv_heads, groups, keys, shared = set(), set(), set(), set(), False
    for row, build in declared(architecture):
        keys |= set(row.text)
        layers = [slot for slot in build.slots if slot.spec.kind != "index"]
        assert 2 <= len(layers) <= 4 and row.text["vocab_size"] % 64
        for slot in layers:
            count = slot.attention.heads
            heads.add(count.bit_count() > 1)
            if slot.spec.kind in ("full", "window", "chunk"):
                kept = slot.spec.tensors[0].shape[0]
                shared |= kept < count
                kv_heads |= {name for name, there in (("one", kept == 1), ("all", kept == count)) if there}
        groups |= {site.static["groups"] > 1 for site in build.sites if "groups" in site.static}
    assert True in heads, "no row has a number of heads that is no power of two"
    if kv_heads and (shared or "num_key_value_heads" in keys):
        assert kv_heads == {"one", "all"}, "rows with one KV head and with as many as heads"
    if "n_group" in keys:
        assert groups == {True, False}, "rows with one group of experts and with several"
