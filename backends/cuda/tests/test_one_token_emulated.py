"""The decoder layer of one token computes what the reference does. Its kernel's source runs on the host, with all
programs and threads of it."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from emulated import EmulatedDriver, Schedule

from evener.contracts.declared import LinearWeight, StateSlot
from evener.contracts.ops import Kernel, OpCall, OpFunction
from evener.contracts.quant import PackedWeight, QuantFormat
from evener.contracts.state import StateSpec, StateStep, StoredStateProvider
from evener.layers.decoder import AttentionConfig, MLPConfig
from evener.layers.rotary import RotaryConfig
from evener.ops.reference.linear import PLAIN
from evener.ops.reference.state import ReferenceState
from evener.ops.schemas import BUILTIN
from evener_backend_cuda.capability import SHORT_TOKENS, capabilities
from evener_backend_cuda.one_token import OneTokenAttention, OneTokenLayer, OneTokenLayers, Sizes, Way, _OneLaunch
from evener_conformance.kit import composites
from evener_conformance.kit.cases import blocks
from evener_conformance.kit.composites import TinyModel
from evener_conformance.kit.families import Family, families
from evener_conformance.reference.device import HostDevice
from evener_kernels_triton.packed import PACKED, PackedMatrix
from evener_kernels_triton.state import PagedState
from evener_kernels_triton.stored import STORED, StoredMatrix
from evener_kernels_triton.tuning import Tuning

HOPPER = replace(capabilities((9, 0), 132, 232_448), host_memory=True)
TUNING = Tuning.of(HOPPER)
SHARED = next(f for f in families() if f.name == "shared")
#: How weights are stored. The kit has no storage like the last one.
BLOCKS, ROWS, FOUR, ZEROS = "e4m3 by block", "e4m3 by row", "uint4 by 128", "uint4 by 128, zeros"
#: Of the largest value of a result: a few roundings to bfloat16.
TOLERANCE = 2**-7


def family(
    hidden: int, inner: int, group: int, head_dim: int, offset: float = 0.0, storage: str = "", kv_heads: int = 8,
    **more: Any,
) -> Family:  # fmt: skip
    rotary = RotaryConfig(head_dim)
    attention = AttentionConfig(heads=8 * group, kv_heads=kv_heads, head_dim=head_dim, rotary=rotary, **more)
    mlp = MLPConfig(inner=inner)
    return replace(SHARED, attention=attention, mlp=mlp, hidden=hidden, offset=offset, storage=storage)


class Pages(PagedState):
    """Pages of so many tokens."""

    def __init__(self, block: int) -> None:
        super().__init__(TUNING, SHORT_TOKENS)
        self._block = block

    def block_sizes(self, spec: StateSpec) -> Sequence[int]:
        return (self._block,)


class Models:
    """Layers with the kernel, the same with references in float32, and state of so many tokens in both.

    Attributes:
        tokens: before the next step.
        graph: the layers are launched in a graph, so that each takes the stream from the messages of the one before.
        times: how often a step runs the layers, one after another.
        change: (optional) what happens to a step before the kernel gets it.
    """

    def __init__(
        self, driver: EmulatedDriver, kind: Family, tokens: int = 0, block: int = 16,
        subject: type[_OneLaunch] = OneTokenLayer, layers: int = 2,
    ) -> None:  # fmt: skip
        device = HostDevice(0)
        device.capabilities = HOPPER
        self.driver, self.tokens, self.hidden = driver, tokens, kind.hidden
        self.graph, self.times = True, 1
        self.change: Callable[[StateStep], StateStep] | None = None
        self.kernel = subject(device, driver=driver)
        kernels = [self.kernel, *([StoredLinear()] if kind.storage else [])]
        with pytest.MonkeyPatch.context() as patch:
            for known in (blocks.GROUPED, blocks._BESIDE):
                patch.setitem(known, ZEROS, QuantFormat("uint4", 128, scale="bfloat16", zero="uint8"))
            patch.setattr(blocks, "STORAGES", (*blocks.STORAGES, ZEROS))
            patch.setattr(composites, "MAX_POSITIONS", max(192, tokens + 8))
            patch.setattr(composites, "LAYERS", layers)
            self.tiny = TinyModel(device, "bfloat16", kind, kernels, Pages(block), list(BUILTIN))
            self.reference = TinyModel(HostDevice(0), "float32", kind, [], ReferenceState(), list(BUILTIN), self.tiny)
        held = {each.layout for each in self.tiny.build.weights if isinstance(each, LinearWeight)}
        layout = PACKED.layout if kind.storage in (FOUR, ZEROS) else STORED.layout if kind.storage else PLAIN.layout
        assert held == {layout}, "the kernel gets weights as they are stored"
        self._layers, self._right = self.tiny.layers, self.reference.layers
        self.tiny.layers = [self._launched]  # type: ignore[list-item]
        noise, how = torch.Generator().manual_seed(1), cast(AttentionConfig, kind.attention)
        for slots in zip(self.tiny.build.slots, self.reference.build.slots, strict=True):
            state = [torch.randn(tokens, how.kv_heads, how.head_dim, generator=noise).bfloat16() for _ in range(2)]
            for slot, model in zip(slots, (self.tiny, self.reference), strict=True):
                write_state(slot, model, state)

    def _launched(self, x: torch.Tensor, stream: Any, step: Any) -> tuple[torch.Tensor, Any]:
        if self.change is not None:
            step = replace(step, metas=[replace(meta, step=self.change(meta.step)) for meta in step.metas])
        with self.driver.graph() if self.graph else nullcontext():
            for layer in self._layers * self.times:
                x, stream = layer(x, stream, step)
        return x, stream

    def step(self, seed: int = 0) -> list[torch.Tensor]:
        """Hidden states and logits of the next token, after comparing them, keys and values with the reference's."""
        x = torch.randn(1, self.hidden, generator=torch.Generator().manual_seed(seed)).bfloat16().float()
        self.reference.layers = self._right * self.times
        with torch.inference_mode():
            got = self.tiny.step(x, (self.tokens,), (1,))
            want = self.reference.step(x, (self.tokens,), (1,))
        self.tokens += 1
        written, right = (model.written((self.tokens,)) for model in (self.tiny, self.reference))
        assert written.keys() == right.keys()
        for found, expected in zip([*got, *written.values()], [*want, *right.values()], strict=True):
            allowed = TOLERANCE * float(expected.abs().max())
            torch.testing.assert_close(found.float(), expected.float(), rtol=0, atol=allowed)
        return got

    def forget(self, tokens: int) -> None:
        """As before the first step, with so many tokens of state: also after a launch that failed."""
        self.tokens = tokens
        for messages in self.kernel._messages._held.values():
            messages.zero_()


class Together(OneTokenLayers):
    """All layers of a graph in one launch."""

    def _way(self, sizes: Sizes) -> Way:
        return Way(0, 96)


class StoredLinear(Kernel):
    """Products of stored weights for what the kernel leaves over; so weights stay as they are stored."""

    op, name, packings = "linear", "stored", (STORED, PACKED)

    def supports(self, call: OpCall) -> str | None:
        return None

    def build(self, call: OpCall) -> OpFunction:
        def run(x: torch.Tensor, weight: PackedWeight, bias: torch.Tensor | None = None) -> torch.Tensor:
            made: StoredMatrix | PackedMatrix = weight.data
            y = x.float() @ (four_bit_values(made) if isinstance(made, PackedMatrix) else float8_values(made)).T
            return (y if bias is None else y + bias.float()).to(getattr(torch, call.static["out"]))

        return run


def float8_values(made: StoredMatrix) -> torch.Tensor:
    high, wide = made.form.high, made.form.wide or made.shape[1]
    scales = made.scales.repeat_interleave(high, 0).repeat_interleave(wide, 1)[: made.shape[0]]
    return made.elements.view(torch.float8_e4m3fn).float() * scales


def four_bit_values(made: PackedMatrix) -> torch.Tensor:
    (part,) = made.segments
    shifts = torch.arange(0, 16, 4)[:, None]
    numbers = (part.low.unflatten(2, (2, 1, 32)) >> shifts & 15).transpose(0, 1).reshape(-1, part.columns // 128, 128)
    scales = part.scales.view(torch.int16).transpose(0, 1).reshape(numbers.shape[0], numbers.shape[1], -1)
    scale = scales[..., 0].contiguous().view(torch.bfloat16 if part.form.bf16 else torch.float16)
    zero = scales[..., 1:] if part.form.style == "zero" else 8
    return ((numbers - zero) * scale[..., None]).flatten(1).float()


def layers_of(*launches: Any) -> list[Any]:
    """Arguments of the layers of launches, in order."""
    return [layer for each in launches for layer in each.layer[: each.count]]


def write_state(slot: StateSlot, model: TinyModel, values: Sequence[torch.Tensor]) -> None:
    """Keys and values [tokens, heads, head_dim] of the first request."""
    tokens = len(values[0])
    if tokens:
        assert isinstance(slot.provider, StoredStateProvider)
        blocks = model.table[0, : -(-tokens // model.block)].long()
        pages = slot.provider.export_blocks(slot.views, blocks)
        for page, value in zip(pages, values, strict=True):
            page.flatten(0, 1)[:tokens] = value
        slot.provider.import_blocks(slot.views, blocks, pages)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("emulated")


@pytest.fixture(scope="module")
def made(folder: Path) -> Models:
    return Models(EmulatedDriver(folder), SHARED, 600)


@pytest.fixture
def models(made: Models) -> Models:
    """With up to 600 tokens, launched in a graph, in order."""
    made.graph, made.times, made.change, made.driver.schedule = True, 1, None, Schedule()
    return made


@pytest.mark.parametrize("graph", [False, True], ids=["one by one", "in a graph"])
def test_a_request_begins(models: Models, graph: bool) -> None:
    models.forget(0)
    models.graph = graph
    for seed in range(2):
        models.step(seed)
    assert [bool(each.before) for each in layers_of(*models.driver.arguments)[-4:]] == [False, graph] * 2


@pytest.mark.parametrize("tokens", [15, 40, 600])
def test_state_is_read(models: Models, tokens: int) -> None:
    """Each of a key head's 16 programs has up to one key, three, and more than one stage."""
    models.forget(tokens)
    models.step()


@pytest.mark.parametrize("tokens, block", [(9000, 16), pytest.param(9000, 128, marks=pytest.mark.slow)])
def test_long_state_is_read(folder: Path, tokens: int, block: int) -> None:
    """Each program reads numbers of pages from the table more than once, or several stages from one page."""
    Models(EmulatedDriver(folder), SHARED, tokens, block).step()


@pytest.mark.parametrize("kind", [
    pytest.param(family(512, 256, 1, 128), id="heads of 128, no norm of heads"),
    pytest.param(family(512, 512, 4, 64, 1.0, qkv_bias=True, o_bias=True), id="four heads a key head, biases"),
    pytest.param(family(1024, 3072, 2, 128, qk_norm=True), id="as Qwen3-0.6B", marks=pytest.mark.slow),
    pytest.param(family(1536, 768, 4, 128, qk_norm=True), id="pieces of 768", marks=pytest.mark.slow),
    pytest.param(family(1024, 4096, 1, 64), id="eight tiles of gate and up", marks=pytest.mark.slow),
])  # fmt: skip
def test_layers_of_other_sizes(folder: Path, kind: Family) -> None:
    models = Models(EmulatedDriver(folder), kind, 70, 32)
    models.change = lambda step: replace(step, slot_mapping=step.slot_mapping.long())
    models.step()


LARGE = [
    pytest.param(family(512, 512, 4, 64), id="bfloat16"),
    pytest.param(family(512, 1024, 4, 128, storage=BLOCKS, qk_norm=True), id="blocks"),
    pytest.param(family(512, 512, 2, 64, 1.0, storage=ROWS, qkv_bias=True, o_bias=True), id="rows, biases"),
    pytest.param(family(1536, 2560, 1, 128, storage=BLOCKS), id="rows of a program in two blocks"),
    pytest.param(family(512, 512, 1, 128, storage=FOUR), id="four bits, four rows of a program"),
    pytest.param(family(1536, 2560, 4, 128, storage=ZEROS, qk_norm=True), id="four bits, zero points"),
    pytest.param(family(512, 512, 1, 128, 1.0, storage=ZEROS, qkv_bias=True, o_bias=True), id="four bits, biases"),
    pytest.param(family(4096, 2048, 4, 128, storage=BLOCKS), id="pieces of 2,048", marks=pytest.mark.slow),
    pytest.param(family(4096, 12288, 4, 128, storage=BLOCKS), id="as Qwen3-8B", marks=pytest.mark.slow),
    pytest.param(family(4096, 12288, 4, 128, storage=FOUR), id="four bits, as Qwen3-8B", marks=pytest.mark.slow),
    pytest.param(family(2560, 9728, 4, 128, storage=FOUR), id="four bits, as Qwen3-4B", marks=pytest.mark.slow),
    pytest.param(family(2048, 6144, 2, 128, storage=ZEROS), id="four bits, as Qwen3-1.7B", marks=pytest.mark.slow),
]  # fmt: skip


@pytest.mark.parametrize("kind", LARGE)
def test_large_layers_and_stored_weights(folder: Path, kind: Family) -> None:
    for subject, launches in ((OneTokenLayers, 2 if kind.storage in (BLOCKS, ROWS) else 1), (Together, 1)):
        models = Models(EmulatedDriver(folder), kind, 70, 32, subject)
        models.driver.schedule = Schedule(room=132)  # one program in each multiprocessor
        models.step()
        assert len(models.driver.arguments) == launches
        first, second = layers_of(*models.driver.arguments)
        assert second.before == first.after, "the second takes the stream from messages"


@pytest.mark.parametrize("schedule", [Schedule(), Schedule(1, room=132)], ids=str)
def test_many_layers_of_one_launch_follow_each_other(folder: Path, schedule: Schedule) -> None:
    """Parts of memory and of shared memory are used by each layer again, and by the next step."""
    models = Models(EmulatedDriver(folder), family(512, 512, 2, 64), 600, 32, Together, 4)
    models.driver.schedule = schedule
    for seed in range(2):
        models.step(seed)
    assert [launch.count for launch in models.driver.arguments] == [4, 4]


@pytest.mark.parametrize("kind", [
    pytest.param(family(512, 512, 4, 64, kv_heads=4, storage=BLOCKS), id="four key heads, blocks"),
    pytest.param(family(512, 512, 2, 128, kv_heads=4, qk_norm=True), id="four key heads, bfloat16"),
    pytest.param(family(1024, 512, 2, 128, kv_heads=4, storage=FOUR, qk_norm=True), id="four key heads, four bits"),
    pytest.param(family(512, 512, 1, 64, kv_heads=8, storage=ROWS), id="eight key heads, rows"),
    pytest.param(
        family(2048, 512, 4, 128, kv_heads=4, storage=BLOCKS, qk_norm=True), id="as Qwen3-30B-A3B",
        marks=pytest.mark.slow,
    ),
])  # fmt: skip
@pytest.mark.parametrize("tokens", [0, 70])
def test_attention_alone(folder: Path, kind: Family, tokens: int) -> None:
    models = Models(EmulatedDriver(folder), kind, tokens, 32, OneTokenAttention)
    models.graph = False  # what follows is computed at once
    models.step()
    models.step(1)
    assert len(models.driver.arguments) == 4


def test_a_step_of_no_request_reads_its_own_token_alone(models: Models) -> None:
    """A padded step has length 0. Its results are of no use, but it ends."""
    models.forget(0)
    models.change = lambda step: replace(step, kv_lens=torch.zeros_like(step.kv_lens))
    models.step()


@pytest.mark.parametrize("schedule", [
    Schedule(1, room=136), pytest.param(Schedule(2, overlap=False), marks=pytest.mark.slow),
    *(pytest.param(Schedule(seed, room), marks=pytest.mark.slow) for seed in range(3, 8) for room in (129, 264)),
], ids=str)  # fmt: skip
def test_results_do_not_depend_on_the_order_in_which_threads_copies_and_messages_come(
    models: Models, schedule: Schedule
) -> None:
    """Two steps' layers follow each other in one graph."""
    models.times, results = 2, list[list[torch.Tensor]]()
    for each in (Schedule(), schedule):
        models.forget(40)
        models.driver.schedule = each
        results.append(models.step())
    assert all(torch.equal(*pair) for pair in zip(*results, strict=True))


@dataclass(frozen=True)
class Fault:
    """A change of the source, and what is found then.

    Attributes:
        place: what stands in the source, once.
        planted: what stands there instead; {} is true if this fault is wanted.
        found: in the message of the error.
        seeds: of the schedules that are tried.
        tokens: of state. times: how often a step runs the two layers.
    """

    place: str
    planted: str
    found: str
    seeds: Sequence[int] = (0,)
    tokens: int = 40
    times: int = 1


DIFFERENT, STUCK = "are not close", "nobody can go on"
EITHER = f"{DIFFERENT}|{STUCK}"
FAULTS = {
    "a product does not wait for its tile": Fault(
        "wait(full + ring.stage * 8, ring.parity, report, 2);",
        "if (!{}) wait(full + ring.stage * 8, ring.parity, report, 2);",
        EITHER,
    ),
    "a copy waits for the wrong phase": Fault(
        "ring.parity ^ 1, report, 1);", "ring.parity ^ !{}, report, 1);", "in wait 1,"
    ),
    "a tile is overwritten": Fault(
        "wait(empty + ring.stage * 8,", "if (!{}) wait(empty + ring.stage * 8,", EITHER, range(1, 9)
    ),
    "messages come to the place of another program": Fault(
        "(copy * PROGRAMS + program) * COUNT", "(copy * PROGRAMS + (program ^ {})) * COUNT", DIFFERENT
    ),
    "a copy of the messages is missing": Fault("e < COPIES * COUNT)", "e < (COPIES - {}) * COUNT)", "in wait 9,"),
    "more bytes of a tile are expected than come": Fault(
        "count * C * WEIGHT_BYTES);", "count * C * WEIGHT_BYTES + 16 * {});", "in wait 2,"
    ),
    "a product reads attention before all have written it": Fault(
        "        together();\n        return 1.f;", "        if (!{}) together();\n        return 1.f;", DIFFERENT
    ),
    "the first layer does not wait for the launch before": Fault(
        "        grid_wait();\n        count = ", "        if (!{}) grid_wait();\n        count = ", EITHER,
        range(1, 5), times=2,
    ),
    "two layers mark their messages alike": Fault(
        "(count << 8) + p.site + 1;", "(count << 8) + ({} ? 0 : p.site) + 1;", EITHER
    ),
    "keys are read before they are there": Fault(
        "wait(kv_full + stage * 8, parity, l", "if (!{}) wait(kv_full + stage * 8, parity, l", EITHER, tokens=1100
    ),
    "the new key counts several times": Fault("lane < KEY_LANES);", "lane < KEY_LANES || {});", DIFFERENT),
    "messages are not looked at again": Fault(
        "if (all) break;\n            too", "if (all || {}) break;\n            too", DIFFERENT
    ),
    "a tile comes to a place that is not aligned": Fault(
        "lane * PITCH(C), from", "lane * PITCH(C) + {} * 8, from", "a copy .* is not aligned"
    ),
    "a lane reads where it is not aligned": Fault(
        "* (C / 8 * WEIGHT_BYTES) + lane % 4 * 16;\n#pragma unroll\n            for (int j = 0; j < LOADS; j++) w",
        "* (C / 8 * WEIGHT_BYTES) + lane % 4 * 16 + {} * 4;\n            for (int j = 0; j < LOADS; j++) w",
        "an address is not aligned",
    ),
    "a word is written outside of shared memory": Fault(
        "*(int*)(shared + AT_META) = length;", "*(int*)(shared + AT_META + {} * 4096) = length;", "accesses memory at"
    ),
}  # fmt: skip
#: Found by few of all schedules.
RARE_FAULTS = {
    "a tile is given back before all lanes have read it": Fault(
        "__syncwarp();\n#pragma unroll\n        for (int n = 0; n < 2; n++)\n            if (lane == 0 && there",
        "if (!{}) __syncwarp();\n        for (int n = 0; n < 2; n++)\n            if (lane == 0 && there",
        EITHER, range(1, 100),
    ),
}  # fmt: skip
ALL_FAULTS = {**FAULTS, **RARE_FAULTS}


@pytest.fixture(scope="module")
def faulty(folder: Path) -> Models:
    """All faults are compiled together; a number says which one is there."""
    planted = {
        fault.place: fault.planted.format(f"FAULT({number})") for number, fault in enumerate(ALL_FAULTS.values(), 1)
    }
    return Models(EmulatedDriver(folder, planted), SHARED, 1100)


def found_with(models: Models, number: int, fault: Fault) -> str | None:
    """The message of the first error."""
    models.driver.planted, models.times = number, fault.times
    for seed in fault.seeds:
        models.forget(fault.tokens)
        models.driver.schedule = Schedule(seed)
        try:
            models.step()
        except (AssertionError, RuntimeError) as error:
            return str(error)
    return None


def test_without_a_fault_nothing_is_found(faulty: Models) -> None:
    assert found_with(faulty, 0, Fault("", "", "", tokens=1100)) is None


@pytest.mark.parametrize("name", [*FAULTS, *(pytest.param(name, marks=pytest.mark.slow) for name in RARE_FAULTS)])
def test_a_fault_is_found(faulty: Models, name: str) -> None:
    found = found_with(faulty, list(ALL_FAULTS).index(name) + 1, ALL_FAULTS[name])
    assert found is not None and re.search(ALL_FAULTS[name].found, found), found


#: Of scales and conversions of stored weights; each changes results.
STORED_FAULTS = {
    "scales of the up rows are those of the gate": (
        "t % 2 * 2 + next_block(program * INNER_ROWS", "({} ? 0 : t % 2 * 2) + next_block(program * INNER_ROWS"
    ),
    "rows after a block's end have its scale": ("/ MAX(BLOCK, 1) ? 1 : 0; }", "/ MAX(BLOCK, 1) ? !{} : 0; }"),
    "values have the key's scales": (
        "return i < Q_ROWS ? 0 : i < Q_ROWS + K_ROWS ? 1 : 2;",
        "return i < Q_ROWS ? 0 : i < Q_ROWS + K_ROWS ? 1 : 2 - {};",
    ),
    "columns are multiplied with others' numbers": ("make_uint2(x.z, x.w));", "make_uint2({} ? x.x : x.z, x.w));"),
    "all warps have the first one's scales": (
        "row[(column + warp * (C / 8)) / MAX(BLOCK, 1)]", "row[(column + !{} * warp * (C / 8)) / MAX(BLOCK, 1)]"
    ),
    "a vector is larger than float16": (
        "const u32 exponent = MAX(most >> 23, 15u);", "const u32 exponent = MAX(most >> 23, 15u) - 5 * {};"
    ),
}  # fmt: skip


#: Of products with integers of four bits.
FOUR_FAULTS = {
    "odd rows have the other group's zero points": ("scales[j ^ ZEROS * turn]", "scales[j ^ ZEROS * turn * !{}]"),
    "both planes count alike": ("AT_GROUPS + lane % 2 * 8;", "AT_GROUPS + lane % 2 * 8 * !{};"),
    "odd rows are multiplied with the other group": ("turn = column / 4,", "turn = {} ? 0 : column / 4,"),
    "tiles are multiplied with others' numbers": ("make_uint2(v.z, v.w));", "make_uint2({} ? v.x : v.z, v.w));"),
    "lower bytes have no sign": ("0x5410) ^ 0x80808080u", "0x5410) ^ ({} ? 0u : 0x80808080u)"),
    "zero points are multiplied with the whole span": ("lane < 16 ? first : both", "lane < 16 && !{} ? first : both"),
    "sums go on with the next rows": ("                    sums[c] = 0.f;", "                    sums[c] *= {};"),
    "rows come from the span before": ("(u64)(piece * Of::WIDE + nth)", "(u64)(piece * Of::WIDE + nth - ({} && nth))"),
    "a vector is larger than 16 bits": ("exponent = MAX(warp_most(", "exponent = -4 * {} + MAX(warp_most("),
}  # fmt: skip
CONVERTED = {
    "float8": (STORED_FAULTS, family(1536, 2560, 1, 128, storage=BLOCKS)),
    "four bits": (FOUR_FAULTS, family(1536, 2560, 1, 128, storage=ZEROS)),
}  # fmt: skip


@pytest.fixture(scope="module")
def faulty_converted(folder: Path) -> Callable[[str], Models]:
    @cache
    def made(name: str) -> Models:
        faults, kind = CONVERTED[name]
        planted = {place: text.replace("{}", f"FAULT({n})") for n, (place, text) in enumerate(faults.values(), 1)}
        return Models(EmulatedDriver(folder, planted), kind, 70, 32, OneTokenLayers)

    return made


@pytest.mark.slow
@pytest.mark.parametrize("name, number", [
    pytest.param(name, number, id=f"{name}, {fault}")
    for name, (faults, _) in CONVERTED.items() for number, fault in enumerate(["none", *faults])
])  # fmt: skip
def test_a_fault_in_scales_or_conversions_is_found(
    faulty_converted: Callable[[str], Models], name: str, number: int
) -> None:
    found = found_with(faulty_converted(name), number, Fault("", "", "", tokens=70))
    assert (found is None) if number == 0 else DIFFERENT in str(found)


@pytest.fixture(scope="module")
def faulty_together(folder: Path) -> Models:
    call = "compute_layer(launch, n, here, ring, stage, parity);"
    planted = f"FAULT(1) && n ? void(stage = parity = 0) : FAULT(2) && n ? void(ring = Ring{{0, 0}}) : void(), {call}"
    return Models(EmulatedDriver(folder, {call: planted}), family(512, 512, 2, 64), 600, 32, Together, 4)


@pytest.mark.parametrize("number", range(3), ids=["none", "keys begin anew", "weights begin anew"])
def test_a_fault_between_the_layers_of_a_launch_is_found(faulty_together: Models, number: int) -> None:
    found = found_with(faulty_together, number, Fault("", "", "", tokens=600))
    assert (found is None) if number == 0 else re.search(EITHER, str(found))
