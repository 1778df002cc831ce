"""Weights stored in blocks: kept packed where a packing takes all parts, else dequantized, and the estimate knows."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from evener.builtin.hooks import evener_op_schemas
from evener.contracts.declared import LinearWeight
from evener.contracts.device import DeviceCapabilities
from evener.contracts.ops import Kernel, OpCall, OpFunction
from evener.contracts.quant import BLOCKS, PackedWeight, Packing, WeightPart, block_format, plain
from evener.engine.facts.manifest_report import ManifestReport
from evener.errors import CheckpointError
from evener.layers.builder import Builder
from evener.loading.checkpoint import open_checkpoint
from evener.loading.estimate import WeightEstimate, estimate_weights
from evener.loading.loader import load_weights
from evener.loading.scheme import Unquantized
from evener.ops.reference.linear import PLAIN
from evener.ops.reference.state import ReferenceState
from evener.plugins.catalog import Provided
from evener.resolution.buckets import token_buckets
from evener.resolution.candidates import Candidates
from evener.resolution.resolver import Resolver

CPU = torch.device("cpu")
COLUMNS = 64


class Blocks(Unquantized):
    """Bytes are q8_0 blocks; everything else is as it is."""

    name = "blocks"

    def part(self, name: str, headers: Mapping[str, tuple[str, tuple[int, ...]]]) -> WeightPart | None:
        if name not in headers or headers[name][0] != "uint8":
            return super().part(name, headers)
        rows, nbytes = headers[name][1]
        return WeightPart(name, rows, nbytes // 34 * 32, block_format("q8_0"))

    def numbers(self, part: WeightPart) -> Iterable[torch.Tensor]:
        if part.format.plain:
            return super().numbers(part)
        return [part.tensors["weight"].unflatten(-1, (-1, 34))[..., :2].contiguous().view(torch.float16)]

    def dequantize(self, part: WeightPart, dtype: str) -> torch.Tensor:
        if part.format.plain:
            return super().dequantize(part, dtype)
        blocks = part.tensors["weight"].view(part.rows, -1, 34)
        scale = blocks[:, :, :2].contiguous().view(torch.float16).float()
        values = blocks[:, :, 2:].view(torch.int8).float() * scale
        return values.reshape(part.rows, part.columns).to(getattr(torch, dtype))


class KeepBlocks(Packing):
    """Keeps q8_0 parts as they are."""

    layout = "blocks"

    def supports(self, parts: Sequence[WeightPart], dtype: str) -> str | None:
        odd = [p.format.storage for p in parts if p.format.storage != "q8_0"]
        return f"holds no {odd[0]}" if odd else None

    def nbytes(self, parts: Sequence[WeightPart], dtype: str) -> int:
        return sum(p.format.nbytes(p.rows, p.columns) for p in parts)

    def keeps_storage(self, parts: Sequence[WeightPart]) -> bool:
        return True

    def pack(self, parts: Sequence[WeightPart], dtype: str, device: torch.device) -> PackedWeight:
        data = tuple(p.tensors["weight"] for p in parts)
        shape = (sum(p.rows for p in parts), parts[0].columns)
        return PackedWeight(self.layout, shape, data, self.nbytes(parts, dtype), tuple(p.format for p in parts))


class BlockLinear(Kernel):
    op, name = "linear", "blocks"
    packings = (KeepBlocks(),)

    def supports(self, call: OpCall) -> str | None:
        return None

    def build(self, call: OpCall) -> OpFunction:
        raise NotImplementedError


def stored(rows: int) -> torch.Tensor:
    """q8_0 blocks of ``rows`` rows with scales of 0.5."""
    blocks = torch.randint(0, 256, (rows, COLUMNS // 32, 34), dtype=torch.uint8)
    blocks[:, :, :2] = torch.tensor([0.5], dtype=torch.float16).view(torch.uint8)
    return blocks.reshape(rows, -1)


def run(
    folder: Path, parts: Mapping[str, int], *kernels: Kernel, dtype: str = "float32"
) -> tuple[LinearWeight, Resolver, WeightEstimate]:
    """Declare one linear weight, resolve, estimate and load it; the estimate must be what loading counts."""
    checkpoint, scheme = open_checkpoint(folder), Blocks()
    build = Builder(dtype, 8, lambda name: scheme.part(name, checkpoint.headers))
    weight = build.linear("w", parts, COLUMNS)
    available = Candidates(
        schemas={schema.name: schema for schema in evener_op_schemas()},
        kernels=[Provided(k, "acme", "acme", "1") for k in kernels], states=[], reference_state=ReferenceState(),
        reference_packing=PLAIN, device=DeviceCapabilities(dtypes=frozenset({"float32"})), buckets=token_buckets(4),
    )  # fmt: skip
    resolver = Resolver(available)
    resolver.packings([weight])
    packings = resolver.packings_by_layout
    estimate = estimate_weights(build.weights, packings, checkpoint.headers, scheme)
    report = load_weights(build.weights, checkpoint, scheme, packings, CPU)
    assert (estimate.allocated, estimate.mapped) == (report.allocated, report.mapped)
    return weight, resolver, estimate


@pytest.mark.parametrize(("storage", "bits"), [("q4_0", 4.5), ("q8_0", 8.5), ("q4_k", 4.5), ("q6_k", 6.5625)])
def test_a_block_format_counts_its_bytes(storage: str, bits: float) -> None:
    form = block_format(storage)
    elements, nbytes = BLOCKS[storage]
    assert (form.plain, form.bits, form.group) == (False, bits, elements)
    assert form.nbytes(7, 3 * elements) == 7 * 3 * nbytes


def test_parts_that_a_packing_takes_stay_packed_and_mapped(write_folder: Callable[..., Path]) -> None:
    tensors = {"a": stored(3), "b": stored(2)}
    weight, resolver, estimate = run(write_folder(tensors), {"a": 3, "b": 2}, BlockLinear())
    assert weight.value is not None and weight.layout == "blocks"
    assert [torch.equal(data, tensors[name]) for data, name in zip(weight.value.data, "ab", strict=True)] == [True] * 2
    assert estimate == WeightEstimate(allocated=0, mapped=5 * 2 * 34)
    assert resolver.manifest.dequantized_lines() == []


def test_a_weight_with_a_part_that_the_packing_refuses_is_dequantized_whole_with_a_note(
    write_folder: Callable[..., Path],
) -> None:
    tensors = {"a": stored(3), "b": torch.randn(2, COLUMNS)}
    weight, resolver, estimate = run(write_folder(tensors), {"a": 3, "b": 2}, BlockLinear())
    assert weight.value is not None and weight.layout == "plain"
    part = Blocks().part("a", {"a": ("uint8", (3, 68))})
    assert part is not None
    expected = torch.cat(
        [Blocks().dequantize(replace(part, tensors={"weight": tensors["a"]}), "float32"), tensors["b"]]
    )
    assert torch.equal(weight.value.data, expected)
    assert estimate == WeightEstimate(allocated=5 * COLUMNS * 4, mapped=0)
    [line] = resolver.manifest.dequantized_lines()
    more = 3 * (COLUMNS * 4 - 68)
    assert line.startswith(f"1 tensor is dequantized from q8_0 to float32, {more} bytes more (blocks: holds no ")
    assert ManifestReport.of(resolver.manifest).dequantized == [line]


def test_an_unpacked_tensor_is_dequantized_once_for_all_readers(
    write_folder: Callable[..., Path],
) -> None:
    folder, scheme = write_folder({"e": stored(4)}), Blocks()
    checkpoint = open_checkpoint(folder)
    build = Builder("bfloat16", 8, lambda name: scheme.part(name, checkpoint.headers))
    table, head = build.weight("e", 4, COLUMNS), build.linear("e", {"e": 4}, COLUMNS)
    head.parts, head.layout = (replace(head.parts[0], format=block_format("q8_0")),), "blocks"
    packings = {"plain": PLAIN, "blocks": KeepBlocks()}
    for layout, mapped, copies in (("blocks", 4 * 68, 4 * 68), ("plain", 0, 0)):
        if layout == "plain":
            head.parts = (WeightPart("e", 4, COLUMNS, plain("bfloat16")),)
        head.layout = layout
        estimate = estimate_weights(build.weights, packings, checkpoint.headers, scheme)
        report = load_weights(build.weights, checkpoint, scheme, packings, CPU)
        assert (report.allocated, report.mapped) == (estimate.allocated, estimate.mapped) == (4 * COLUMNS * 2, mapped)
        assert estimate.second_copies == copies
    assert table.value is not None and head.value is not None
    assert table.value.data_ptr() == head.value.data.data_ptr()


class Packed(Blocks):
    """A scheme whose author thought of matrices only, as the contract allows."""

    def part(self, name: str, headers: Mapping[str, tuple[str, tuple[int, ...]]]) -> WeightPart | None:
        rows, nbytes = headers[self.tensors(name, headers)["weight"]][1]
        return WeightPart(name, rows, nbytes // 34 * 32, block_format("q8_0"))

    def tensors(self, name: str, headers: Mapping[str, tuple[str, tuple[int, ...]]]) -> Mapping[str, str]:
        return {"weight": f"{name}_packed"}


def test_a_scheme_is_asked_about_matrices_only(write_folder: Callable[..., Path]) -> None:
    tensors = {"norm": torch.randn(COLUMNS), "w_packed": stored(4)}
    checkpoint, scheme = open_checkpoint(write_folder(tensors)), Packed()
    build = Builder("float32", 8, lambda name: scheme.part(name, checkpoint.headers))
    norm, weight = build.weight("norm", COLUMNS), build.linear("w", {"w": 4}, COLUMNS)
    weight.layout = "blocks"
    packings = {"blocks": KeepBlocks()}
    estimate = estimate_weights(build.weights, packings, checkpoint.headers, scheme)
    report = load_weights(build.weights, checkpoint, scheme, packings, CPU)
    assert (estimate.allocated, estimate.mapped) == (report.allocated, report.mapped) == (0, 4 * 68 + 4 * COLUMNS)
    assert norm.value is not None and torch.equal(norm.value, tensors["norm"])
    assert weight.value is not None and torch.equal(weight.value.data[0], tensors["w_packed"])


def test_a_packed_weight_with_a_scale_that_is_not_finite_is_refused_by_name(write_folder: Callable[..., Path]) -> None:
    tensors = {"a": stored(3), "b": stored(2)}
    tensors["b"][1, 34:36] = torch.tensor([torch.inf], dtype=torch.float16).view(torch.uint8)
    with pytest.raises(CheckpointError, match=r"1 tensor is NaN or infinite somewhere.*: b; fetch"):
        run(write_folder(tensors), {"a": 3, "b": 2}, BlockLinear())
