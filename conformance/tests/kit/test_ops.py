"""The kernel check finds defects of a kernel, and passes a correct one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch

from evener.contracts.ops import Kernel, OpCall, OpFunction
from evener.contracts.quant import PackedWeight
from evener.ops.parts import load_reference
from evener.ops.reference.linear import PLAIN
from evener.ops.schemas import BUILTIN
from evener_conformance.kit.cases import has_cases
from evener_conformance.kit.cases.basic import LARGE_MATRICES
from evener_conformance.kit.ops import FEW_ROW_COUNTS, _changed, check_kernel, forbid_nested_ops
from evener_conformance.kit.outcome import CaseResult
from evener_conformance.reference.device import HostDevice

SCHEMAS = {schema.name: schema for schema in BUILTIN if not schema.composite}


class Wrapped(Kernel):
    """The reference of an op, with a change."""

    name = "wrapped"

    def __init__(
        self, op: str, change: Callable[[OpFunction], OpFunction], refuse: str | None = None, **claims: Any
    ) -> None:
        self.op, self._change, self._refuse = op, change, refuse
        for claim, value in claims.items():
            setattr(self, claim, value)

    def supports(self, call: OpCall) -> str | None:
        return self._refuse

    def build(self, call: OpCall) -> OpFunction:
        return self._change(load_reference(SCHEMAS[self.op])(call.static, forbid_nested_ops))


def check(kernel: Kernel, *dtypes: str) -> list[CaseResult]:
    return check_kernel(kernel, SCHEMAS[kernel.op], HostDevice(0), dtypes or ("float32",))


def failures(op: str, change: Callable[[OpFunction], OpFunction], **claims: Any) -> str:
    results = check(Wrapped(op, change, **claims))
    assert any(r.outcome == "failed" for r in results)
    return "\n".join(str(r) for r in results if r.outcome == "failed")


@pytest.mark.parametrize(
    "dtypes", [("bfloat16",), *(pytest.param((dtype,), marks=pytest.mark.slow) for dtype in ("float32", "float16"))]
)
@pytest.mark.parametrize("op", [op for op in SCHEMAS if has_cases(SCHEMAS[op])])
def test_the_reference_of_every_op_passes_in_every_dtype(op: str, dtypes: tuple[str, ...]) -> None:
    results = check(Wrapped(op, lambda run: run, packings=(PLAIN,)), *dtypes)
    assert results and all(r.outcome == "passed" for r in results), "\n".join(map(str, results))


def test_a_refusal_is_recorded_with_its_reason() -> None:
    results = check(Wrapped("softcap", lambda run: run, refuse="only at sea"))
    assert {(r.outcome, r.detail) for r in results} == {("not applicable", "only at sea")}
    assert str(results[0]).startswith("wrapped softcap[float32] 1 rows, cap=30.0, dtype=float32: not applicable only")


def test_a_wrong_value_is_found() -> None:
    assert "elements differ; worst at" in failures("softcap", lambda run: lambda x: run(x) + 0.1)


def test_a_wrong_id_is_found() -> None:
    def last(run: OpFunction) -> OpFunction:
        return lambda logits: (logits.shape[1] - 1 - logits.flip(-1).argmax(-1)).int()

    assert "elements differ; worst at" in failures("greedy", last)


def test_a_wrong_dtype_is_found() -> None:
    assert "y is torch.float64, not float32" in failures("softcap", lambda run: lambda x: run(x).double())


def test_writing_to_an_input_that_is_not_donated_is_found() -> None:
    def careless(run: OpFunction) -> OpFunction:
        def go(x: torch.Tensor) -> torch.Tensor:
            y = run(x)
            x += 1
            return y  # type: ignore[no-any-return]

        return go

    assert "input x is not donated and was changed" in failures("softcap", careless)


def test_writing_to_a_weight_is_found() -> None:
    def careless(run: OpFunction) -> OpFunction:
        def go(x: torch.Tensor, weight: PackedWeight, bias: torch.Tensor | None) -> torch.Tensor:
            y = run(x, weight, bias)
            weight.data.add_(1)
            return y  # type: ignore[no-any-return]

        return go

    assert "input weight is not donated and was changed" in failures("linear", careless, packings=(PLAIN,))


def test_a_donated_input_may_be_overwritten() -> None:
    def in_place(run: OpFunction) -> OpFunction:
        def go(x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor) -> Any:
            y, total = run(x, residual, weight)
            return x.copy_(y), residual.copy_(total)

        return go

    assert {r.outcome for r in check(Wrapped("add_rms_norm", in_place))} == {"passed"}


def test_a_kernel_that_ignores_strides_is_found() -> None:
    def flat(run: OpFunction) -> OpFunction:
        return lambda x: run(x.as_strided(x.shape, (x.shape[1], 1)))

    found = failures("softcap", flat)
    assert "rows cut from wider ones: y: " in found
    assert ": failed y: " not in found


def test_a_false_claim_of_determinism_is_found() -> None:
    counter = iter(range(1, 1000))
    drifting = failures("softcap", lambda run: lambda x: run(x) + next(counter) * 1e-7)
    assert "claims to be deterministic" in drifting
    modest = Wrapped("softcap", lambda run: lambda x: run(x) + next(counter) * 1e-9, deterministic=False)
    assert {r.outcome for r in check(modest)} == {"passed"}


def test_a_false_claim_of_batch_invariance_is_found() -> None:
    def crowded(run: OpFunction) -> OpFunction:
        return lambda x: run(x) * (1 + len(x) * 3e-8)

    assert "rows have other bits when computed alone" in failures("softcap", crowded, batch_invariant=True)
    assert {r.outcome for r in check(Wrapped("softcap", crowded))} == {"passed"}


@pytest.mark.parametrize(
    "op",
    ["rms_norm", "add_rms_norm", "layer_norm", "linear",
     *(pytest.param(op, marks=pytest.mark.slow) for op in ("grouped_linear", "head_linear"))],
)  # fmt: skip
def test_each_size_meets_each_number_of_rows(op: str) -> None:
    met: dict[str, set[int]] = {}
    for result in check(Wrapped(op, lambda run: run, packings=(PLAIN,))):
        rows, _, sizes = result.case.partition(" rows, ")
        met.setdefault(sizes, set()).add(int(rows))
    large = {
        sizes for sizes in met if any(f"columns={columns}, rows={rows}," in sizes for rows, columns in LARGE_MATRICES)
    }
    assert [sizes for sizes in large if not {2, FEW_ROW_COUNTS[0]} <= met[sizes]] == []
    others = {sizes: rows for sizes, rows in met.items() if sizes not in large}
    assert [sizes for sizes, rows in others.items() if max(rows) and not set(FEW_ROW_COUNTS) <= rows] == []


@pytest.mark.parametrize(
    "op", ["linear", *(pytest.param(op, marks=pytest.mark.slow) for op in ("grouped_linear", "head_linear"))]
)
@pytest.mark.parametrize(("size", "limit"), [("columns", 4096), ("rows", 8192)])
def test_products_with_deep_and_wide_matrices_are_checked(op: str, size: str, limit: int) -> None:
    class Limited(Wrapped):
        def build(self, call: OpCall) -> OpFunction:
            run = super().build(call)
            return run if call.static[size] <= limit else lambda *inputs: run(*inputs) * 1.1

    failed = [r for r in check(Limited(op, lambda run: run, packings=(PLAIN,))) if r.outcome == "failed"]
    assert {int(r.case.partition(f"{size}=")[2].split(",")[0]) > limit for r in failed} == {True}


def test_a_float32_result_that_was_rounded_to_the_compute_dtype_is_found() -> None:
    def rounded(run: OpFunction) -> OpFunction:
        return lambda *inputs: run(*inputs).bfloat16().float()

    class Rounded(Wrapped):
        def build(self, call: OpCall) -> OpFunction:
            run = super().build(call)
            return rounded(run) if call.static["out"] == "float32" else run

    failed = [r for r in check(Rounded("linear", lambda run: run, packings=(PLAIN,)), "bfloat16")
              if r.outcome == "failed"]  # fmt: skip
    assert failed and all("out=float32" in r.case for r in failed)


@pytest.mark.parametrize("dtype", ["float32", pytest.param("bfloat16", marks=pytest.mark.slow)])
def test_scores_that_are_rounded_before_a_draw_are_found(dtype: str) -> None:
    def rounded(run: OpFunction) -> OpFunction:
        def go(logits: torch.Tensor, temperature: torch.Tensor, *rest: torch.Tensor) -> Any:
            warm = torch.where(temperature > 0, temperature, 1.0)
            scores = (logits.float() / warm[:, None]).bfloat16()
            return run(scores, (temperature > 0).float(), *rest)

        return go

    failed = [r for r in check(Wrapped("sample", rounded), dtype) if r.outcome == "failed"]
    assert any(r.case.startswith("128 rows") for r in failed)


class Ranked(Wrapped):
    """Routing that ranks groups by itself; ``twice``: scores that equal the last of a group's best count too."""

    def __init__(self, twice: bool) -> None:
        super().__init__("route", lambda run: run)
        self._twice = twice

    def build(self, call: OpCall) -> OpFunction:
        run, s = super().build(call), call.static

        def row(logits: torch.Tensor, bias: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
            scores = logits.sigmoid() if s["scoring"] == "sigmoid" else logits.softmax(-1)
            grid = (scores if bias is None else scores + bias).view(s["groups"], -1)
            best = grid.topk(s["group_best"], dim=-1).values
            more = (grid == best[:, -1:]).sum(-1) - (best == best[:, -1:]).sum(-1)
            total = best.sum(-1) + (more * best[:, -1] if self._twice else 0)
            kept = total.sort(descending=True, stable=True).indices[: s["top_groups"]]
            others = torch.full_like(grid, -1e6).index_fill_(0, kept, 0.0).flatten()
            return run(logits, others if bias is None else bias + others)  # type: ignore[no-any-return]

        def go(logits: torch.Tensor, bias: torch.Tensor | None) -> Any:
            made = [row(each, bias) for each in logits.split(1)]
            return tuple(map(torch.cat, zip(*made, strict=True)))

        return go if s["groups"] > 1 else run


def test_equal_scores_that_count_twice_in_a_group_are_found() -> None:
    assert [r for r in check(Ranked(False)) if r.outcome == "failed" and not r.case.startswith("0 rows")] == []
    failed = [r for r in check(Ranked(True)) if r.outcome == "failed" and not r.case.startswith("0 rows")]
    assert {group for group in ("groups=6", "groups=3") for r in failed if group in r.case} == {"groups=6", "groups=3"}


def test_a_changed_tensor_among_several_of_an_input_is_named() -> None:
    class Pair(NamedTuple):
        norm: torch.Tensor
        bias: torch.Tensor | None

    was, now = Pair(torch.zeros(2), None), Pair(torch.ones(2), None)
    assert list(_changed("weights", was, now)) == ["weights.norm"]
    assert list(_changed("views", (torch.zeros(1), torch.zeros(1)), (torch.zeros(1), torch.ones(1)))) == ["views.1"]
    assert list(_changed("weights", was, was)) == []


def _adapters(*, skips: int | None = None, half: bool = False, moved: bool = False, alone: bool = False) -> Any:
    """A kernel for ``add_adapters`` that takes another adapter for a row, half of a rank, another part's products, or
    forgets what was there before."""

    def change(run: OpFunction) -> OpFunction:
        def go(y: torch.Tensor, x: torch.Tensor, down: torch.Tensor, up: torch.Tensor, index: torch.Tensor) -> Any:
            if skips is not None:
                index = torch.where(index == skips, (index + 1) % len(up), index)
            if half:
                up = up.clone()
                up[..., (up.shape[2] + 1) // 2 :] = 0
            if moved:
                down = down.roll(up.shape[2], 1)
            return run(torch.zeros_like(y) if alone else y, x, down, up, index)

        return go

    return change


@pytest.mark.parametrize(
    "fault",
    [{"half": True},
     *(pytest.param(fault, marks=pytest.mark.slow)
       for fault in ({"skips": 0}, {"skips": -1}, {"moved": True}, {"alone": True}))],
    ids=str,
)  # fmt: skip
def test_wrong_adapters_are_found(fault: dict[str, Any]) -> None:
    assert "elements differ; worst at" in failures("add_adapters", _adapters(**fault))
