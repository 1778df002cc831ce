"""The kit's checks of checkpoint views: the installed ones pass, and each kind of fault is found."""

from __future__ import annotations

from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch

from evener.contracts.checkpoint import Checkpoint, Extent, Headers
from evener.contracts.conversion.views import CheckpointView, ViewRequest
from evener.plugins.discover import installed_catalog
from evener_conformance.kit.formats import HeldCheckpoint
from evener_conformance.kit.outcome import CaseResult, Check
from evener_conformance.kit.views import view_problems, view_results

VIEWS = installed_catalog().lazy_imports("checkpoint view")


def results(cls: Any) -> list[CaseResult]:
    return list(view_results(Check("formats", "mine", "mine", lambda: ()), lambda: cls, 3))


def faults(cls: Any) -> str:
    return "; ".join(result.detail for result in results(cls) if result.outcome == "failed")


def held() -> Checkpoint:
    stored = {"a": torch.randn(2, 3), "b": torch.ones(4, dtype=torch.bfloat16)}
    headers = {name: (str(t.dtype).removeprefix("torch."), tuple(t.shape)) for name, t in stored.items()}
    return HeldCheckpoint({}, headers, stored)


class Idle(CheckpointView):
    """It has nothing to do."""

    changes = "numbers"

    @classmethod
    def of(cls, request: ViewRequest) -> CheckpointView | None:
        return None


class Eager(Idle):
    @classmethod
    def of(cls, request: ViewRequest) -> CheckpointView | None:
        return cls(request.checkpoint)


class Failing(Idle):
    @classmethod
    def of(cls, request: ViewRequest) -> CheckpointView | None:
        raise ZeroDivisionError("by zero")


class Unordered(Idle):
    changes: ClassVar[Any] = "everything"


class Claims(Idle):
    keys = frozenset({"quant", "dtype"})


@pytest.mark.parametrize("name", VIEWS)
def test_the_view_of_an_installed_package_passes(name: str) -> None:
    assert {"split", "weight_map", "quantize"} <= VIEWS.keys()
    assert [result.outcome for result in results(VIEWS[name].load())] == ["passed", "passed"]


def test_a_view_that_keeps_the_contract_passes() -> None:
    assert [result.outcome for result in results(Idle)] == ["passed", "passed"]


@pytest.mark.parametrize(
    ("cls", "message"),
    [
        (dict, "is no subclass of CheckpointView"),
        (Unordered, "changes is 'everything'; it must be one of files, names, numbers"),
        (Claims, "keys names dtype; a view can carry out quant and weight_map"),
        (Eager, "it changes a checkpoint although nothing asks for it"),
        (Failing, "raised ZeroDivisionError: by zero"),
    ],
)
def test_a_class_that_breaks_the_contract_fails(cls: Any, message: str) -> None:
    assert message in faults(cls)


class Faulty(Eager):
    """A view with a fault of one kind."""

    def __init__(self, inner: Checkpoint, fault: str, file: Path) -> None:
        super().__init__(inner)
        self._fault, self._file, self._reads = fault, file, iter(range(9))
        if fault == "copied":
            self.copied = frozenset({"c"})

    @property
    def headers(self) -> Headers:
        return {**self.inner.headers, "a": ("float32", (3, 2))} if self._fault == "shape" else self.inner.headers

    def tensor(self, name: str) -> torch.Tensor:
        found = self.inner.tensor(name)
        return found + next(self._reads) if self._fault == "unsteady" else found

    def extent(self, name: str) -> Extent | None:
        return Extent(self._file, 8) if self._fault == "extent" else None


FAULTS = {
    "copied": "copied names 'c', which headers lack",
    "shape": "a: tensor() returned float32 [2, 3], but headers say float32 [3, 2]",
    "unsteady": "a has other numbers when it is read again",
    "extent": "a has other bytes at its extent than tensor() returns",
}


@pytest.mark.parametrize(("fault", "message"), FAULTS.items())
def test_tensors_that_are_not_what_the_view_says_are_found(fault: str, message: str, tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(bytes(64))
    assert message in "; ".join(view_problems(Faulty(held(), fault, tmp_path / "file")))
    assert view_problems(Faulty(held(), "none", tmp_path / "file")) == []
