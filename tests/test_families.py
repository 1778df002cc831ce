"""Every family that is registered equals its oracle: one runner over one table."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from family_runner import check
from family_table import TABLE, Row

from evener.layers import Builder
from evener_conformance.naive.model import find_architecture
from evener_models import descriptor


@pytest.mark.parametrize("name", TABLE)
@pytest.mark.filterwarnings("ignore::UserWarning:transformers")
def test_a_family_gives_its_oracles_logits_and_sixty_four_greedy_tokens(
    name: str, tmp_path: Path, one_thread: None
) -> None:
    result = check(TABLE[name], tmp_path)
    print(f"{name}: {result.tokens} tokens, ties: {result.ties}")


def test_every_registered_architecture_has_a_row() -> None:
    assert {row.architecture for row in TABLE.values()} == set(descriptor.architectures)


@pytest.mark.parametrize("architecture", descriptor.architectures)
def test_the_oracle_that_an_architecture_names_is_the_tables(architecture: str) -> None:
    names = {row.oracle.name for row in TABLE.values() if row.architecture == architecture}
    assert find_architecture(architecture).oracle == ", ".join(sorted(names))


def declared(architecture: str) -> Iterator[tuple[Row, Builder]]:
    """The rows of an architecture, those of other names of its class too, and what each of their models declares."""
    for row in TABLE.values():
        if find_architecture(row.architecture) is find_architecture(architecture):
            build = Builder("float32", 128)
            find_architecture(architecture)(row.config, build)
            yield row, build


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
