"""The composite check passes a kernel that is the op's expansion, and finds wrong kernels."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from evener.contracts.declared import LinearWeight
from evener.contracts.ops import STATIC_DEFAULTS, Kernel, OpCall, OpFunction
from evener.ops.parts import load_reference
from evener.ops.reference.linear import PLAIN
from evener.ops.reference.state import ReferenceState
from evener.ops.schemas import BUILTIN, COMPOSITES
from evener.plugins.catalog import Provided
from evener_conformance.distributions import install_reference_backend
from evener_conformance.kit.checklist import Checklist, CheckRequest
from evener_conformance.kit.composites import TinyModel, check_composite
from evener_conformance.kit.families import families
from evener_conformance.kit.outcome import CaseResult
from evener_conformance.kit.subject import open_subject
from evener_conformance.reference.device import HostDevice

SCHEMAS = {schema.name: schema for schema in BUILTIN}


def few(names: Iterable[str], *quick: str) -> list[Any]:
    """All names as parameters; those that are not ``quick`` take the same paths of the kit and are slow."""
    return [name if name in quick else pytest.param(name, marks=pytest.mark.slow) for name in names]


class Expansion(Kernel):
    """The op's own expansion, with its outputs scaled."""

    packings = (PLAIN,)
    non_default = frozenset(STATIC_DEFAULTS)

    def __init__(self, op: str, factor: float = 1.0, refuse: str | None = None) -> None:
        self.op, self.name, self._factor, self._refuse = op, f"own_{op}", factor, refuse

    def supports(self, call: OpCall) -> str | None:
        return self._refuse

    def build(self, call: OpCall) -> OpFunction:
        run = self._reference(call.op, call.static)

        def go(*inputs: Any) -> Any:
            result = run(*inputs)
            if isinstance(result, torch.Tensor) and not result.is_floating_point():
                return result if self._factor == 1.0 else (result - 1).clamp(min=0)
            if isinstance(result, torch.Tensor):
                return result * self._factor
            return (result[0] * self._factor, *result[1:])

        return go

    def _reference(self, op: str, static: Any) -> OpFunction:
        def use(inner: str, /, any_rows: bool = False, sizes: Any = None, **params: Any) -> OpFunction:
            if inner.startswith("state."):
                return getattr(params["state"].provider, inner.removeprefix("state."))  # type: ignore[no-any-return]
            return self._reference(inner, params)

        return load_reference(SCHEMAS[op])(static, use)  # type: ignore[no-any-return]


def small_families() -> list[str]:
    return [family.name for family in families() if family.hidden < 128]


@pytest.mark.parametrize(
    "op", few((schema.name for schema in COMPOSITES), "norm_qkv_rotary_write", "moe_block", "head")
)
def test_the_expansion_of_every_composite_passes_over_narrow_layers(op: str) -> None:
    """Wide layers, in float32: ``test_a_kernel_for_multiples_of_64_can_pass``."""
    kinds = small_families()
    results = check_composite(
        Expansion(op), BUILTIN, HostDevice(0), [ReferenceState()], dtypes=["bfloat16"], kinds=kinds
    )
    assert results and all(r.outcome == "passed" for r in results), "\n".join(map(str, results))


@pytest.mark.slow
@pytest.mark.parametrize("dtypes", [("bfloat16",), ("float32",)], ids=str)
@pytest.mark.parametrize("op", [schema.name for schema in COMPOSITES])
def test_the_expansion_of_every_composite_passes(op: str, dtypes: tuple[str, ...]) -> None:
    results = check_composite(Expansion(op), BUILTIN, HostDevice(0), [ReferenceState()], dtypes=dtypes)
    count = 10 if op in ("moe_block", "routed_experts") else 12
    assert len(results) == count and all(r.outcome == "passed" for r in results), "\n".join(map(str, results))


def test_a_composite_that_writes_in_front_of_what_it_is_given_is_found() -> None:
    class Writer(Expansion):
        def build(self, call: OpCall) -> OpFunction:
            run = super().build(call)

            def go(x: torch.Tensor, *rest: Any) -> Any:
                if x.storage_offset():  # it lies inside a buffer: the first layer's input
                    torch.as_strided(x, (1,), (1,), x.storage_offset() - 1).zero_()
                return run(x, *rest)

            return go

    writer = Writer("decoder_layer")
    results = check_composite(writer, BUILTIN, HostDevice(0), [], dtypes=["float32"], kinds=["grouped"])
    assert [r.detail for r in results] == ["it writes in front of the hidden states"]


@pytest.mark.parametrize("op", few((schema.name for schema in COMPOSITES), "norm_qkv_rotary_write", "head"))
def test_a_composite_that_is_two_percent_off_is_found(op: str) -> None:
    kinds = small_families()
    results = check_composite(Expansion(op, 1.02), BUILTIN, HostDevice(0), [], dtypes=["float32"], kinds=kinds)
    assert results and all(r.outcome == "failed" and "of the largest value" in r.detail for r in results)


#: Number of families that call each of the other composites; 0 for those with cases of their own.
OTHERS = {
    "latent_attention_block": 9, "latent_attend": 9, "index_block": 3, "delta_block": 3, "gated_attention_block": 3,
    "all_reduce_norm": 0, "vocab_embedding": 0, "vocab_greedy": 0,
}  # fmt: skip


def test_every_core_composite_is_covered_by_these_tests() -> None:
    every = {schema.name for schema in BUILTIN if schema.composite}
    assert every == {schema.name for schema in COMPOSITES} | OTHERS.keys()


@pytest.fixture
def plan(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """``plan(kernel)``: the kit's results for a backend that has only this composite kernel."""
    install_reference_backend(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    subject = open_subject("reference")

    def run(kernel: Kernel, *types: str) -> list[CaseResult]:
        mine = replace(subject, kernels=(Provided(kernel, "reference", "mine", "1"),))
        (check,) = (c for c in Checklist(mine, CheckRequest(3, (kernel.name,), types)).checks if c.area == "composites")
        return [result for result in check.run() if "on the host" not in result.case]

    return run


@pytest.mark.parametrize(
    "op", few(OTHERS, "gated_attention_block", "all_reduce_norm", "vocab_embedding", "vocab_greedy")
)
def test_composites_of_other_mixers_and_of_ranks_pass_when_right_and_fail_when_wrong(op: str, plan: Any) -> None:
    right = plan(Expansion(op), "float32", "bfloat16")
    assert {r.outcome for r in right} == {"passed"}, "\n".join(map(str, right))
    assert len(right) == 2 * OTHERS[op] if OTHERS[op] else len(right) > 4
    wrong = plan(Expansion(op, 1.02), "float32")
    assert sum(r.outcome == "failed" for r in wrong) >= max(1, OTHERS[op]), "\n".join(map(str, wrong))


@pytest.mark.parametrize(
    "op",
    few(("attention_block", "mlp_block", "decoder_layer", "head"), "mlp_block"),
)
def test_a_variant_that_a_kernel_does_not_know_is_not_applicable(op: str) -> None:
    kernel = Expansion(op)
    kernel.non_default = frozenset()
    checked = check_composite(kernel, BUILTIN, HostDevice(0), [], dtypes=["float32"], kinds=small_families())
    results = {result.case.split(" layers")[0]: result for result in checked}
    for name, result in results.items():
        rare = name in ("layer-normed", "parallel")
        rare |= name == "alibi" and op in ("attention_block", "decoder_layer")
        wanted = "not applicable" if rare else "passed"
        assert (result.outcome, "does not know" in result.detail) == (wanted, rare), str(result)
    assert results.keys() & {"layer-normed", "parallel"}
    if op == "mlp_block":
        assert results["layer-normed"].detail == "does not know norm=biased_layer"


class Careless(Expansion):
    """Correct, but it changes the weight of its norm."""

    def build(self, call: OpCall) -> OpFunction:
        run, calls = super().build(call), iter(range(1000))

        def go(x: torch.Tensor, residual: torch.Tensor, weights: Any) -> Any:
            result = run(x, residual, weights)
            weights.norm.mul_(1 + 1e-6 * (next(calls) == 0))
            return result

        return go


def test_a_composite_that_writes_to_a_weight_is_found() -> None:
    kinds = ("grouped", "windowed", "biased")
    results = check_composite(Careless("mlp_block"), BUILTIN, HostDevice(0), [], dtypes=["float32"], kinds=kinds)
    assert all("weight layers.0.post_attention_layernorm.weight was changed" in r.detail for r in results)


class Silu(Expansion):
    """An MLP block that supports one activation, and may ignore one detail of its input."""

    def __init__(self, forgets: str = "", **instead: Any) -> None:
        super().__init__("mlp_block")
        self._forgets, self._instead = forgets, instead

    def supports(self, call: OpCall) -> str | None:
        usual = call.static["activation"] == "silu" and call.static["norm"] == "rms"
        return None if usual else "computes silu behind an RMS norm"

    def build(self, call: OpCall) -> OpFunction:
        run = super().build(replace(call, static={**call.static, **self._instead}))
        return lambda x, residual, w: run(x, residual, w._replace(**{self._forgets: None}) if self._forgets else w)


@pytest.fixture(scope="module")
def right() -> list[CaseResult]:
    """What the kit says of a correct block that supports one activation."""
    kinds = small_families()
    return check_composite(Silu(), BUILTIN, HostDevice(0), [], dtypes=["float32"], kinds=kinds)


@pytest.mark.parametrize(
    ("forgets", "instead"),
    [("gate_up_bias", {}), ("post_norm", {"post_norm": False}), ("", {"offset": 0.0}),
     pytest.param("down_bias", {}, marks=pytest.mark.slow), pytest.param("", {"eps": 1e-6}, marks=pytest.mark.slow)],
)  # fmt: skip
def test_options_of_refused_families_are_checked_one_at_a_time(
    forgets: str, instead: dict[str, Any], right: list[CaseResult]
) -> None:
    alone = {r.case.partition(" over ")[0] for r in right if " layers with " in r.case}
    assert {r.outcome for r in right} == {"passed", "not applicable"}
    wanted = {"post_norm post_mlp as windowed", "bias True as biased", "offset 1.0 as windowed"}
    assert {f"grouped layers with {each} layers" for each in wanted} <= alone
    kernel, kinds = Silu(forgets, **instead), ("grouped", "windowed", "biased")
    wrong = check_composite(kernel, BUILTIN, HostDevice(0), [], dtypes=["float32"], kinds=kinds)
    assert [r for r in wrong if r.outcome == "failed" and " layers with " in r.case]


class Tall(Expansion):
    """It takes another path above ``rows`` rows, which ignores the bias of gate and up."""

    def __init__(self, rows: int) -> None:
        super().__init__("mlp_block")
        self._rows = rows

    def build(self, call: OpCall) -> OpFunction:
        run = super().build(call)
        return lambda x, residual, w: run(x, residual, w._replace(gate_up_bias=None) if len(x) > self._rows else w)


@pytest.mark.parametrize("rows", [40, 128])
def test_a_composite_that_is_wrong_above_some_number_of_rows_is_found(rows: int) -> None:
    kinds = ("grouped", "biased")
    right, wrong = check_composite(Tall(rows), BUILTIN, HostDevice(0), [], dtypes=["float32"], kinds=kinds)
    assert right.outcome == "passed"
    assert wrong.outcome == "failed" and wrong.detail.startswith("step 4 of 137 rows: hidden states differ")


def test_a_composite_that_is_wrong_for_a_single_row_is_found() -> None:
    class Alone(Expansion):
        def build(self, call: OpCall) -> OpFunction:
            run = super().build(call)
            return lambda x, residual, w: run(x, residual, w._replace(gate_up_bias=None) if len(x) == 1 else w)

    kernel = Alone("mlp_block")
    (found,) = check_composite(kernel, BUILTIN, HostDevice(0), [], dtypes=["float32"], kinds=("biased",))
    assert found.outcome == "failed" and found.detail.startswith("step 3 of 1 rows: hidden states differ")


@pytest.mark.parametrize(("factor", "outcome"), [(1.0, "passed"), (1.1, "failed")])
def test_a_composite_for_one_row_only_is_checked_with_the_steps_of_one_row(factor: float, outcome: str) -> None:
    class Single(Expansion):
        def supports(self, call: OpCall) -> str | None:
            return f"computes one row, not {call.bucket.high}" if call.bucket.high > 1 else None

    kernel = Single("mlp_block", factor)
    (found,) = check_composite(kernel, BUILTIN, HostDevice(0), [], dtypes=["float32"], kinds=("biased",))
    assert found.outcome == outcome
    assert outcome == "passed" or found.detail.startswith("step 3 of 1 rows: hidden states differ")


def test_a_failure_names_the_parameters_by_which_a_kernel_may_take_another_path() -> None:
    kinds = ("windowed", "biased")
    results = check_composite(Expansion("mlp_block", 1.1), BUILTIN, HostDevice(0), [], dtypes=["float32"], kinds=kinds)
    assert [r.case.partition(" (")[2] for r in results] == [
        "eps=0.1, offset=1.0, norm=rms, activation=gelu_tanh, gated=True, pre_norm=True, post_norm=True)",
        "eps=0.1, norm=rms, activation=gelu, gated=True, bias=True, pre_norm=True, gate_up_bias, down_bias)",
    ]


#: The widths are the same for each of the others.
@pytest.mark.parametrize(
    "op",
    few(
        (*(schema.name for schema in COMPOSITES), *(op for op, count in OTHERS.items() if count)),
        "decoder_layer",
        "index_block",
    ),
)
def test_a_kernel_for_multiples_of_64_can_pass(op: str) -> None:
    class Tiles(Expansion):
        def supports(self, call: OpCall) -> str | None:
            sizes = {call.static[name] for name in ("hidden", "inner", "vocab", "rank") if name in call.static}
            odd = sorted(size for size in sizes if size % 64)
            return f"{odd[0]} is no multiple of 64" if odd else None

    kinds = [family.name for family in families() if family.hidden >= 128]
    results = check_composite(Tiles(op), BUILTIN, HostDevice(0), [ReferenceState()], dtypes=["float32"], kinds=kinds)
    assert not [str(r) for r in results if r.outcome == "failed"]
    passed = {r.case.partition(" layers")[0] for r in results if r.outcome == "passed"}
    assert {name.rpartition(" ")[2] for name in passed if " of " in name} == {"128", "256"}


@pytest.mark.parametrize("forgets", ["copies", "elsewhere"])
def test_a_block_that_forgets_copies_of_experts_or_experts_on_other_ranks_is_found(forgets: str) -> None:
    class Forgetful(Expansion):
        def build(self, call: OpCall) -> OpFunction:
            run = super().build(call)

            def go(x: torch.Tensor, residual: torch.Tensor, w: Any) -> Any:
                changed = {"slots": w.slots[:, :1]} if forgets == "copies" else {"slots": w.slots.clamp(min=0)}
                return run(x, residual, w._replace(**changed))

            return go

    kinds = ("plain expert", "spread expert", "divided expert")
    results = check_composite(Forgetful("moe_block"), BUILTIN, HostDevice(0), [], dtypes=["float32"], kinds=kinds)
    divided = "passed" if forgets == "copies" else "failed"
    assert [r.outcome for r in results] == ["passed", "failed", divided], "\n".join(map(str, results))


def test_state_that_a_composite_writes_wrongly_is_named() -> None:
    class Swapped(Expansion):
        def build(self, call: OpCall) -> OpFunction:
            run = super().build(call)

            def go(*inputs: Any) -> Any:
                result = run(*inputs)
                inputs[-2][1].mul_(2)  # (keys, values) of the layer
                return result

            return go

    (result,) = check_composite(
        Swapped("norm_qkv_rotary_write"), BUILTIN, HostDevice(0), [], dtypes=["float32"], kinds=("grouped",)
    )
    assert "written value of layers.0.self_attn, request 0 differ" in result.detail, result
    kernel = Expansion("attention_block", 1.1)
    (found,) = check_composite(kernel, BUILTIN, HostDevice(0), [], dtypes=["float32"], kinds=("windowed",))
    assert "qk_norm=True" in found.case and "window=12, softcap=20.0" in found.case


def test_no_single_option_checks_are_added_when_every_family_is_supported() -> None:
    kinds = small_families()
    results = check_composite(Expansion("mlp_block"), BUILTIN, HostDevice(0), [], dtypes=["float32"], kinds=kinds)
    assert results and not [r.case for r in results if " layers with " in r.case]


def test_a_refusal_is_recorded_with_its_reason() -> None:
    results = check_composite(Expansion("mlp_block", refuse="odd"), BUILTIN, HostDevice(0), [], dtypes=["float32"])
    assert {(r.outcome, r.detail) for r in results} == {("not applicable", "odd")}


def test_a_composite_that_no_layer_calls_needs_cases() -> None:
    results = check_composite(Expansion("sample"), BUILTIN, HostDevice(0), [], dtypes=["float32"])
    assert {r.outcome for r in results} == {"failed"}
    assert "no layer of the kit calls op 'sample'; add cases='module:function' to its OpSchema" in results[0].detail


def test_the_weights_of_the_checked_model_are_declared_like_those_of_real_ones() -> None:
    model = TinyModel(HostDevice(0), "float32", families()[0], (), ReferenceState(), BUILTIN)
    assert {len(w.parts) for w in model.build.weights if isinstance(w, LinearWeight)} == {1, 2, 3}
