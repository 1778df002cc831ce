"""What a step reads from the device's tables: written in one copy, read for all state groups at once."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from evener.contracts.generation.drafter import BY_WORKER
from evener.contracts.state import AttentionSpec, StateStep
from evener.engine.inputs.captured_inputs import DecodeInputs
from evener.engine.inputs.device_tables import DeviceTables
from evener.engine.inputs.step_layout import StepLayout
from evener.engine.wire.messages import Sampling
from evener.engine.wire.plan import Admission, DraftedTokens, Plan, TableUpdate
from evener.engine.worker.runner import Runner
from evener.ops.reference.state import ReferenceState
from evener_conformance.reference.device import HostDevice

BLOCK = 4


class CountingDevice(HostDevice):
    """Counts its uploads."""

    uploads = 0

    def upload(self, array: np.ndarray[Any, Any]) -> torch.Tensor:
        self.uploads += 1
        return super().upload(array)


@pytest.fixture
def device() -> CountingDevice:
    return CountingDevice(0)


class Recorder:
    """A state provider that keeps the steps that it is asked about."""

    def metadata(self, step: StateStep, spec: Any, attention: Any, block_size: int) -> StateStep:
        return step


def test_whatever_a_plan_changes_is_one_upload(device: CountingDevice) -> None:
    tables = DeviceTables(device, 3, 16, (1, 2), BLOCK)
    drawn = Sampling(temperature=0.5, top_k=7, top_p=0.25, seed=2**31 + 5)
    plan = Plan(
        id=0, admissions=[Admission(2, [5, 6, 7], drawn, 3, adapter=1), Admission(0, [8], Sampling(), 1)],
        updates=[TableUpdate(2, 0, [[3], [4]]), TableUpdate(1, 1, [[5, 6], [8, 10]])],
        slots=[2, 0, 1], starts=[0, 0, 6], counts=[3, 1, 3],
        drafts=[DraftedTokens(2, [11, BY_WORKER])],
    )  # fmt: skip
    tables.write(plan)
    assert device.uploads == 1
    assert tables.tokens[2, :3].tolist() == [5, 6, 7] and tables.tokens[0, :2].tolist() == [8, 0]
    # A row that ends behind token 8 has its two proposed tokens at 7 and 8; the worker writes the second.
    assert tables.tokens[1, 6:9].tolist() == [0, 11, 0]
    # Each group numbers its blocks in its own size.
    assert tables.blocks[2, :, 0].tolist() == [3, 2] and tables.blocks[1, :, :3].tolist() == [[0, 5, 6], [0, 4, 5]]
    assert tables.floats[2, :2].tolist() == [0.5, 0.25] and tables.ints[2].tolist() == [7, 5 - 2**31, 3, 1]
    assert tables.floats[1].tolist() == [1.0] * 6 and tables.ints[1, 3] == -1, "nobody wrote this row"
    assert not tables.tokens[3].any() and not tables.blocks[3].any(), "the spare row has the null block only"


def test_a_plan_that_changes_nothing_uploads_nothing(device: CountingDevice) -> None:
    tables = DeviceTables(device, 2, 16, (1,), BLOCK)
    tables.write(Plan(id=0, slots=[0], starts=[3], counts=[2], drafts=[DraftedTokens(0, [BY_WORKER])]))
    assert device.uploads == 0


@pytest.mark.parametrize("groups", [1, 3])
def test_each_group_gets_its_own_aligned_slots_and_block_table(device: CountingDevice, groups: int) -> None:
    tables = DeviceTables(device, 3, 30, (1,) * groups, BLOCK)
    rows = {0: [4, 5, 6], 2: [7, 8]}
    tables.write(Plan(id=0, updates=[
        TableUpdate(slot, 0, [[10 * group + block for block in blocks] for group in range(groups)])
        for slot, blocks in rows.items()
    ]))  # fmt: skip
    group = SimpleNamespace(slots=[object()], provider=Recorder(), spec=None, attention=None)
    geometry: Any = SimpleNamespace(block_size=BLOCK, groups=[group] * groups, spans=(1,) * groups)
    nothing: Any = None
    runner = Runner(device, nothing, nothing, tables, geometry, nothing)
    layout = StepLayout(Plan(id=1, slots=[2, 0], starts=[6, 7], counts=[1, 4], samples=[0, 1]), tables)
    steps = runner._metas(layout, layout.upload(device))
    for number, step in enumerate(steps):
        first = 10 * number
        places = [(8, 2), (5, 3), (6, 0), (6, 1), (6, 2)]
        assert step.slot_mapping.tolist() == [(first + block) * BLOCK + offset for block, offset in places]
        assert step.block_table[:, :3].tolist() == [[first + 7, first + 8, 0], [first + 4, first + 5, first + 6]]
        for tensor in (step.slot_mapping, step.block_table):
            assert tensor.is_contiguous() and tensor.dtype == torch.int32
            # The first one starts where torch's allocator puts it.
            apart = (
                tensor.data_ptr() - getattr(steps[0], "slot_mapping" if tensor.dim() == 1 else "block_table").data_ptr()
            )
            assert apart % device.capabilities.alignment == 0


@pytest.mark.parametrize("groups", [1, 2])
def test_a_step_on_the_cpu_copies_only_what_its_requests_use_of_the_block_tables(
    device: CountingDevice, groups: int
) -> None:
    # torch.index_select copies a whole tensor first if it selects along the second of its dimensions.
    tables = DeviceTables(device, 64, 30_000, (1,) * groups, BLOCK)
    group = SimpleNamespace(slots=[object()], provider=Recorder(), spec=None, attention=None)
    geometry: Any = SimpleNamespace(block_size=BLOCK, groups=[group] * groups, spans=(1,) * groups)
    nothing: Any = None
    runner = Runner(device, nothing, nothing, tables, geometry, nothing)
    layout = StepLayout(Plan(id=1, slots=[2], starts=[1_000], counts=[1], samples=[0]), tables)
    arrays = layout.upload(device)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
        runner._metas(layout, arrays)
    allocated = [event.self_cpu_memory_usage for event in profile.events()]
    used = groups * 4 * (1_000 // BLOCK + 1)
    assert used <= max(allocated) < 4 * used


class Splitter(ReferenceState):
    """A state provider whose metadata are the steps that it is asked about."""

    def prepare(self, step: StateStep, spec: Any, attention: Any, block_size: int) -> StateStep:
        return step


def test_the_requests_of_a_captured_step_whose_layer_splits_it_may_be_as_long_as_the_capture_allows(
    device: CountingDevice,
) -> None:
    tables, longest = DeviceTables(device, 3, 40, (1,), BLOCK), 37
    attention = AttentionSpec(4, 24, 1.0, split_decode=True)
    group = SimpleNamespace(slots=[object()], provider=Splitter(), spec=None, attention=attention)
    geometry: Any = SimpleNamespace(block_size=BLOCK, groups=[group], spans=(1,))
    nothing: Any = None
    runner = Runner(device, nothing, nothing, tables, geometry, nothing)
    inputs = DecodeInputs(device, tables, 2, 3, longest)
    inputs.fill(Plan(id=1, slots=[2, 0], starts=[6, 9], counts=[1, 1], samples=[0, 1]))
    [captured] = runner._metas(inputs.shape, inputs.arrays)
    assert captured.decode.max_kv == longest and captured.prefill is None
    assert captured.decode.rows(1, 2).max_kv == longest, "its replays have other lengths"
    layout = StepLayout(Plan(id=2, slots=[2, 0], starts=[6, 9], counts=[1, 4], samples=[0, 1]), tables)
    [eager] = runner._metas(layout, layout.upload(device))
    assert (eager.decode.max_kv, eager.prefill.max_kv) == (7, 13)


#: Slots and starts of decode steps, with a capture for three rows: requests go on, one leaves, another one comes.
STEPS = [
    ([2, 0], [5, 9]), ([2, 0], [6, 10]), ([2, 0], [7, 11]), ([2, 0], [8, 12]), ([2, 0], [9, 13]), ([2], [10]),
    ([2], [11]), ([1, 2], [1, 12]), ([1, 2], [2, 13]), ([1, 2], [3, 14]), ([2, 1], [15, 4]), ([2, 1], [15, 4]),
]  # fmt: skip


def decode(slots: list[int], starts: list[int]) -> Plan:
    return Plan(id=0, slots=slots, starts=starts, counts=[1] * len(slots), samples=[*range(len(slots))])


def filled(device: HostDevice, groups: int) -> DeviceTables:
    """Tables of three requests, each with blocks of its own."""
    tables = DeviceTables(device, 3, 20, (1,) * groups, BLOCK)
    blocks = torch.arange(3 * groups * 5, dtype=torch.int32).view(3, groups, 5)
    tables.blocks[:3, :, :5] = 1 + blocks
    return tables


def check_inputs(going: DecodeInputs, step: tuple[list[int], list[int]]) -> None:
    """The device has the inputs of this step, padding included."""
    device = HostDevice(0)
    device.capabilities = going._tables._device.capabilities
    tables = filled(device, going._tables.blocks.shape[1])
    tables.blocks[:] = going._tables.blocks
    fresh = DecodeInputs(device, tables, 3, 3, 20)
    fresh.fill(decode(*step))
    for name, array in vars(fresh.arrays).items():
        found = getattr(going.arrays, name)
        if name == "paging":
            assert all(map(torch.equal, array, found)), step
        elif array is not None and name not in ("block_at", "offsets"):  # what the paging is found by
            assert torch.equal(array, found), (step, name)


@pytest.mark.parametrize("groups", [1, 3])
@pytest.mark.parametrize("alignment", [4, 64])
def test_a_decode_step_that_follows_finds_its_inputs_on_the_device(
    device: CountingDevice, alignment: int, groups: int
) -> None:
    device.capabilities = replace(device.capabilities, alignment=alignment)
    going, sent = DecodeInputs(device, filled(device, groups), 3, 3, 20), list[int]()
    for number, step in enumerate(STEPS):
        device.uploads = 0
        lengths = going.fill(decode(*step))
        if device.uploads:
            sent.append(number)
        check_inputs(going, step)
        assert lengths.kv == going.arrays.kv_lens.tolist()
        going.advance()
    # Blocks begin in steps 3 and 7, requests leave and come in 5 and 7, and 10 and 11 do not follow.
    assert sent == [0, 3, 5, 7, 10, 11]


def test_the_paging_of_a_captured_step_is_that_of_an_eager_one(device: CountingDevice) -> None:
    tables = filled(device, 2)
    going = DecodeInputs(device, tables, 3, 3, 20)
    for step in STEPS:
        going.fill(decode(*step))
        eager = StepLayout(decode(*step), tables).upload(device)
        rows, paging = len(step[0]), going.arrays.paging
        found = tables.paging(eager.block_at, eager.offsets, eager.slots, 20)
        assert paging is not None and torch.equal(paging.block_table[:, :rows], found.block_table)
        assert torch.equal(paging.slot_mapping[:, :rows], found.slot_mapping)
        # Padding is in the null block.
        assert not paging.block_table[:, rows:].any() and not paging.slot_mapping[:, rows:].any()
        going.advance()


def test_a_block_that_changes_inside_a_block_of_tokens_is_looked_up_again(device: CountingDevice) -> None:
    tables = filled(device, 2)
    going = DecodeInputs(device, tables, 3, 3, 20)
    going.fill(decode([2, 0], [5, 9]))
    going.advance()
    # The step that follows, but for a plan in between that gave the slot other blocks.
    tables.write(Plan(id=1, updates=[TableUpdate(0, 0, [[91, 92, 93], [94, 95, 96]])]))
    going.fill(decode([2, 0], [6, 10]))
    check_inputs(going, ([2, 0], [6, 10]))
    assert going.arrays.paging is not None
    assert going.arrays.paging.slot_mapping[:, 1].tolist() == [93 * BLOCK + 2, 96 * BLOCK + 2]


def test_captures_share_the_memory_of_their_block_tables(device: CountingDevice) -> None:
    tables = filled(device, 2)
    one, other = DecodeInputs(device, tables, 3, 3, 20), DecodeInputs(device, tables, 2, 3, 20)
    one.fill(decode([2, 0], [5, 9]))
    one.advance()
    # Another kind of sampling, say, takes over for one step.
    other.fill(decode([2, 0], [6, 10]))
    other.advance()
    one.fill(decode([2, 0], [7, 11]))
    check_inputs(one, ([2, 0], [7, 11]))
    one.advance()
    other.fill(decode([1], [17]))
    one.fill(decode([2, 0], [9, 13]))
    check_inputs(one, ([2, 0], [9, 13]))
    places = {each.arrays.paging.block_table.data_ptr() for each in (one, other) if each.arrays.paging}
    assert places == {tables.captured_blocks.data_ptr()}


def test_a_replay_selects_ids_only(device: CountingDevice) -> None:
    tables = filled(device, 3)
    group = SimpleNamespace(slots=[object()], provider=Recorder(), spec=None, attention=None)
    geometry: Any = SimpleNamespace(block_size=BLOCK, groups=[group] * 3, spans=(1,) * 3)
    nothing: Any = SimpleNamespace(select=lambda at: None)
    runner = Runner(device, nothing, nothing, tables, geometry, nothing)
    inputs, seen = DecodeInputs(device, tables, 3, 3, 20), Launches()
    inputs.fill(decode([2, 0], [5, 9]))
    with seen:
        runner.step(inputs.shape, inputs.arrays)
        inputs.advance()
    assert seen.names == ["index_select", "add_"]


class Launches(TorchDispatchMode):
    """The names of the calls that would launch something: all that are no views."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.names: list[str] = []

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if not func.is_view:
            self.names.append(func._schema.name.removeprefix("aten::"))
        return func(*args, **(kwargs or {}))


def test_proposed_tokens_are_sampled_after_each(device: CountingDevice) -> None:
    tables = filled(device, 1)
    drafts = [DraftedTokens(0, [8, 9]), DraftedTokens(2, [7])]
    plan = Plan(id=1, slots=[2, 0, 1], starts=[5, 9, 2], counts=[3, 4, 3], drafts=drafts, samples=[0, 0, 0, 1, 2, 2])
    values = StepLayout(plan, tables).values
    assert values["last"].tolist() == [0, 1, 2, 6, 8, 9]
    assert values["sample_positions"].tolist() == [6, 7, 8, 13, 4, 5]
    assert values["kept_lens"].tolist() == [6, 13, 4]


def test_places_are_those_of_the_tables(device: CountingDevice) -> None:
    tables = DeviceTables(device, 2, 14, (1, 2), BLOCK)
    tables.tokens[:] = torch.arange(3 * 15, dtype=torch.int32).view(3, 15)
    tables.blocks[:] = torch.arange(2 * 3 * tables.blocks.shape[2], dtype=torch.int32).view(tables.blocks.shape)
    tables.ints[:, 3] = torch.tensor([7, 8, 9], dtype=torch.int32)
    slots, positions = np.int32([0, 2, 1, 2]), np.int32([3, 13, 0, 8])
    places = tables.places(slots, positions)
    at = torch.from_numpy(places.token)
    assert tables.ids(at).tolist() == tables.tokens[slots, positions].tolist()
    block, offset, owners = map(torch.from_numpy, (places.block, places.offset, slots))
    paging = tables.paging(block, offset, owners, 14)
    blocks = tables.blocks[slots, :, positions // BLOCK].T
    assert places.offset.tolist() == [3, 1, 0, 0]
    assert torch.equal(paging.slot_mapping, blocks * BLOCK + offset)
    assert torch.equal(paging.block_table, tables.blocks[slots].transpose(0, 1)[:, :, : paging.block_table.shape[2]])
    assert tables.adapters(at, torch.from_numpy(positions)).tolist() == [7, 9, 8, 9]
    tables.put(at, torch.tensor([1, 2, 3, 4], dtype=torch.int32))
    assert tables.tokens[slots, positions].tolist() == [1, 2, 3, 4]
