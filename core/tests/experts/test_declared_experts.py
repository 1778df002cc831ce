"""Experts are one declared weight, whichever way a checkpoint stores them."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from evener.contracts.checkpoint import Checkpoint
from evener.contracts.declared import StackedWeight
from evener.contracts.quant import PackedWeight
from evener.errors import CheckpointError
from evener.layers import Builder
from evener.loading.checkpoint import open_checkpoint
from evener.loading.estimate import estimate_weights
from evener.loading.loader import load_weights
from evener.loading.scheme import Unquantized
from evener.ops.reference.linear import PLAIN
from evener_conformance.reference.pinned_buffer_device import PinnedBufferDevice
from evener_inspection.dummy_weights import load_dummy

EXPERTS, ROWS, COLUMNS = 3, 4, 5
CPU = torch.device("cpu")
PACKINGS = {"plain": PLAIN}


def numbers(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(5)).to(dtype)


GATE, UP = numbers(2, EXPERTS, ROWS, COLUMNS).unbind()
WHOLE = torch.cat((GATE, UP), 1)
ONE_BY_ONE = {f"e.{i}.{name}": t[i].contiguous() for i in range(EXPERTS) for name, t in (("gate", GATE), ("up", UP))}


def opened(folder: Path, tensors: dict[str, torch.Tensor]) -> Checkpoint:
    save_file(tensors, folder / "model.safetensors")
    (folder / "config.json").write_text("{}")
    return open_checkpoint(folder)


def declare(checkpoint: Checkpoint | None, transposed: bool = False, dtype: str = "float32") -> StackedWeight:
    scheme = Unquantized()
    build = Builder(dtype, 8, (lambda name: scheme.part(name, checkpoint.headers)) if checkpoint else None)
    parts = {"e.{}.gate": ROWS, "e.{}.up": ROWS}
    weight = build.experts("e.gate_up", EXPERTS, parts, COLUMNS, stacked={"e.both": 2 * ROWS}, transposed=transposed)
    weight.layout = "plain"
    return weight


def load(checkpoint: Checkpoint, **options: object) -> tuple[PackedWeight, int]:
    weight = declare(checkpoint, **options)  # type: ignore[arg-type]
    counted = load_weights([weight], checkpoint, Unquantized(), PACKINGS, CPU).allocated
    assert estimate_weights([weight], PACKINGS, checkpoint.headers).allocated == counted
    assert weight.value is not None
    again = declare(checkpoint, **options)  # type: ignore[arg-type]
    load_weights([again], checkpoint, Unquantized(), PACKINGS, CPU, pinned_device=PinnedBufferDevice())
    assert again.value is not None and torch.equal(again.value.data, weight.value.data)
    return weight.value, counted


def test_per_expert_tensors_are_copied_into_their_slices(tmp_path: Path) -> None:
    value, counted = load(opened(tmp_path, ONE_BY_ONE))
    assert torch.equal(value.data, WHOLE) and counted == WHOLE.nbytes and value.shape == (EXPERTS, 2 * ROWS, COLUMNS)


def test_a_stacked_tensor_is_read_where_there_is_one(tmp_path: Path) -> None:
    value, _ = load(opened(tmp_path, {"e.both": WHOLE.to(torch.bfloat16)}), dtype="bfloat16")
    assert torch.equal(value.data, WHOLE.to(torch.bfloat16))


def test_a_stacked_tensor_may_be_stored_with_its_columns_first(tmp_path: Path) -> None:
    value, _ = load(opened(tmp_path, {"e.both": WHOLE.transpose(1, 2).contiguous()}), transposed=True)
    assert torch.equal(value.data, WHOLE)


def test_a_missing_expert_and_a_stack_of_another_size_are_named(tmp_path: Path) -> None:
    folders = [tmp_path / name for name in "abc"]
    for folder in folders:
        folder.mkdir()
    lacking = {name: tensor for name, tensor in ONE_BY_ONE.items() if name != "e.2.up"}
    for folder, tensors, message in (
        (folders[0], lacking, "1 tensor is missing: e.2.up"),
        (folders[1], {"e.both": WHOLE[:2].contiguous()}, r"e.both is \[2, 8, 5\], not \[3, 8, 5\]"),
        (folders[2], {**ONE_BY_ONE, "e.1.gate": GATE[1].T.contiguous()}, r"e.1.gate is \[5, 4\], not \[4, 5\]"),
    ):
        with pytest.raises(CheckpointError, match=message):
            load(opened(folder, tensors))


def test_dummy_experts_differ_and_are_independent_of_storage_layout(tmp_path: Path) -> None:
    weight = declare(None)
    load_dummy([weight], PACKINGS, CPU)
    assert weight.value is not None
    assert not torch.equal(weight.value.data[0], weight.value.data[1])


def test_declaring_15616_experts_is_61_stacks_of_each_projection_and_needs_no_torch() -> None:
    code = (
        "import sys\n"
        "from evener.layers import Builder, MoEConfig\n"
        "build, moe = Builder('bfloat16', 8), MoEConfig(experts=256, top=8, inner=2048)\n"
        "common = {'hidden': 7168, 'dtype': 'bfloat16', 'eps': 1e-6, 'offset': 0.0, 'norm': 'rms'}\n"
        "for layer in range(61): moe.declare(build, f'model.layers.{layer}', common)\n"
        "from evener.contracts.declared import StackedWeight\n"
        "assert sum(isinstance(w, StackedWeight) for w in build.weights) == 122\n"
        "assert 'torch' not in sys.modules\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
