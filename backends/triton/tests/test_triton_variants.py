"""What the kernels offer ``evener tune``: other sizes, all of them right."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import interpreted  # noqa: F401  (repairs the interpreter)
import pytest

from evener.config import from_overrides
from evener.contracts.device import DeviceCapabilities
from evener.contracts.ops import Bucket, OpCall
from evener_conformance.naive.model import find_architecture
from evener_inspection.tuner import tune
from evener_kernels_triton.tuning import Tuning
from evener_kernels_triton.variants import combined, products, rounded_products

LARGE = Tuning(132, 227 << 10, True)
CHIP = DeviceCapabilities(dtypes=frozenset({"bfloat16"}))


@pytest.mark.parametrize(
    ("rows", "columns"), [(6144, 4096), (4096, 4096), (24576, 4096), (4096, 12288), (151936, 1024)]
)
@pytest.mark.parametrize("tokens", [1, 2, 16, 32])
def test_a_product_has_a_few_other_sizes_that_differ_from_its_rule_and_fit_into_shared_memory(
    tokens: int, rows: int, columns: int
) -> None:
    call = OpCall("linear", {"dtype": "bfloat16"}, Bucket(tokens, tokens), CHIP)
    offered = products(LARGE, call, rows, columns)
    assert 3 <= len(offered) <= 7
    assert offered == products(LARGE, call, rows, columns), "a file names them by what they are"
    own = LARGE.skinny(tokens, rows, columns, 2)
    for variant in offered:
        p = LARGE.with_changes(variant).skinny(tokens, rows, columns, 2)
        if tokens > 1 and "library" not in variant:
            assert p != own and p.stages * (p.m + p.n) * p.k * 2 <= LARGE.shared


@pytest.mark.parametrize(("rows", "columns"), [(6144, 4096), (24576, 4096), (4096, 12288), (48, 64)])
@pytest.mark.parametrize("tokens", [32, 64, 512])
def test_products_of_rounded_activations_have_a_few_other_sizes(tokens: int, rows: int, columns: int) -> None:
    call = OpCall("linear", {"dtype": "bfloat16"}, Bucket(tokens // 2 + 1, tokens), CHIP)
    offered = rounded_products(LARGE, call, rows, columns)
    assert 2 <= len(offered) <= 7
    own = LARGE.rounded(tokens, rows, columns, 128)
    for variant in offered:
        p = LARGE.with_changes(variant).rounded(tokens, rows, columns, 128)
        assert p != own and p.stages * (p.m + p.n) * p.k <= LARGE.shared
    narrow = LARGE.with_changes({"k": 128}).rounded(tokens, rows, columns, 64)
    assert narrow.k == 64, "no more columns than share a scale"


def test_parts_of_a_composite_change_alone_and_together() -> None:
    found = combined({"enter": [{"n": 1}], "project": [{"n": 2}, {"library": 1}]})
    assert {json.dumps(one, sort_keys=True) for one in found} == {
        json.dumps(one)
        for one in (
            {"enter.n": 1}, {"project.n": 2}, {"project.library": 1}, {"enter.n": 1, "project.n": 2},
            {"enter.n": 1, "project.library": 1},
        )
    }  # fmt: skip
    changed = LARGE.with_changes({"enter.n": 1, "project.library": 1})
    assert changed.part("enter").persistent_gemv(4096, 4096, 1) != LARGE.persistent_gemv(4096, 4096, 1)
    assert changed.part("project").persistent_gemv(4096, 4096, 1) == LARGE.persistent_gemv(4096, 4096, 1)
    assert changed.part("project").changed("library") and not changed.part("enter").changed("library")
    assert changed.persistent_gemv(4096, 4096, 1) == LARGE.persistent_gemv(4096, 4096, 1), (
        "what belongs to a part is no change of the whole"
    )


def test_tuning_rules_are_memoized_by_arguments() -> None:
    tuning = Tuning(132, 227 << 10, True)
    first = tuning.skinny(16, 4096, 4096, 2)
    assert tuning.skinny(16, 4096, 4096, 2) is first
    assert tuning.skinny(17, 4096, 4096, 2) != first != tuning.skinny(16, 1024, 4096, 2)
    assert tuning.uses_own_product(33, 4096) and not tuning.uses_own_product(33, 151936)
    changed = tuning.with_changes({"splits": first.splits * 2})
    assert changed.skinny(16, 4096, 4096, 2).splits == first.splits * 2
    assert tuning.skinny(16, 4096, 4096, 2) is first and changed == tuning.with_changes({"splits": first.splits * 2})


@pytest.mark.slow
@pytest.mark.parametrize(
    ("family", "ops"),
    [("Qwen3", ["mlp_block"]), ("Qwen3Moe", ["moe_block"])],
)
def test_every_variant_agrees_with_the_reference(
    family: str, ops: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, interpreted_backend: None
) -> None:
    monkeypatch.setattr("evener_inspection.tuner.FIRST_ROUNDS", 1)
    monkeypatch.setattr("evener_inspection.tuner.ROUNDS", 0)
    monkeypatch.setattr("evener_inspection.recorded_ops.MIN_CALLS", 1)
    monkeypatch.setattr("evener_inspection.recorded_ops.MAX_CALLS", 1)
    config = {**find_architecture(f"{family}ForCausalLM").tiny_config(), "num_hidden_layers": 2}
    (tmp_path / "config.json").write_text(json.dumps(config))
    keys: dict[str, Any] = {
        "backend": "interpreted", "load": "dummy", "dtype": "float32", "infer.max_seq_len": 64, "infer.max_reqs": 2,
        "infer.step_tokens": 16, "infer.kv_memory": 1 << 20,
    }  # fmt: skip
    _, outcomes = tune(from_overrides(tmp_path, keys), ops, [2], 5, str(tmp_path / "file.json"))
    assert {o.entry.op for o in outcomes} == set(ops) and {o.entry.tokens for o in outcomes} == {"2"}
    for outcome in outcomes:
        assert outcome.dropped == []
        measured = {json.dumps(m.variant) for m in outcome.entry.measured if m.provider.startswith("triton/")}
        assert len(measured) > 4, "the rule's own sizes, and others"


def test_stored_experts_of_one_token_have_one_program_a_unit_for_down() -> None:
    plain, stored = (LARGE.single_token(2048, 768, 8, each) for each in (False, True))
    assert plain is not None and stored is not None and plain.up == stored.up
    assert (plain.down.n, plain.down.k, stored.down.n, stored.down.k) == (8, 256, 16, 128)
    assert 2048 // stored.down.n <= LARGE.units < 2048 // plain.down.n
