"""A vendor's ops are called only if the installed package registers what was published."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from stand_ins import COMMON, installed, rms_norm

from evener.errors import BackendError
from evener_backend_parts.library import Library
from evener_backend_parts.vendor_ops import PublishedOps, VendorOps, registered

NORM = "rms_norm(Tensor! result, Tensor input, Tensor weight, float epsilon) -> ()"
PUBLISHED = PublishedOps("https://github.com/a/b", "c" * 40, "ops.cpp", {"some_vendor::rms_norm": NORM},
                         {"some_vendor::rms_norm": 7})  # fmt: skip
FUNCTIONS = {"some_vendor::rms_norm": rms_norm}


@pytest.fixture
def ops() -> VendorOps:
    return VendorOps(PUBLISHED, Library("some_vendor_ops", ("some-vendor-ops",), "1.0", "", "some-vendor-ops"))


def refusal(ops: VendorOps) -> str | None:
    return ops.refusal("some_vendor::rms_norm", "chip")


def test_a_package_that_is_missing_is_refused_with_what_to_type_L1(ops: VendorOps) -> None:
    assert refusal(ops) == "some-vendor-ops 1.0 or later is not installed; pip install some-vendor-ops"


def test_ops_as_published_are_called_L1(ops: VendorOps, tmp_path: Path) -> None:
    with installed(tmp_path, ops, functions=FUNCTIONS):
        assert refusal(ops) is None
        x = torch.tensor([[3.0, 4.0]])
        y = torch.empty_like(x)
        ops.function("some_vendor::rms_norm")(result=y, input=x, weight=torch.ones(2), epsilon=0.0)
    assert torch.allclose(y, x / 12.5**0.5)
    assert registered("some_vendor::rms_norm") is None, "the stand-in is gone"


@pytest.mark.parametrize(
    "schema",
    [
        "rms_norm(Tensor! result, Tensor input, Tensor weight, float eps) -> ()",
        "rms_norm(Tensor! result, Tensor input, Tensor weight, Tensor epsilon) -> ()",
        "rms_norm(Tensor! result, Tensor input, Tensor? weight, float epsilon) -> ()",
        "rms_norm(Tensor result, Tensor input, Tensor weight, float epsilon) -> ()",
        "rms_norm(Tensor! result, Tensor input, Tensor weight, float epsilon, bool gemma=False) -> ()",
        "rms_norm(Tensor! result, Tensor input, Tensor weight, float epsilon) -> Tensor",
    ],
    ids=["a name", "a type", "optional", "not written", "one more", "a result"],
)
def test_an_op_that_differs_from_what_was_published_is_refused_with_both_L1(
    ops: VendorOps, schema: str, tmp_path: Path
) -> None:
    with installed(tmp_path, ops, {"some_vendor::rms_norm": schema}, FUNCTIONS):
        said = refusal(ops) or ""
    assert "some-vendor-ops 1.0 registers some_vendor::rms_norm(" in said
    assert NORM in said and "https://github.com/a/b@cccccccccccc ops.cpp:7" in said


def test_an_op_that_the_package_does_not_register_is_refused_L1(ops: VendorOps, tmp_path: Path) -> None:
    with installed(tmp_path, ops, {}, {}):
        assert refusal(ops) == (
            "some-vendor-ops 1.0 does not register some_vendor::rms_norm, which https://github.com/a/b@cccccccccccc "
            "ops.cpp:7 defines"
        )


def test_an_op_without_a_published_schema_is_an_error_L1(ops: VendorOps) -> None:
    with pytest.raises(BackendError, match="the published schemas have only: some_vendor::rms_norm"):
        ops.refusal("some_vendor::other", "chip")


def test_the_stand_ins_cover_the_names_that_vendors_share_L1() -> None:
    from evener_backend_parts.vllm_ops import ACTIVATIONS

    assert COMMON.keys() == {"_C::rms_norm", *ACTIVATIONS.values()}
