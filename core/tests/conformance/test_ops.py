"""The kernel check finds what is wrong with a kernel, and nothing where nothing is."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from evener.contracts.ops import Kernel, OpCall, OpFunction
from evener.contracts.quant import PackedWeight
from evener.ops.reference.linear import PLAIN
from evener.ops.schemas import PRIMITIVES
from evener.resolution.resolver import load_reference
from evener.testing.conformance.ops import check_kernel, no_other_op
from evener.testing.conformance.outcome import CaseResult
from evener.testing.reference_device import HostDevice

SCHEMAS = {schema.name: schema for schema in PRIMITIVES}


class Wrapped(Kernel):
    """The reference of an op, with something done to it."""

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
        return self._change(load_reference(SCHEMAS[self.op])(call.static, no_other_op))


def check(kernel: Kernel, *dtypes: str) -> list[CaseResult]:
    return check_kernel(kernel, SCHEMAS[kernel.op], HostDevice(0), dtypes or ("float32",))


def failures(op: str, change: Callable[[OpFunction], OpFunction], **claims: Any) -> str:
    results = check(Wrapped(op, change, **claims))
    assert any(r.outcome == "failed" for r in results)
    return "\n".join(str(r) for r in results if r.outcome == "failed")


@pytest.mark.parametrize("op", SCHEMAS)
def test_the_reference_of_every_op_passes_in_every_dtype(op: str) -> None:
    results = check(Wrapped(op, lambda run: run, packings=(PLAIN,)), "float32", "bfloat16", "float16")
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


def test_a_kernel_that_takes_every_tensor_for_contiguous_is_found() -> None:
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

    assert "rows alone have other bits" in failures("softcap", crowded, batch_invariant=True)
    assert {r.outcome for r in check(Wrapped("softcap", crowded))} == {"passed"}
