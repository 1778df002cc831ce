"""The state check passes what keeps the contract and finds what does not."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch

from evener.contracts.state import (
    AttentionSpec,
    LatentProvider,
    Piece,
    StateProvider,
    StateSpec,
    StateStep,
)
from evener.ops.reference.state import PlainPages, ReferenceState
from evener.state_pages.elements import ScaledPages
from evener_conformance.graph.state import MaskedState
from evener_conformance.kit.shapes import QUANTIZED, SHAPES, Shape
from evener_conformance.kit.state import check_provider
from evener_conformance.reference.device import HostDevice

PLAIN = Shape(4, 2, 16, 16)
WINDOW = Shape(4, 2, 16, 16, window=7)
LATENT = Shape(5, 1, 42, 32, kind="latent")
SPARSE = Shape(3, 1, 24, 16, kind="latent", top=9)
ODD = Shape(4, 2, 16, 16, scale=0.1)
SLOPES = Shape(4, 2, 16, 16, slopes=(0.5, 0.25, 0.125, 0.0625))
INDEX = Shape(6, 1, 18, 18, kind="index", top=7)
EIGHT_BITS = Shape(4, 2, 16, 16, stored="float8_e4m3fn")
INT8 = Shape(4, 2, 16, 16, stored="int8")


EVERY = (*SHAPES, *QUANTIZED)


@pytest.mark.parametrize(
    ("dtype", "shapes"),
    [
        ("bfloat16", EVERY[::3]),
        *(pytest.param(dtype, EVERY, marks=pytest.mark.slow) for dtype in ("float32", "bfloat16", "float16")),
    ],
    ids=["bfloat16, a third of them", "float32", "bfloat16", "float16"],
)
def test_the_reference_keeps_the_contract_for_every_shape(dtype: str, shapes: Sequence[Shape]) -> None:
    report = check_provider(ReferenceState(), HostDevice(0), dtype, shapes)
    assert report.problems == [] and len(report.checked) == len(shapes) + 2


@pytest.mark.parametrize("dtype", ["float32", pytest.param("bfloat16", marks=pytest.mark.slow)])
def test_the_capturable_provider_keeps_the_contract_and_says_what_it_refuses(dtype: str) -> None:
    report = check_provider(MaskedState(), HostDevice(0), dtype, SHAPES)
    assert report.problems == [] and len(report.checked) == len(SHAPES) - 8
    reasons = [r.rpartition(": ")[2] for r in report.refused]
    assert reasons == [*["has neither sinks nor slopes"] * 4, *["no kind latent"] * 3, "no kind index"]


def test_the_reference_refuses_state_kinds_that_another_provider_serves() -> None:
    provider = ReferenceState()
    provider.kinds = ReferenceState.kinds - {"index"}
    refused = check_provider(provider, HostDevice(0), "float32", [INDEX], recurrent=False).refused
    assert refused == [f"{INDEX}: a provider of the backend's own serves index"]


class Stingy(ReferenceState):
    def bytes_per_block(self, spec: StateSpec, block_size: int) -> int:
        return super().bytes_per_block(spec, block_size) // 2


class Uneven(ReferenceState):
    def block_sizes(self, spec: StateSpec) -> Sequence[int]:
        return (64, 96)


class Doubled(ReferenceState):
    def attend(self, views: Any, meta: Any, query: torch.Tensor, sinks: torch.Tensor | None = None) -> torch.Tensor:
        return super().attend(views, meta, query, sinks) * 1.5


class Usual(ReferenceState):
    """Scales scores as most models do, whatever this one asks for."""

    def prepare(self, step: StateStep, spec: StateSpec, attention: AttentionSpec, block_size: int) -> Any:
        return super().prepare(step, spec, replace(attention, scale=attention.head_dim**-0.5), block_size)


class Forgetful(ReferenceState):
    """The window is one token too narrow."""

    def prepare(self, step: StateStep, spec: StateSpec, attention: AttentionSpec, block_size: int) -> Any:
        narrow = replace(spec, window=spec.window - 1) if spec.window else spec
        return super().prepare(step, narrow, attention, block_size)


class Narrow(ReferenceState):
    """Only a window that is longer than 64 tokens, a block of this provider, is one token too narrow."""

    def block_sizes(self, spec: StateSpec) -> Sequence[int]:
        return (64,)

    def prepare(self, step: StateStep, spec: StateSpec, attention: AttentionSpec, block_size: int) -> Any:
        narrow = replace(spec, window=spec.window - 1) if (spec.window or 0) > 64 and spec.window else spec
        return super().prepare(step, narrow, attention, block_size)


@pytest.mark.parametrize("kind", ["window", "chunk"])
def test_a_window_that_is_wrong_only_where_it_is_longer_than_a_block_is_found(kind: str) -> None:
    shapes = [shape for shape in SHAPES if shape.window and shape.spec("float32").kind == kind]
    report = check_provider(Narrow(), HostDevice(0), "float32", shapes, recurrent=False)
    assert report.problems and all("window 128 and a block" in problem for problem in report.problems)
    long = shapes[-1]
    assert [long.for_block_size(size).window for size in (16, 64, 256)] == [153, 225, 385]


class Keeping(ReferenceState):
    """Stores the row behind the last token, proposed or not."""

    def prepare(self, step: StateStep, spec: StateSpec, attention: AttentionSpec, block_size: int) -> Any:
        return super().prepare(replace(step, host_kept_lens=None), spec, attention, block_size)


def test_a_provider_of_recurrent_state_that_keeps_wrong_drafts_is_found_unless_it_says_so() -> None:
    provider = Keeping()
    problems = check_provider(provider, HostDevice(0), shapes=[]).problems
    assert problems and all("after proposed tokens: request" in problem for problem in problems)
    provider.drafts = False
    assert check_provider(provider, HostDevice(0), shapes=[]).problems == []


class Mixed(ReferenceState):
    """A decode step gives each request another's result."""

    def attend(self, views: Any, meta: Any, query: torch.Tensor, sinks: torch.Tensor | None = None) -> torch.Tensor:
        whole: torch.Tensor = super().attend(views, meta, query, sinks)
        return whole.flip(0) if len(whole) == 5 else whole


class Careless(ReferenceState):
    def copy_blocks(self, views: Any, source: torch.Tensor, target: torch.Tensor) -> None:
        super().copy_blocks(views, target, source)


class Shifted(ReferenceState):
    def export_blocks(self, views: Any, blocks: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return tuple(view[blocks].roll(1, 1) for view in views)


class Spilling(ReferenceState):
    def import_blocks(self, views: Any, blocks: torch.Tensor, values: Sequence[torch.Tensor]) -> None:
        super().import_blocks(views, blocks, values)
        for view in views:
            view[0] = 1


class Moody(ReferenceState):
    """Says that company does not matter, and lets it."""

    def attend(self, views: Any, meta: Any, query: torch.Tensor, sinks: torch.Tensor | None = None) -> torch.Tensor:
        scaled: torch.Tensor = super().attend(views, meta, query, sinks) * (1 + meta.step.requests * 1e-6)
        return scaled


class Displaced(ReferenceState):
    def pieces(self, views: Any, meta: Any, limit: int) -> Iterator[Piece]:
        return (replace(piece, offset=piece.offset + 1) for piece in super().pieces(views, meta, limit))


class Level(ReferenceState):
    """Biases by distance are left out."""

    def prepare(self, step: StateStep, spec: StateSpec, attention: AttentionSpec, block_size: int) -> Any:
        return super().prepare(step, spec, replace(attention, slopes=None), block_size)


class Dense(ReferenceState):
    """Reads what was not chosen too."""

    def attend_chosen(self, views: Any, meta: Any, query: torch.Tensor, chosen: torch.Tensor) -> torch.Tensor:
        return super().attend(views, meta, query)


class Recent(ReferenceState):
    """Names the latest tokens."""

    def select(self, views: Any, meta: Any, query: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        ages = torch.arange(meta.attention.top, dtype=torch.int32)
        return (meta.step.positions[:, None] - ages).clamp(min=-1)


class DenseLatent(PlainPages, LatentProvider):
    """Accepts sparse attention and has no method for it."""

    name = "dense latent"
    kinds = frozenset({"latent"})
    supports, prepare = ReferenceState.supports, ReferenceState.prepare
    write, attend, pieces = ReferenceState.write, ReferenceState.attend, ReferenceState.pieces


class Quantized(ReferenceState):
    """Changes the scales of keys and values that it is given."""

    def changed(self, scales: Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
        raise NotImplementedError

    def bind_scaled(
        self, storage: torch.Tensor, spec: StateSpec, block_size: int, scales: Sequence[torch.Tensor]
    ) -> Any:
        return super().bind_scaled(storage, spec, block_size, self.changed(scales))


class Swapped(Quantized):
    """Keys have the scales of values."""

    def changed(self, scales: Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
        return scales[::-1]


class Unscaled(Quantized):
    """Scales are ignored."""

    def changed(self, scales: Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
        return [torch.ones_like(scale) for scale in scales]


class OneScale(Quantized):
    """All heads have the first one's scale."""

    def changed(self, scales: Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
        return [scale[:1].expand_as(scale) for scale in scales]


class Unsaturated(ReferenceState):
    """What is too large wraps around."""

    def write(self, views: Any, meta: Any, *values: torch.Tensor) -> None:
        for view, value in zip(views, values, strict=True):
            elements = (value.float() / view.scale[:, None]).round().to(torch.int32).to(torch.int8)
            view.elements[meta.blocks, meta.offsets] = elements


class Truncated(ReferenceState):
    """Rounds towards 0."""

    def write(self, views: Any, meta: Any, *values: torch.Tensor) -> None:
        for view, value in zip(views, values, strict=True):
            elements = (value.float() / view.scale[:, None]).clamp(-127, 127).trunc().to(torch.int8)
            view.elements[meta.blocks, meta.offsets] = elements


class UnscaledValues(ReferenceState):
    """Reads values without their scales."""

    def attend(self, views: Any, meta: Any, query: torch.Tensor, sinks: torch.Tensor | None = None) -> torch.Tensor:
        key, value = views
        plain = ScaledPages(value.elements, torch.ones_like(value.scale), value.dtype)
        return super().attend((key, plain), meta, query, sinks)


class Raw(ReferenceState):
    """Exports elements instead of numbers."""

    def export_blocks(self, views: Any, blocks: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return tuple(view.elements[blocks] for view in views)


def test_quantized_state_of_a_provider_that_does_not_register_it_is_not_checked() -> None:
    provider = ReferenceState()
    provider.scaled = frozenset()
    report = check_provider(provider, HostDevice(0), "float32", QUANTIZED, recurrent=False)
    assert report.checked == report.refused == report.problems == []


@pytest.mark.parametrize(
    ("provider", "shape", "found"),
    [
        (Stingy(), PLAIN, "bytes_per_block is 2048, but 16 tokens have 4096 bytes"),
        (Uneven(), PLAIN, "block_sizes are [64, 96], and each must be a multiple of the smallest"),
        (Doubled(), PLAIN, "; all of it is 1.5 times what it should be"),
        (Usual(), ODD, "; it is right for scores scaled by head_dim ** -0.5, but attention.scale is 0.1"),
        (Forgetful(), WINDOW, "attention is off by up to"),
        pytest.param(Mixed(), PLAIN, "attention is off by up to", marks=pytest.mark.slow),
        (Careless(), PLAIN, "copy_blocks changed its source: key of request 0 is not what was written"),
        (Shifted(), PLAIN, "export_blocks: key of request 0 is not what was written"),
        (Spilling(), PLAIN, "import_blocks wrote to blocks that it was not given"),
        (Displaced(), LATENT, "a piece is too long, or its offset is wrong"),
        (Level(), SLOPES, "attention is off by up to"),
        (Dense(), SPARSE, "attention is off by up to"),
        (DenseLatent(), SPARSE, "supports accepts it, but the provider is no SparseLatentProvider"),
        (Recent(), INDEX, "which are not the best 7"),
        (Swapped(), EIGHT_BITS, "export_blocks: key of request 0 is not what was written"),
        pytest.param(
            Unscaled(), EIGHT_BITS, "export_blocks: key of request 0 is not what was written", marks=pytest.mark.slow
        ),
        pytest.param(
            OneScale(), INT8, "export_blocks: value of request 0 is not what was written", marks=pytest.mark.slow
        ),
        (Unsaturated(), INT8, "attention is off by up to"),
        pytest.param(
            Truncated(), INT8, "export_blocks: key of request 0 is not what was written", marks=pytest.mark.slow
        ),
        pytest.param(UnscaledValues(), EIGHT_BITS, "attention is off by up to", marks=pytest.mark.slow),
        (Raw(), EIGHT_BITS, "export_blocks: key is torch.float8_e4m3fn"),
        (Moody(), PLAIN, "it claims batch invariance, but request 0 alone gives other bits"),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, StateProvider) else "",
)
def test_a_broken_provider_is_found(provider: StateProvider, shape: Shape, found: str) -> None:
    report = check_provider(provider, HostDevice(0), shapes=[shape])
    assert any(found in problem for problem in report.problems), report.problems
