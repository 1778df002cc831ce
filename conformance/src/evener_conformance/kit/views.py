"""Checking views of checkpoints: what a package announces as ``checkpoint_views``, and a view that it made."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch

from evener.contracts.checkpoint import Checkpoint
from evener.contracts.conversion.views import CheckpointView, ViewRequest
from evener.contracts.quant import BLOCKS
from evener.layers.causal_lm import CausalLM
from evener_conformance.kit.compare import bitwise_equal, join_problems
from evener_conformance.kit.formats import HeldCheckpoint
from evener_conformance.kit.outcome import CaseResult, Check, format_backend_exception

CHANGES = ("files", "names", "numbers")
KEYS = frozenset({"quant", "weight_map"})


def view_results(check: Check, load: Callable[[], Any], seed: int) -> Iterator[CaseResult]:
    """Check an announced class, and that it leaves a run alone that asks for nothing.

    Args:
        load: imports the class.
    """
    cases: tuple[tuple[str, Callable[[], list[str]]], ...] = (
        ("the announced class", lambda: class_problems(load())),
        ("a plain checkpoint, and no key set", lambda: _plain_problems(load(), seed)),
    )
    for case, find in cases:
        try:
            problems = find()
        except Exception as error:  # the package's exception is the failure
            problems = [format_backend_exception(error)]
        yield check.result(case, "failed" if problems else "passed", join_problems(problems))


def class_problems(cls: Any) -> list[str]:
    """What an announced object is not."""
    if not isinstance(cls, type) or not issubclass(cls, CheckpointView):
        return [f"{cls!r} is no subclass of CheckpointView"]
    found = []
    if getattr(cls, "changes", None) not in CHANGES:
        found.append(f"changes is {getattr(cls, 'changes', None)!r}; it must be one of {', '.join(CHANGES)}")
    if unknown := sorted(set(cls.keys) - KEYS):
        found.append(f"keys names {', '.join(unknown)}; a view can carry out {' and '.join(sorted(KEYS))}")
    return found


def view_problems(view: Checkpoint) -> list[str]:
    """The problems of a view: its tensors are read, and compared with its headers, its extents, and themselves. For
    tests of packages too, with a view that was made for a small checkpoint."""
    found = [f"copied names {name!r}, which headers lack" for name in sorted(view.copied - view.headers.keys())]
    for name, (dtype, shape) in view.headers.items():
        tensor = view.tensor(name)
        found += [f"{name}: {each}" for each in _tensor_problems(tensor, dtype, shape)]
        if not bitwise_equal(tensor, view.tensor(name)):
            found.append(f"{name} has other numbers when it is read again")
        extent = view.extent(name)
        if extent is not None:
            stored = np.fromfile(extent.file, dtype=np.uint8, count=tensor.nbytes, offset=extent.offset)
            read = tensor.contiguous().reshape(-1).view(torch.uint8).numpy()
            if not np.array_equal(stored, read):
                found.append(f"{name} has other bytes at its extent than tensor() returns")
    return found


def _tensor_problems(tensor: torch.Tensor, dtype: str, shape: tuple[int, ...]) -> Iterator[str]:
    if dtype in BLOCKS:
        elements, nbytes = BLOCKS[dtype]
        dtype, shape = "uint8", (*shape[:-1], shape[-1] // elements * nbytes)
    have = str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape)
    if have != (dtype, shape):
        yield f"tensor() returned {have[0]} {list(have[1])}, but headers say {dtype} {list(shape)}"


def _plain_problems(cls: type[CheckpointView], seed: int) -> list[str]:
    generator = torch.Generator().manual_seed(seed)
    stored = {
        "model.embed_tokens.weight": torch.randn(7, 6, generator=generator),
        "model.norm.weight": torch.ones(6, dtype=torch.bfloat16),
    }
    headers = {name: (str(t.dtype).removeprefix("torch."), tuple(t.shape)) for name, t in stored.items()}
    config = {"architectures": ["ExampleForCausalLM"], "model_type": "example"}
    # No view makes a model of it here.
    view = cls.of(ViewRequest(HeldCheckpoint(config, headers, stored), CausalLM))  # type: ignore[type-abstract]
    return [] if view is None else ["it changes a checkpoint although nothing asks for it", *view_problems(view)]
