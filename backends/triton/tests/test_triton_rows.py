"""The package of kernels over rows alone: where it is offered, what it refuses, and that it computes the same."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from typing import Any

import pytest
import torch
from interpreted import host_kernels, schemas

from evener.contracts.ops import Bucket, OpCall
from evener_conformance.kit.ops import check_kernel
from evener_conformance.reference.device import HostDevice
from evener_kernels_triton import row_kernels, rows

DTYPES = ("float32", "bfloat16")
FEATURES = frozenset({"triton:rows", "triton:argmax", "row:1024", "programs:65535"})


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch, one_thread: None) -> HostDevice:
    """A host whose Triton compiles the kernels over rows, and launches them."""
    monkeypatch.setattr(rows, "no_driver", lambda device: None)
    host = HostDevice(0)
    host.capabilities = replace(host.capabilities, features=FEATURES)
    return host


def kernels(device: HostDevice) -> dict[str, Any]:
    return {kernel.op: kernel for kernel in rows.evener_kernels(device, {})}


def call(device: HostDevice, op: str, tokens: int = 4, **static: Any) -> OpCall:
    given = {"hidden": 64, "eps": 1e-5, "offset": 0.0, "dtype": "float32", **static}
    return OpCall(op, given, Bucket(1, tokens), device.capabilities)


def test_the_package_has_the_ops_of_its_descriptor(device: HostDevice) -> None:
    assert set(kernels(device)) == set(row_kernels.ops) == set(rows.PROGRAMS)
    assert row_kernels.needs == {"triton:rows"}


# Kernels that differ from the other package's in more than who may have them. Samples are computed by the same
# functions in smaller pieces: many draws, which show slightly wrong scores, are drawn by the other package's test.
@pytest.mark.slow
@pytest.mark.parametrize("op", ["rms_norm", "sample"])
def test_a_kernel_agrees_with_its_reference(op: str, device: HostDevice) -> None:
    results = check_kernel(
        kernels(device)[op], schemas()[op], device, DTYPES, sizes=(3,), nearest=False, most_numbers=1 << 14
    )
    assert not [str(r) for r in results if r.outcome == "failed"]
    assert set(Counter(r.dtype for r in results if r.outcome == "passed")) == set(DTYPES)


def test_filters_in_smaller_pieces_choose_the_same_ids(device: HostDevice) -> None:
    noise = torch.Generator().manual_seed(0)
    logits = torch.randn(2, 700, generator=noise) * 4
    columns = (
        torch.tensor([0.8, 1.2]), torch.tensor([20, 0], dtype=torch.int32), torch.tensor([0.9, 0.7]),
        torch.tensor([0.0, 0.02]), torch.tensor([3, 4], dtype=torch.int32), torch.tensor([9, 10], dtype=torch.int32),
    )  # fmt: skip
    asked = call(device, "sample", vocab=700, filters=True)
    (whole,) = (kernel for kernel in host_kernels(composite=False) if kernel.op == "sample")
    assert torch.equal(kernels(device)["sample"].build(asked)(logits, *columns), whole.build(asked)(logits, *columns))


@pytest.mark.parametrize(
    ("op", "tokens", "static", "reason"),
    [
        ("rms_norm", 4, {"hidden": 1025}, "holds rows of 1024 elements, not of 1025"),
        ("add_rms_norm", 4, {"hidden": 4096}, "holds rows of 1024 elements, not of 4096"),
        ("rms_norm", 256, {}, "at most 65535 programs"),
        ("act_and_mul", 8192, {"inner": 12288, "activation": "silu"}, "at most 65535 programs"),
        ("act_and_mul", 4, {"inner": 64, "activation": "relu"}, "activation 'relu'"),
        ("rms_norm", 4, {"dtype": "float64"}, "does not compute in float64"),
    ],
)
def test_calls_that_such_a_device_cannot_launch_are_refused_with_the_reason(
    op: str, tokens: int, static: dict[str, Any], reason: str, device: HostDevice
) -> None:
    found = kernels(device)[op]
    assert reason in (found.supports(call(device, op, tokens, **static)) or "")
    assert found.supports(call(device, op, 4, inner=64, activation="silu")) is None


def test_a_chip_without_the_feature_gets_none_of_them(device: HostDevice) -> None:
    found = kernels(device)["rms_norm"]
    device.capabilities = replace(device.capabilities, features=frozenset(), variant="older")
    assert found.supports(call(device, "rms_norm")) == "older does not say that Triton compiles for it (triton:rows)"


def test_without_reductions_to_an_index_nothing_is_sampled(device: HostDevice) -> None:
    device.capabilities = replace(device.capabilities, features=FEATURES - {"triton:argmax"}, variant="newer")
    reasons = {op: k.supports(call(device, op, vocab=8, filters=False, inner=8, activation="silu", cap=1.0,
                                   rotary_dim=8, head_dim=8)) for op, k in kernels(device).items()}  # fmt: skip
    assert {op for op, reason in reasons.items() if reason} == {"greedy", "sample"}
    assert reasons["greedy"] == "newer has no reduction that gives an index (triton:argmax)"


def test_a_triton_that_has_no_driver_for_the_device_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    class Active:
        def get_active_torch_device(self) -> torch.device:
            return torch.device("meta")

    class Nothing:
        def get_active_torch_device(self) -> torch.device:
            raise RuntimeError("0 active drivers ([]). There should only be one.")

    for active, reason in ((Active(), "launches on meta, not on npu"), (Nothing(), "no driver here (0 active")):
        rows.no_driver.cache_clear()
        monkeypatch.setattr(rows, "driver", type("Driver", (), {"active": active}))
        assert reason in (rows.no_driver("npu") or "")
    assert rows.no_driver("npu") == rows.no_driver("npu")
    rows.no_driver.cache_clear()
