"""The experts of one token in one launch compute what the reference does. Their kernel's source runs on the host, with
all programs and threads of it."""

from __future__ import annotations

import ctypes
import re
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from emulated import EmulatedDriver, Schedule, hopper

from evener.contracts.ops import Bucket, OpCall, OpFunction
from evener.contracts.quant import PackedWeight
from evener.contracts.statics import MoEStatic
from evener.contracts.weights import MoEWeights
from evener.layers.builder import Builder
from evener.layers.decoder import AttentionConfig, DecoderLayer
from evener.layers.experts import MoEConfig
from evener.layers.rotary import RotaryConfig
from evener.ops.reference.linear import PLAIN
from evener.ops.reference.state import ReferenceState
from evener.ops.schemas import BUILTIN
from evener_backend_cuda.capability import capabilities
from evener_backend_cuda.compiled import Driver
from evener_backend_cuda.one_launch import PROGRAMS
from evener_backend_cuda.one_token_experts import (
    Experts,
    ExpertSizes,
    OneTokenExperts,
    defines,
    source,
)
from evener_backend_cuda.plugin import evener_kernels
from evener_conformance.kit import composites
from evener_conformance.kit.composites import TinyModel
from evener_conformance.kit.families import Family, families
from evener_conformance.reference.device import HostDevice
from evener_kernels_triton.features import number_of

HOPPER = capabilities((9, 0), 132, 232_448)
SHARED = next(f for f in families() if f.name == "shared")
#: Of the largest value of a result: a few roundings to bfloat16.
TOLERANCE = 2**-7
SMALL = MoEConfig(experts=16, top=4, inner=256)


@pytest.fixture(autouse=True)
def tiny_tensors(one_thread: None) -> None:
    """Every test here runs on one thread."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("emulated")


def family(experts: MoEConfig, hidden: int = 512, **more: Any) -> Family:
    attention = AttentionConfig(heads=4, kv_heads=2, head_dim=64, rotary=RotaryConfig(64))
    return replace(SHARED, attention=attention, mlp=experts, hidden=hidden, **more)


@pytest.mark.parametrize("kind, schedule", [
    pytest.param(family(SMALL), Schedule(), id="four of 16"),
    pytest.param(family(SMALL, offset=1.0), Schedule(1), id="a norm with an offset"),
    pytest.param(family(replace(SMALL, renormalize=False, scale=2.5), 1024), Schedule(), id="a factor, not normalized"),
    pytest.param(family(replace(SMALL, experts=144, top=8)), Schedule(3, 129), id="two rows of the router a program"),
    pytest.param(family(replace(SMALL, scoring="softmax_top", top=2, inner=512)), Schedule(), id="two of 16"),
    pytest.param(family(replace(SMALL, experts=20), spread=True), Schedule(), id="copies, and experts elsewhere"),
    pytest.param(family(replace(SMALL, top=8, inner=768), 2048), Schedule(room=132), id="wide as Qwen3-30B-A3B",
                 marks=pytest.mark.slow),
    pytest.param(family(replace(SMALL, top=8, inner=1024, renormalize=False), 2048), Schedule(room=132),
                 id="wide as OLMoE", marks=pytest.mark.slow),
    pytest.param(family(replace(SMALL, experts=272, top=8)), Schedule(5), id="272", marks=pytest.mark.slow),
])  # fmt: skip
def test_a_layer_gives_what_the_reference_gives(
    folder: Path, kind: Family, schedule: Schedule, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(composites, "LAYERS", 1)
    driver, device = EmulatedDriver(folder), hopper()
    driver.schedule = schedule
    kernel = OneTokenExperts(device, driver=driver)
    tiny = TinyModel(device, "bfloat16", kind, [kernel], ReferenceState(), list(BUILTIN))
    reference = TinyModel(HostDevice(0), "float32", kind, [], ReferenceState(), list(BUILTIN), tiny)
    for step in range(2):
        x = torch.randn(1, kind.hidden, generator=torch.Generator().manual_seed(step)).bfloat16().float()
        with torch.inference_mode():
            got, want = (model.step(x, (step,), (1,)) for model in (tiny, reference))
        for found, expected in zip(got, want, strict=True):
            allowed = TOLERANCE * float(expected.abs().max())
            torch.testing.assert_close(found.float(), expected.float(), rtol=0, atol=allowed)
    assert len(driver.arguments) == 2, "each step is a launch"


def experts_call(config: MoEConfig = SMALL, hidden: int = 512, dtype: str = "bfloat16", device: Any = HOPPER) -> OpCall:
    """The op call of a layer of experts, for one token."""
    build = Builder(dtype, 64)
    attention = AttentionConfig(heads=4, kv_heads=2, head_dim=64, rotary=RotaryConfig(64))
    DecoderLayer(build, "model.layers.3", hidden, attention, config, 1e-6)
    static = dict(next(site.static for site in build.sites if site.op == "moe_block"))
    for name in ("router", "gate_up", "down"):
        static[name].layout = PLAIN.layout
    return OpCall("moe_block", static, Bucket(1, 1), device)


def packed(data: torch.Tensor) -> PackedWeight:
    return PackedWeight(PLAIN.layout, tuple(data.shape), data, data.nbytes)


class Layer:
    """Experts with given logits: x is all ones, and column 0 of the router has the logits."""

    hidden, inner = 512, 256

    def __init__(self, logits: list[float], slots: list[int] | None = None, seed: int = 0) -> None:
        draw, count = torch.Generator().manual_seed(seed), len(logits)

        def numbers(*shape: int) -> torch.Tensor:
            return (torch.randn(shape, generator=draw) * 0.1).bfloat16()

        router = torch.zeros(count, self.hidden).bfloat16()
        router[:, 0] = torch.tensor(logits).bfloat16()
        self.w = MoEWeights(
            norm=torch.ones(self.hidden).bfloat16(), router=packed(router),
            gate_up=packed(numbers(count, 2 * self.inner, self.hidden)),
            down=packed(numbers(count, self.hidden, self.inner)),
            slots=torch.tensor(slots if slots is not None else list(range(count)), dtype=torch.int32)[:, None],
            copies=torch.ones(count, dtype=torch.int32),
        )  # fmt: skip
        self.x, self.residual = torch.ones(1, self.hidden).bfloat16(), torch.zeros(1, self.hidden)

    def run(self, block: OpFunction) -> torch.Tensor:
        x, residual = block(self.x.clone(), self.residual.clone(), self.w)
        assert torch.equal(residual, torch.ones(1, self.hidden)), "the stream has x added"
        return cast(torch.Tensor, x)[0].float()

    def of(self, chosen: Mapping[int, float]) -> torch.Tensor:
        """The sum of these experts' results, by weight."""
        total = torch.zeros(self.hidden)
        for expert, weight in chosen.items():
            slot = int(self.w.slots[expert, 0])
            gate, up = (self.w.gate_up.data[slot].float() @ self.x[0].float()).chunk(2)
            total += weight * (self.w.down.data[slot].float() @ (torch.nn.functional.silu(gate) * up))
        return total


NAN = float("nan")


@pytest.mark.parametrize("logits, chosen", [
    ([0.0] * 16, {0: 0.25, 1: 0.25, 2: 0.25, 3: 0.25}),
    ([0.0, -0.0] * 8, {0: 0.25, 1: 0.25, 2: 0.25, 3: 0.25}),
    ([1.0] * 5 + [2.0] * 3 + [0.5] * 8, {5: 0.2970, 6: 0.2970, 7: 0.2970, 0: 0.1092}),
    ([-5.0] * 12 + [-1.0] * 4, {12: 0.25, 13: 0.25, 14: 0.25, 15: 0.25}),
    ([NAN, 3.0, NAN, 3.0] + [3.0, 3.0] + [NAN] * 10, {1: 0.25, 3: 0.25, 4: 0.25, 5: 0.25}),
], ids=["all equal", "zeros of both signs", "some equal", "negative", "not numbers"])  # fmt: skip
def test_the_lower_number_is_chosen_of_equal_logits(
    folder: Path, logits: list[float], chosen: dict[int, float]
) -> None:
    kernel = OneTokenExperts(hopper(), driver=EmulatedDriver(folder))
    layer = Layer(logits)
    want = layer.of(chosen)
    got = layer.run(kernel.build(experts_call(replace(SMALL, scoring="softmax_top"))))
    torch.testing.assert_close(got, want, rtol=0, atol=TOLERANCE * float(want.abs().max()))


def test_an_expert_that_is_elsewhere_adds_nothing(folder: Path) -> None:
    kernel = OneTokenExperts(hopper(), driver=EmulatedDriver(folder))
    slots = [0, 1, -1, 2, *[3] * 12]
    layer = Layer([4.0, 4.0, 4.0, 4.0, *[0.0] * 12], slots)
    want = layer.of({0: 0.25, 1: 0.25, 3: 0.25})
    got = layer.run(kernel.build(experts_call(replace(SMALL, scoring="softmax_top"))))
    torch.testing.assert_close(got, want, rtol=0, atol=TOLERANCE * float(want.abs().max()))


def in_a_graph(driver: EmulatedDriver, layers: int = 3, times: int = 2) -> torch.Tensor:
    """The stream after some layers of experts, launched in a graph, twice."""
    call, kernel = experts_call(replace(SMALL, experts=64, top=8)), OneTokenExperts(hopper(), driver=driver)
    draw = torch.Generator().manual_seed(4)
    made = [Layer(torch.randn(64, generator=draw).tolist(), seed=n) for n in range(layers)]
    blocks = [kernel.build(call) for _ in made]
    x, residual = torch.randn(1, 512, generator=draw).bfloat16(), torch.zeros(1, 512)
    for _ in range(times):
        with driver.graph():
            for block, layer in zip(blocks, made, strict=True):
                x, residual = block(x, residual, layer.w)
    return x.float() + residual


@pytest.mark.parametrize("schedule", [
    Schedule(1, room=132), Schedule(2, room=129),
    *(pytest.param(Schedule(seed, room), marks=pytest.mark.slow) for seed in range(3, 9) for room in (129, 264)),
], ids=str)  # fmt: skip
def test_results_do_not_depend_on_the_order_in_which_threads_copies_and_messages_come(
    folder: Path, schedule: Schedule
) -> None:
    """Launches follow each other, and each may start before the one ahead has ended."""
    driver, results = EmulatedDriver(folder), list[torch.Tensor]()
    for each in (Schedule(), schedule):
        driver.schedule = each
        results.append(in_a_graph(driver))
    assert torch.equal(*results)


#: Places of the source, and what stands there instead; {} is true if the fault is wanted.
FAULTS = {
    "messages of the launch before are taken": (
        "return v.w == flag && (WORDS > 1 || v.y == flag)", "return {} || v.w == flag && (WORDS > 1 || v.y == flag)"
    ),
    "all launches mark their messages alike": ("<< 8) + launch.site + 1;", "<< 8) * !{} + launch.site * !{} + 1;"),
    "the stream is read before the launch ahead has ended": (
        "    grid_wait();\n    const u32 flag", "    if (!{}) grid_wait();\n    const u32 flag"
    ),
    "rows of up are those of gate": ("t % 2 * INNER + rank", "t % 2 * INNER * !{} + rank"),
    "columns of down are another choice's": ("choice(k).down +", "choice({} ? 0 : k).down +"),
    "weights are all the best one's": ("share_of(program / SHARE)", "share_of({} ? 0 : program / SHARE)"),
    "an expert is chosen again": ("keys[RANKED - 1] = 0;\n", "keys[RANKED - 1] = 0, keys[0] = {} ? most : keys[0];\n"),
    "rows are read before experts are chosen": (
        "    choose(launch, flag_of(launch));", "    if (!{}) choose(launch, flag_of(launch));"
    ),
    "results are written before all have read the stream": (
        "    STAMP(2);\n", "    STAMP(2);\n    if ({} && tid < OUT_ROWS) launch.x[program * OUT_ROWS + tid] = 0x7f00;\n"
    ),
}  # fmt: skip


@pytest.fixture(scope="module")
def right(folder: Path) -> torch.Tensor:
    return in_a_graph(EmulatedDriver(folder))


@pytest.mark.parametrize("number", range(len(FAULTS) + 1), ids=["none", *FAULTS])
def test_a_fault_is_found(folder: Path, right: torch.Tensor, number: int) -> None:
    planted = {place: text.replace("{}", f"FAULT({n})") for n, (place, text) in enumerate(FAULTS.values(), 1)}
    driver = EmulatedDriver(folder, planted)
    driver.planted, found = number, False
    for seed in range(1, 9 if number else 2):
        driver.schedule = Schedule(seed, room=132)
        try:
            found = not torch.equal(in_a_graph(driver), right)
        except RuntimeError:
            found = True
        if found:
            break
    assert found == bool(number)


class NoDriver(Driver):
    """Compiles and loads nothing."""

    def __init__(self, missing: str | None = None) -> None:
        self.missing, self.compiled = missing, list[Mapping[str, object]]()

    def refusal(self) -> str | None:
        return self.missing

    def compile(self, source: str, defines: Mapping[str, object]) -> bytes:
        self.compiled.append(defines)
        return source.encode()

    def kernel(self, code: bytes, name: str, grid: int, threads: int, shared: int, early: bool = True) -> Any:
        assert code.decode().count(f"{name}(") == 1 and shared <= number_of("shared", HOPPER.features, 0)
        return SimpleNamespace()


def refusal(call: OpCall, missing: str | None = None, off: str | None = None) -> str | None:
    return OneTokenExperts(hopper(), driver=NoDriver(missing), off=off).supports(call)


def with_static(**changes: Any) -> OpCall:
    call = experts_call()
    return replace(call, static={**call.static, **changes})


@pytest.mark.parametrize("call, reason", [
    (experts_call(dtype="float16"), "computes in bfloat16, not in float16"),
    (experts_call(replace(SMALL, shared_inner=256)), "has no shared experts"),
    (experts_call(replace(SMALL, top=6)), "shares 128 programs out to the experts of a token, up to 32, not to 6"),
    (experts_call(replace(SMALL, experts=64, top=64)), "up to 32, not to 64"),
    (experts_call(replace(SMALL, inner=384)), "hidden 512 and inner 384 are not multiples of 512 and 256"),
    (experts_call(hidden=768), "hidden 768 and inner 256 are not multiples of 512 and 256"),
    (experts_call(replace(SMALL, inner=4352)), "4 experts of 4352 are more than 16384"),
    (experts_call(replace(SMALL, experts=528)), "routes among at most 512 experts"),
    (experts_call(replace(SMALL, scoring="sigmoid")), "chooses by softmax, without groups"),
    (experts_call(replace(SMALL, groups=4, top_groups=2)), "chooses by softmax, without groups"),
    (experts_call(replace(SMALL, activation="gelu")), "computes silu"),
    (experts_call(replace(SMALL, router_weight_on_input=True)), "weights results"),
    (experts_call(replace(SMALL, post_norm="post")), "no norm after the experts"),
    (replace(experts_call(), bucket=Bucket(2, 2)), "computes one token"),
    (replace(experts_call(), device=replace(HOPPER, variant="sm_100")), "its machine code is for sm_90, not sm_100"),
    (replace(experts_call(), device=capabilities((9, 0), 100, 232_448)), "needs 128 multiprocessors"),
    (replace(experts_call(), device=capabilities((9, 0), 132, 65_536)), "does not fit into a multiprocessor"),
])  # fmt: skip
def test_refuses_others_with_the_reason(call: OpCall, reason: str) -> None:
    assert reason in str(refusal(call))


def test_refuses_weights_that_are_stored_otherwise_and_machines_without_a_compiler() -> None:
    call = experts_call()
    assert refusal(call) is None
    assert refusal(call, missing="there is no NVRTC") == "there is no NVRTC"
    assert refusal(call, off="is used with cuda.one_launch=all") == "is used with cuda.one_launch=all"
    call.static["down"].layout = "another"
    assert refusal(call) == "reads weights as plain numbers"


def test_the_user_may_leave_it_out() -> None:
    reasons = {}
    for option in ("small", "all"):
        kernels = evener_kernels(hopper(), {"one_launch": option})
        reasons[option] = [str(k.supports(experts_call())) for k in kernels if isinstance(k, OneTokenExperts)]
    assert reasons["small"] == ["is used with cuda.one_launch=all"] != reasons["all"]


@pytest.mark.parametrize("name", ["router_bias", "correction", "gate_up_bias", "down_bias"])
def test_experts_with_biases_or_a_corrected_choice_are_computed_by_several_launches(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    kernel, asked = OneTokenExperts(hopper(), driver=NoDriver()), list[MoEWeights]()

    def several(x: torch.Tensor, residual: torch.Tensor, w: MoEWeights) -> tuple[torch.Tensor, torch.Tensor]:
        asked.append(w)
        return x, residual

    monkeypatch.setattr(kernel._several, "build", lambda call: several)
    layer = Layer([0.0] * 16)
    sizes = {"router_bias": (16,), "correction": (16,), "gate_up_bias": (16, 512), "down_bias": (16, 512)}
    dtype = torch.float32 if name == "correction" else torch.bfloat16
    w = layer.w._replace(**{name: torch.zeros(sizes[name], dtype=dtype)})
    kernel.build(experts_call())(layer.x, layer.residual, w)
    assert asked == [w]


@pytest.mark.parametrize("name", ["gate_up", "down", "router"])
def test_weights_must_begin_where_copies_can(folder: Path, name: str) -> None:
    kernel, layer = OneTokenExperts(hopper(), driver=EmulatedDriver(folder)), Layer([0.0] * 16)
    data = getattr(layer.w, name).data
    moved = torch.zeros(data.numel() + 8, dtype=data.dtype)[1 : 1 + data.numel()].view(data.shape)
    w = layer.w._replace(**{name: packed(moved)})
    with pytest.raises(ValueError, match=f"{name} does not begin at a multiple of 16 bytes"):
        kernel.build(experts_call())(layer.x, layer.residual, w)


def test_the_workspace_has_room_for_messages() -> None:
    call, kernel = experts_call(), OneTokenExperts(hopper(), driver=NoDriver())
    sizes = ExpertSizes(512, 16, 4, 256)
    assert kernel.workspace(call) == 8 * sizes.messages() + kernel._several.workspace(call)
    assert sizes.messages() > 4 * PROGRAMS * 2 * 2


def test_layers_of_one_size_are_compiled_alike() -> None:
    driver = NoDriver()
    kernel = OneTokenExperts(hopper(), driver=driver)
    sites = [kernel.site(experts_call()) for _ in range(2)]
    assert driver.compiled[0] == driver.compiled[1] and driver.compiled[0]["STAGES"] == 13
    assert len(kernel._loaded) == 1 and sites[0]._argument.site != sites[1]._argument.site
    assert sites[0]._argument.messages == sites[1]._argument.messages


def test_every_macro_of_the_source_is_given() -> None:
    """A name in capitals that nothing defines would be 0 in a condition of the preprocessor."""
    text = source()
    macros = defines(cast(MoEStatic, experts_call().static), 12, 12)
    given = {*macros, *re.findall(r"#define (\w+)", text), "STAMPS"}
    given |= set(re.findall(r"(?:int|,) ([A-Z]\w+)(?= =|,|>)", text))  # constants and parameters of templates
    code = re.sub(r"//.*|\"[^\"\n]*\"", "", text)
    used = set(re.findall(r"\b[A-Z][A-Z_]{2,}\b", code))
    assert used - given == set() and set(macros) - used == set()


def test_the_argument_is_laid_out_as_in_the_source() -> None:
    text = re.sub(r"//.*", "", re.findall(r"struct Experts {(.*?)};", source(), re.S)[0])
    assert re.findall(r"(\w+)\s*[,;]", text) == [field[0] for field in Experts._fields_]
    assert ctypes.sizeof(Experts) == 8 * 10 + 2 * 4
