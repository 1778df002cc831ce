"""The decoder layer of one token computes what the reference does. Its kernel's source runs on the host, with all
programs and threads of it."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from emulated import EmulatedDriver, Schedule

from evener.contracts.declared import StateSlot
from evener.contracts.state import StateSpec, StateStep, StoredStateProvider
from evener.layers.decoder import AttentionConfig, MLPConfig
from evener.layers.rotary import RotaryConfig
from evener.ops.reference.state import ReferenceState
from evener.ops.schemas import BUILTIN
from evener_backend_cuda.capability import SHORT_TOKENS, capabilities
from evener_backend_cuda.one_token import OneTokenLayer
from evener_conformance.kit import composites
from evener_conformance.kit.composites import TinyModel
from evener_conformance.kit.families import Family, families
from evener_conformance.reference.device import HostDevice
from evener_kernels_triton.state import PagedState
from evener_kernels_triton.tuning import Tuning

HOPPER = replace(capabilities((9, 0), 132, 232_448), host_memory=True)
TUNING = Tuning.of(HOPPER)
SHARED = next(f for f in families() if f.name == "shared")
#: Of the largest value of a result: a few roundings to bfloat16.
TOLERANCE = 2**-7


def family(hidden: int, inner: int, group: int, head_dim: int, offset: float = 0.0, **more: Any) -> Family:
    rotary = RotaryConfig(head_dim)
    attention = AttentionConfig(heads=8 * group, kv_heads=8, head_dim=head_dim, rotary=rotary, **more)
    return replace(SHARED, attention=attention, mlp=MLPConfig(inner=inner), hidden=hidden, offset=offset)


class Pages(PagedState):
    """Pages of so many tokens."""

    def __init__(self, block: int) -> None:
        super().__init__(TUNING, SHORT_TOKENS)
        self._block = block

    def block_sizes(self, spec: StateSpec) -> Sequence[int]:
        return (self._block,)


class Models:
    """Two layers with the kernel, the same two with references in float32, and state of so many tokens in both.

    Attributes:
        tokens: before the next step.
        graph: the layers are launched in a graph, so that each takes the stream from the messages of the one before.
        times: how often a step runs the two layers, one after another.
        change: (optional) what happens to a step before the kernel gets it.
    """

    def __init__(self, driver: EmulatedDriver, kind: Family, tokens: int = 0, block: int = 16) -> None:
        device = HostDevice(0)
        device.capabilities = HOPPER
        self.driver, self.tokens, self.hidden = driver, tokens, kind.hidden
        self.graph, self.times = True, 1
        self.change: Callable[[StateStep], StateStep] | None = None
        self.kernel = OneTokenLayer(device, driver=driver)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(composites, "MAX_POSITIONS", max(192, tokens + 8))
            self.tiny = TinyModel(device, "bfloat16", kind, [self.kernel], Pages(block), list(BUILTIN))
            self.reference = TinyModel(HostDevice(0), "float32", kind, [], ReferenceState(), list(BUILTIN), self.tiny)
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
    assert [bool(each.before) for each in models.driver.arguments[-4:]] == [False, graph] * 2


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
    "more bytes of a tile are expected than come": Fault("count * C * 2);", "count * C * 2 + 16 * {});", "in wait 2,"),
    "a product reads attention before all have written it": Fault(
        "    together();\n    STAMP(9);", "    if (!{}) together();", DIFFERENT
    ),
    "the first layer does not wait for the launch before": Fault(
        "        grid_wait();\n        count = ", "        if (!{}) grid_wait();\n        count = ", EITHER,
        range(1, 5), times=2,
    ),
    "two layers mark their messages alike": Fault(
        "(count << 8) + p.site + 1;", "(count << 8) + ({} ? 0 : p.site) + 1;", EITHER
    ),
    "keys are read before they are there": Fault(
        "wait(kv_full + stage * 8, parity, p", "if (!{}) wait(kv_full + stage * 8, parity, p", EITHER, tokens=1100
    ),
    "the new key counts several times": Fault("lane < KEY_LANES);", "lane < KEY_LANES || {});", DIFFERENT),
    "messages are not looked at again": Fault(
        "if (all) break;\n            too", "if (all || {}) break;\n            too", DIFFERENT
    ),
    "a tile comes to a place that is not aligned": Fault(
        "lane * PITCH(C), from", "lane * PITCH(C) + {} * 8, from", "a copy .* is not aligned"
    ),
    "a lane reads where it is not aligned": Fault(
        "* (C / 4) + lane % 4 * 16;\n#pragma unroll\n            for (int j = 0; j < LOADS; j++) w",
        "* (C / 4) + lane % 4 * 16 + {} * 4;\n            for (int j = 0; j < LOADS; j++) w",
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
