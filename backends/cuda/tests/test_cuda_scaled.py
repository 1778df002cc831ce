"""The probe of torch's products of float8 with scales, with torch's product for the host and a stand-in."""

from __future__ import annotations

import logging
from typing import Any

import pytest
import torch

from evener_backend_cuda.scaled import allow_partial_sums, scaled_features

HOST = torch.device("cpu")


def with_blocks(x: torch.Tensor, w: torch.Tensor, scale_a: torch.Tensor, scale_b: torch.Tensor, **more: Any) -> Any:
    """What torch has for some GPUs; scales of rows are blocks of a whole row."""
    wide, high = x.shape[1] // scale_a.shape[1], w.shape[1] // scale_b.shape[1]
    left = x.float() * scale_a.repeat_interleave(wide, 1)
    right = w.float() * scale_b.repeat_interleave(wide, 0).repeat_interleave(high, 1)
    return (left @ right).to(more["out_dtype"])


def test_a_product_that_torch_refuses_is_not_used_and_the_log_says_why(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "evener.cuda"):
        assert scaled_features(HOST) == {"scaled-rows"}  # as torch has it on the host
    assert "scales of blocks is not used: ValueError: Invalid scaling" in caplog.text


def test_products_with_right_results_are_used(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "_scaled_mm", with_blocks)
    assert scaled_features(HOST) == {"scaled-rows", "scaled-blocks"}


def test_a_product_with_wrong_results_is_not_used(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def wrong(x: torch.Tensor, w: torch.Tensor, scale_a: torch.Tensor, scale_b: torch.Tensor, **more: Any) -> Any:
        return with_blocks(x, w, scale_a.roll(1, 0), scale_b, **more)

    monkeypatch.setattr(torch, "_scaled_mm", wrong)
    with caplog.at_level(logging.INFO, "evener.cuda"):
        assert scaled_features(HOST) == set()
    assert "off by" in caplog.text


def test_torch_is_told_how_much_memory_partial_sums_may_take_unless_the_user_did() -> None:
    environ = dict[str, str]()
    assert allow_partial_sums(environ) == "scaled-bytes:33554432"
    assert environ == {"CUBLASLT_WORKSPACE_SIZE": "32768"}, "in KiB"
    assert allow_partial_sums({"CUBLASLT_WORKSPACE_SIZE": "1024"}) == "scaled-bytes:1048576"
    assert allow_partial_sums({"CUBLASLT_WORKSPACE_SIZE": "many"}) == "scaled-bytes:0", "torch warns of it"
