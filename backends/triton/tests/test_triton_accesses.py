"""What launches reach: nothing but their tensors, in sizes that a device has and this machine only pretends to have,
with padding, with numbers that are none, and in the sizes of tiles of a large device."""

from __future__ import annotations

import mmap
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import torch
import triton
import triton.language as tl
from interpreted import LargeDevice, every_access_checked, host_kernels, host_states, last_programs_alone, schemas

from evener.contracts.ops import Bucket, OpCall
from evener.contracts.state import AttentionSpec, StateProvider, StateSpec, StateStep, StateTensor
from evener.layers.experts import MoEConfig
from evener.ops.reference.state import ReferenceState
from evener_conformance.kit.composites import GARBAGE, TinyModel
from evener_conformance.kit.fallback_monitor import HostCopyMonitor
from evener_conformance.kit.families import families
from evener_conformance.reference.device import HostDevice
from evener_kernels_triton.experts import ExpertAssignment, grouped, sort
from evener_kernels_triton.linear import gemv, skinny
from evener_kernels_triton.tuning import Tuning

#: Linux: memory that is promised without being there; Python names it from 3.13 on.
_MAP_NORESERVE = 0x4000
LARGE = Tuning.of(LargeDevice(0).capabilities)


@pytest.fixture(autouse=True)
def careful(one_thread: None) -> Iterator[None]:
    """Tensors are tiny or not there, every access is checked, and memory that nobody wrote is poison."""
    with every_access_checked(), HostCopyMonitor(HostDevice(0)):
        yield


def sparse(*shape: int, dtype: torch.dtype) -> torch.Tensor:
    """Zeros that take memory where they are written."""
    size = dtype.itemsize * torch.Size(shape).numel()
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _MAP_NORESERVE
    return torch.frombuffer(mmap.mmap(-1, size, flags=flags), dtype=dtype).view(shape)


@triton.jit
def copy_kernel(x, y, count, SIZE: tl.constexpr):  # type: ignore[no-untyped-def]
    at = tl.program_id(0) * SIZE + tl.arange(0, SIZE)
    tl.store(y + at, tl.load(x + at, mask=at < count), mask=at < count)


def test_a_launch_that_reaches_behind_its_tensors_raises_though_other_memory_lies_there() -> None:
    x, y = torch.arange(16.0), torch.zeros(16)
    copy_kernel[(1,)](x[:8], y[4:], 8, SIZE=16)
    assert y.tolist() == [0.0] * 4 + list(range(8)) + [0.0] * 4
    for tensors, does in (((x[:8], y), "reads"), ((x, y[:8]), "writes")):
        with pytest.raises(Exception, match=f"copy_kernel {does} 1 of 9 elements outside of the tensors"):
            copy_kernel[(1,)](*tensors, 9, SIZE=16)


def test_an_address_between_two_elements_raises() -> None:
    halves, bytes_ = torch.zeros(16, dtype=torch.float16), torch.zeros(33, dtype=torch.uint8)
    copy_kernel[(1,)](halves, halves, 8, SIZE=16)
    odd = bytes_[1:]
    with pytest.raises(Exception, match="elements of 2 bytes that do not begin at a multiple of 2"):
        cast_kernel[(1,)](odd, halves, SIZE=8)


@triton.jit
def cast_kernel(x, y, SIZE: tl.constexpr):  # type: ignore[no-untyped-def]
    at = tl.arange(0, SIZE)
    tl.store(y + at, tl.load(x.to(tl.pointer_type(tl.float16)) + at))


@pytest.mark.parametrize("grid", [(0,), (1, 70000), (1 << 20, 1 << 11)])
def test_a_grid_that_devices_do_not_take_raises(grid: tuple[int, ...]) -> None:
    with pytest.raises(IndexError, match="copy_kernel is launched with"):
        copy_kernel[grid](torch.zeros(8), torch.zeros(8), 8, SIZE=16)


def test_the_last_program_of_a_launch_can_run_alone() -> None:
    x, y = torch.arange(12.0), torch.zeros(12)
    with last_programs_alone():
        copy_kernel[(3,)](x, y, 12, SIZE=4)
    assert y.tolist() == [0.0] * 8 + [8.0, 9.0, 10.0, 11.0]


def test_launches_are_counted() -> None:
    with every_access_checked() as programs:
        copy_kernel[(3,)](torch.zeros(12), torch.zeros(12), 12, SIZE=4)
        copy_kernel[(1, 2)](torch.zeros(12), torch.zeros(12), 4, SIZE=4)
    assert programs == {"copy_kernel": 5}


def steps_over(
    provider: StateProvider, spec: StateSpec, attention: AttentionSpec, table: Sequence[int], storage: torch.Tensor
) -> list[torch.Tensor]:
    """What a prompt of 40 tokens and one token after it attend to."""
    noise = torch.Generator().manual_seed(3)
    views, found = provider.bind(storage, spec, 32), []
    blocks = torch.tensor([table], dtype=torch.int32)
    for first, stop in ((0, 40), (40, 41)):
        at, count = torch.arange(first, stop, dtype=torch.int32), stop - first
        step = StateStep(
            tokens=count, requests=1, max_query=count, max_kv=stop, query_start=torch.tensor([0, count]).int(),
            kv_lens=torch.tensor([stop]).int(), positions=at, slot_mapping=blocks[0, at // 32] * 32 + at % 32,
            block_table=blocks, host_query_lens=[count], host_kv_lens=[stop],
        )  # fmt: skip
        meta = provider.prepare(step, spec, attention, 32)
        values = [torch.randn(count, *t.shape, generator=noise).bfloat16() for t in spec.tensors]
        provider.write(views, meta, *values)
        query = torch.randn(count, attention.heads, attention.head_dim, generator=noise).bfloat16()
        found.append(provider.attend(views, meta, query))
    return found


def state_of(provider: StateProvider) -> tuple[StateSpec, AttentionSpec]:
    """A layer that the provider serves."""
    if "latent" in provider.kinds:
        tensors = (StateTensor("latent", (64,), "bfloat16"), StateTensor("rope", (16,), "bfloat16"))
        return StateSpec("latent", tensors), AttentionSpec(4, 80, 0.2, dtype="bfloat16")
    tensors = (StateTensor("key", (2, 64), "bfloat16"), StateTensor("value", (2, 64), "bfloat16"))
    return StateSpec("full", tensors), AttentionSpec(4, 64, 0.2, dtype="bfloat16")


@pytest.mark.parametrize("provider", host_states(LargeDevice), ids=lambda p: p.name)
def test_pools_with_more_elements_than_int32_are_addressed_correctly(provider: StateProvider) -> None:
    spec, attention = state_of(provider)
    page = provider.bytes_per_block(spec, 32)
    blocks = (5 << 30) // page
    assert blocks * page // 2 > 1 << 31
    last = sparse(blocks, page, dtype=torch.uint8)
    got = steps_over(provider, spec, attention, (blocks - 1, blocks - 2), last)
    want = steps_over(provider, spec, attention, (1, 2), torch.zeros(3, page, dtype=torch.uint8))
    for a, b in zip(got, want, strict=True):
        assert torch.equal(a, b) and b.any()


@pytest.mark.parametrize("provider", [*host_states(), *host_states(LargeDevice)], ids=lambda p: p.name)
def test_rows_that_pad_a_captured_step_stay_in_the_null_block(provider: StateProvider) -> None:
    """Tables of a captured step are as wide as the longest request may be; the pool ends with the last block in use."""
    spec, attention = state_of(provider)
    page, size, rows, columns = provider.bytes_per_block(spec, 32), 32, 5, 16
    storage = torch.full((4, page), GARBAGE, dtype=torch.uint8)
    views = provider.bind(storage, spec, size)
    table = torch.zeros(rows, columns, dtype=torch.int32)
    table[0, :2], table[1, 0] = torch.tensor([3, 1]), 2
    lengths = torch.tensor([64, 32, 1, 1, 1], dtype=torch.int32)
    at = lengths - 1
    slots = table[torch.arange(rows), (at // size).long()] * size + at % size
    step = StateStep(
        tokens=rows, requests=rows, max_query=1, max_kv=columns * size, query_start=torch.arange(rows + 1).int(),
        kv_lens=lengths, positions=at, slot_mapping=slots, block_table=table, host_query_lens=[1] * rows,
        host_kv_lens=[1] * rows,
    )  # fmt: skip
    meta = provider.prepare(step, spec, attention, size)
    noise = torch.Generator().manual_seed(1)
    before = storage.clone()
    provider.write(views, meta, *(torch.randn(rows, *t.shape, generator=noise).bfloat16() for t in spec.tensors))
    found = provider.attend(views, meta, torch.randn(rows, attention.heads, attention.head_dim).bfloat16())
    assert found[:2].isfinite().all()
    changed = (storage != before).any(1)
    assert changed.tolist() == [True, True, True, False], "the first request's last token lies in block 1"


@pytest.mark.parametrize("tokens", [1, 3])
def test_weights_with_more_elements_than_int32_counts_are_read_to_their_end(tokens: int) -> None:
    rows, columns = 70_016, 32_768
    w, noise = sparse(rows, columns, dtype=torch.bfloat16), torch.Generator().manual_seed(tokens)
    assert w.numel() > 1 << 31
    w[-16:] = torch.randn(16, columns, generator=noise) / 64
    x = torch.randn(tokens, columns, generator=noise).bfloat16()
    with last_programs_alone():
        y = (gemv if tokens == 1 else skinny)(LARGE, x, w, torch.bfloat16)
    width = 2 if tokens == 1 else 16
    torch.testing.assert_close(y[:, -width:], x @ w[-width:].T, rtol=2e-2, atol=2e-1)
    assert y.isnan().any(), "the programs before it did not run"


@pytest.mark.parametrize("flip", [0, pytest.param(1, marks=pytest.mark.slow)])
def test_stacks_with_more_elements_than_int32_counts_are_read_to_their_end(flip: int) -> None:
    matrices, rows, columns, pairs = 2_080, 16, 65_536, 18
    w, noise = sparse(matrices, rows, columns, dtype=torch.bfloat16), torch.Generator().manual_seed(flip)
    assert w.numel() > 1 << 31
    w[-1] = torch.randn(rows, columns, generator=noise) / 64
    x = torch.randn(pairs, columns, generator=noise).bfloat16()
    slots = torch.full((pairs, 1), matrices - 1, dtype=torch.int32)
    tuning = Tuning(132, 227 << 10, False, (("flip", flip),))
    lists, counts = torch.zeros(matrices, pairs, dtype=torch.int32), torch.zeros(matrices, dtype=torch.int32)
    lists[-1], counts[-1] = torch.arange(pairs), pairs
    y = torch.zeros(pairs, rows, dtype=torch.bfloat16)
    run: Callable[[], Any] = lambda: grouped(tuning, x, w, y, ExpertAssignment(slots, lists, counts), share=True)  # noqa: E731
    if flip:
        with last_programs_alone():
            run()
    else:
        run()
    torch.testing.assert_close(y, x @ w[-1].T, rtol=2e-2, atol=2e-1)


def test_experts_without_tokens_are_skipped() -> None:
    noise = torch.Generator().manual_seed(2)
    w, x = torch.randn(7, 24, 40, generator=noise), torch.randn(20, 40, generator=noise)
    slots = torch.where(torch.rand(20, 2, generator=noise) < 0.5, -1, 6).int()
    slots[:, 1] = 3
    for changes in ((("flip", 0),), (("flip", 1),)):
        tuning = Tuning(132, 227 << 10, False, changes)
        y = torch.zeros(40, 24)
        grouped(tuning, x, w, y, sort(tuning, slots, 7, slots.numel()), share=True)
        for pair, slot in enumerate(slots.flatten().tolist()):
            want = x[pair // 2] @ w[slot].T if slot >= 0 else torch.zeros(24)
            torch.testing.assert_close(y[pair], want, rtol=1e-4, atol=1e-4)


def kernel(op: str, **static: Any) -> Any:
    """The kernel of an op, built for up to four rows."""
    found = next(k for k in host_kernels(composite=False) if k.op == op)
    return found.build(OpCall(op, static, Bucket(1, 4), HostDevice(0).capabilities))


def test_sampled_ids_are_in_the_vocabulary_for_nan_and_inf_logits() -> None:
    logits = torch.full((4, 37), float("nan"))
    logits[1] = float("-inf")
    logits[2, 5], logits[3, 36] = 1.0, 2.0
    temperature, ints = torch.tensor([0.0, 0.7, 0.0, 0.7]), torch.arange(4, dtype=torch.int32)
    none, all_ = torch.zeros(4), torch.ones(4)
    chosen = [kernel("greedy", vocab=37)(logits)]
    for filters in (False, True):
        sample = kernel("sample", vocab=37, filters=filters)
        chosen.append(sample(logits, temperature, ints * 0, all_, none, ints, ints))
    for ids in chosen:
        assert ((ids >= 0) & (ids < 37)).all(), "the next step reads the row of such an id"
    for ids in chosen[:2]:
        assert ids[2:].tolist() == [5, 36], "what is no number never wins"


@pytest.mark.parametrize(
    "family", [f for f in families() if isinstance(f.mlp, MoEConfig) and f.hidden < 128], ids=lambda f: f.name
)
@pytest.mark.parametrize("tokens", [pytest.param(1, marks=pytest.mark.slow), 3])
def test_nan_tokens_are_routed_to_existing_experts(family: Any, tokens: int) -> None:
    kernels = [k for k in host_kernels(composite=True) if k.op == "moe_block"]
    model = TinyModel(HostDevice(0), "float32", family, kernels, ReferenceState(), list(schemas().values()))
    x = torch.randn(tokens, family.hidden)
    x[0] = float("nan")
    with torch.inference_mode():
        hidden, _ = model.step(x, (0,), (tokens,))
    assert hidden[0].isnan().all()
