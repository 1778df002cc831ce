"""The decoder layer of one token: what it refuses, its sizes, and its argument, with a driver that launches nothing."""

from __future__ import annotations

import ctypes
import re
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from emulated import hopper

from evener.contracts.ops import Bucket, OpCall
from evener.contracts.quant import QuantFormat, Rounding, block_format
from evener.contracts.state import StateStep
from evener.layers.builder import Builder
from evener.layers.decoder import AttentionConfig, DecoderLayer, MLPConfig
from evener.layers.rotary import RotaryConfig
from evener.ops.reference.linear import PLAIN
from evener.ops.schemas import BUILTIN
from evener_backend_cuda import compiled, descriptor
from evener_backend_cuda.capability import SHORT_TOKENS, capabilities
from evener_backend_cuda.compiled import CompiledKernel, Driver, Place
from evener_backend_cuda.one_token import MOST_LAYERS, OneTokenLayer, OneTokenLayers, Sizes, Way, defines, source
from evener_backend_cuda.one_token_launch import MAX_SITES, Layer, Messages, layers_type
from evener_backend_cuda.plugin import evener_kernels
from evener_conformance.kit.composites import TinyModel
from evener_conformance.kit.families import families
from evener_conformance.kit.subject import open_subject
from evener_kernels_triton.features import number_of
from evener_kernels_triton.packed import PACKED
from evener_kernels_triton.state import LAYOUT, PagedState
from evener_kernels_triton.stored import STORED
from evener_kernels_triton.tuning import Tuning

HOPPER = capabilities((9, 0), 132, 232_448)
SOURCE = source()
TUNING = Tuning.of(HOPPER)
CHOICES = descriptor.options["one_launch"].choices
SMALL = AttentionConfig(heads=8, kv_heads=8, head_dim=64, rotary=RotaryConfig(64), qk_norm=True)


class Launches:
    """Stands for a loaded kernel: keeps copies of its arguments.

    Attributes:
        older: whether the driver cannot give a launch in a graph another argument.
    """

    def __init__(self) -> None:
        self.arguments: list[Any] = []
        self.capture, self.nodes, self.older = 1, 0, False

    def place(self, device: torch.device) -> Place:
        return Place(7, self.capture, (self.nodes,)) if self.capture else Place(7)

    def __call__(self, stream: int, argument: ctypes.Structure) -> None:
        self.nodes += 1
        self.arguments.append(type(argument).from_buffer_copy(argument))

    def change(self, place: Place, argument: ctypes.Structure) -> bool:
        assert place.nodes == (self.nodes,)
        if not self.older:
            self.arguments[-1] = type(argument).from_buffer_copy(argument)
        return not self.older


class NoDriver(Driver):
    """Compiles and loads nothing."""

    def __init__(self, missing: str | None = None) -> None:
        self.launches, self.missing = Launches(), missing
        self.compiled: list[Mapping[str, object]] = []

    def refusal(self) -> str | None:
        return self.missing

    def compile(self, source: str, defines: Mapping[str, object]) -> bytes:
        self.compiled.append(defines)
        return source.encode()

    def kernel(self, code: bytes, name: str, grid: int, threads: int, shared: int) -> CompiledKernel:
        assert code.decode().count(name) == 1 and shared <= number_of("shared", HOPPER.features, 0)
        return cast(CompiledKernel, self.launches)


def layer(
    attention: AttentionConfig = SMALL, mlp: MLPConfig = MLPConfig(inner=512), hidden: int = 512,  # noqa: B008
    dtype: str = "bfloat16", number: int = 3,
) -> dict[str, Any]:  # fmt: skip
    """The static parameters of a layer."""
    build = Builder(dtype, 64)
    DecoderLayer(build, f"model.layers.{number}", hidden, attention, mlp, 1e-6)
    return dict(next(site.static for site in build.sites if site.op == "decoder_layer"))


def call(static: dict[str, Any], bucket: Bucket = Bucket(1, 1), device: Any = HOPPER) -> OpCall:  # noqa: B008
    return OpCall("decoder_layer", static, bucket, device, state_layout=LAYOUT)


def kernel(missing: str | None = None) -> tuple[OneTokenLayer, NoDriver]:
    driver = NoDriver(missing)
    return OneTokenLayer(hopper(), driver=driver), driver


def qwen(hidden: int, inner: int, heads: int) -> dict[str, Any]:
    attention = replace(SMALL, heads=heads, head_dim=128, rotary=RotaryConfig(128))
    return layer(attention, MLPConfig(inner=inner), hidden)


@pytest.mark.parametrize("static, stages", [(layer(), 5), (qwen(1024, 3072, 16), 5), (qwen(1024, 3072, 32), 4)])
def test_takes_layers_of_one_token(static: dict[str, Any], stages: int) -> None:
    taken, driver = kernel()
    assert taken.supports(call(static)) is None
    slot = static["attention"]["state"]
    slot.provider = PagedState(TUNING)
    assert taken.workspace(call(static)) > 0
    taken.build(call(static))
    assert driver.compiled[0]["STAGES"] == stages


@pytest.mark.parametrize("static, reason", [
    (layer(dtype="float16"), "computes in bfloat16, not in float16"),
    (layer(replace(SMALL, kv_heads=4)), "shares its programs out to 8 key heads, not 4"),
    (layer(replace(SMALL, heads=24)), "24 heads of 64: takes"),
    (layer(replace(SMALL, head_dim=32, rotary=RotaryConfig(32))), "8 heads of 32: takes"),
    (layer(replace(SMALL, rotary=RotaryConfig(32))), "rotated as a whole"),
    (layer(replace(SMALL, rotary=RotaryConfig(64, interleaved=True))), "in halves"),
    (layer(replace(SMALL, window=64)), "attends to all keys"),
    (layer(replace(SMALL, softcap=20.0)), "without soft cap"),
    (layer(replace(SMALL, sinks=True)), "without soft cap, sinks"),
    (layer(replace(SMALL, slopes=(0.5,) * 8)), "sinks and slopes"),
    (layer(replace(SMALL, post_norm="post")), "has no norm after attention"),
    (layer(mlp=MLPConfig(inner=512, activation="gelu")), "does not know activation 'gelu'"),
    (layer(mlp=MLPConfig(inner=512, bias=True)), "has no biases in the MLP"),
    (layer(mlp=MLPConfig(inner=512, post_norm="post")), "no norm after it"),
    (layer(mlp=MLPConfig(inner=640)), "hidden 512 and inner 640 are not multiples"),
    (layer(hidden=768), "hidden 768 and inner 512 are not multiples"),
    (qwen(2048, 6144, 16), "layers of up to 40 MiB, not 96"),
])  # fmt: skip
def test_refuses_other_layers_with_the_reason(static: dict[str, Any], reason: str) -> None:
    assert reason in str(kernel()[0].supports(call(static)))


@pytest.mark.parametrize("option", CHOICES)
def test_the_backend_delivers_the_ops_that_it_announces(option: str) -> None:
    assert {each.op for each in evener_kernels(hopper(), {"one_launch": option})} == set(descriptor.ops)


def test_the_user_may_leave_out_the_kernels_of_large_layers() -> None:
    static = qwen(4096, 12288, 32)
    static["attention"]["state"].provider = PagedState(TUNING)
    reasons = {}
    for option in CHOICES:
        kernels = evener_kernels(hopper(), {"one_launch": option})
        reasons[option] = {str(each.supports(call(static))) for each in kernels if type(each) is OneTokenLayers}
    assert descriptor.options["one_launch"].default == "all"
    assert reasons["small"] == {"is used with cuda.one_launch=all"} and reasons["small"] != reasons["all"]


def test_large_layers_have_a_multiprocessor_and_share_launches() -> None:
    driver = NoDriver()
    large = OneTokenLayers(hopper(), driver=driver)
    static = qwen(4096, 12288, 32)
    static["attention"]["state"].provider = PagedState(TUNING)
    assert large.supports(call(static)) is None
    large.build(call(static))
    assert driver.compiled[0]["RESIDENT"] == 1
    assert (driver.compiled[0]["STAGES"], driver.compiled[0]["FLIGHT"]) == (10, 4)
    assert driver.compiled[0]["MOST_LAYERS"] == MOST_LAYERS


@pytest.mark.parametrize("form, taken", [
    (QuantFormat("float8_e4m3fn", scale="float32"), (8, 0)),
    (QuantFormat("float8_e4m3fn", -1, scale="float32"), (8, 0)),
    (QuantFormat("float8_e4m3fn", 128, 128, scale="float32"), (8, 128)),
    (QuantFormat("float8_e4m3fn", 64, 64, scale="float32"), None),
    (QuantFormat("int8", scale="float32"), None),
])  # fmt: skip
def test_large_layers_read_e4m3_with_scales_of_rows_or_blocks(form: QuantFormat, taken: tuple[int, int] | None) -> None:
    driver = NoDriver()
    large, static = OneTokenLayers(hopper(), driver=driver), qwen(1024, 1024, 16)
    weights = [static["attention"]["qkv"], static["attention"]["o"], static["mlp"]["gate_up"], static["mlp"]["down"]]
    for weight in weights:
        weight.parts = tuple(replace(part, format=form) for part in weight.parts)
        weight.layout = STORED.layout
    static["attention"]["state"].provider = PagedState(TUNING)
    reason = large.supports(call(static))
    if taken is None:
        assert "reads e4m3 with a scale for a row or for 128 x 128" in str(reason)
        return
    assert reason is None
    large.build(call(static))
    assert (driver.compiled[0]["WEIGHT_BITS"], driver.compiled[0]["BLOCK"]) == taken
    weights[0].layout = PLAIN.layout
    assert large.supports(call(static)) == "its weights are stored differently"


INT4 = QuantFormat("uint4", 128, scale="float16")


@pytest.mark.parametrize("form, head_dim, taken", [
    (INT4, 128, {"SCALE_BF16": 0, "ZEROS": 0, "STAGES": 11}),
    (replace(INT4, scale="bfloat16"), 128, {"SCALE_BF16": 1, "ZEROS": 0, "STAGES": 11}),
    (replace(INT4, zero="uint8"), 128, {"SCALE_BF16": 0, "ZEROS": 1, "STAGES": 11}),
    (INT4, 64, "reads integers of four bits with heads of 128, not 64"),
    (replace(INT4, group=64), 128, "in groups of 128, not PackedForm(kind='q4', style='half', group=64"),
    (replace(INT4, group=0), 128, "in groups of 128"),
    (replace(INT4, order="act"), 128, "its weights are stored differently"),
    (replace(INT4, activation=Rounding("int8")), 128, "does not round activations"),
    (block_format("q4_0"), 128, "in groups of 128"),
    (block_format("q6_k"), 128, "reads packed integers of four bits"),
])  # fmt: skip
def test_large_layers_read_integers_of_four_bits(form: QuantFormat, head_dim: int, taken: dict[str, int] | str) -> None:
    driver = NoDriver()
    attention = replace(SMALL, heads=16, head_dim=head_dim, rotary=RotaryConfig(head_dim))
    large, static = OneTokenLayers(hopper(), driver=driver), layer(attention, MLPConfig(inner=2560), 1536)
    weights = [static["attention"]["qkv"], static["attention"]["o"], static["mlp"]["gate_up"], static["mlp"]["down"]]
    for weight in weights:
        weight.parts = tuple(replace(part, format=form) for part in weight.parts)
        weight.layout = PACKED.layout
        assert PACKED.supports(weight.parts, "bfloat16") is None
    static["attention"]["state"].provider = PagedState(TUNING)
    reason = large.supports(call(static))
    if isinstance(taken, str):
        assert taken in str(reason)
        return
    assert reason is None
    large.build(call(static))
    assert {name: driver.compiled[0][name] for name in taken} == taken
    assert driver.compiled[0]["WEIGHT_BITS"] == 4
    assert OneTokenLayer(hopper(), driver=driver).packings == (PLAIN,)
    other = "float16" if form.scale == "bfloat16" else "bfloat16"
    for changed in (weights[0].parts[1:], weights[0].parts):  # of one weight some parts, then all
        weights[0].parts = tuple(
            replace(part, format=replace(form, scale=other)) if part in changed else part for part in weights[0].parts
        )
        assert large.supports(call(static)) == "its weights are stored differently"


def test_refuses_steps_and_devices_with_the_reason() -> None:
    taken, _ = kernel()
    assert "computes one token" in str(taken.supports(call(layer(), Bucket(2, 2))))
    assert "machine code is for sm_90, not sm_80" in str(
        taken.supports(call(layer(), device=capabilities((8, 0), 108, 166_912)))
    )
    assert "needs 128 multiprocessors" in str(taken.supports(call(layer(), device=capabilities((9, 0), 114, 232_448))))
    assert "do not fit into a multiprocessor" in str(
        taken.supports(call(layer(), device=capabilities((9, 0), 132, 101_376)))
    )
    assert kernel("there is no NVRTC")[0].supports(call(layer())) == "there is no NVRTC"


def test_every_macro_of_the_source_is_given() -> None:
    """A name in capitals that nothing defines would be 0 in a condition of the preprocessor."""
    given = {*defines(call(layer()), Sizes(512, 512, 8, 64), 3, 1), *re.findall(r"#define (\w+)", SOURCE), "STAMPS"}
    given |= set(re.findall(r"(?:int|,) ([A-Z]\w+)(?= =|,|>)", SOURCE))  # constants and parameters of templates
    code = re.sub(r"//.*|\"[^\"\n]*\"", "", SOURCE)
    assert set(re.findall(r"\b[A-Z][A-Z_]{2,}\b|\bD\b", code)) - given == set()


def test_the_argument_is_laid_out_as_in_the_source() -> None:
    for name, type_ in (("Layer", Layer), ("Layers", layers_type(3))):
        text = re.sub(r"//.*", "", re.findall(rf"struct {name} {{(.*?)}};", SOURCE, re.S)[0])
        assert re.findall(r"(\w+)(?:\[\w+\])?\s*[,;]", text) == [field[0] for field in type_._fields_]
    assert ctypes.sizeof(layers_type(MOST_LAYERS)) < 32_764, "CUDA allows no more"


def test_sites_and_marks_differ() -> None:
    messages = Messages(torch.device("cpu"))
    sites = [messages.site() for _ in range(MAX_SITES)]
    assert len(set(sites)) == MAX_SITES and max(sites) < MAX_SITES
    marks = [messages.next_flag() for _ in range(5)]
    assert len(set(marks)) == 5 and 0 not in marks
    assert messages.of(300) is messages.of(300) and len(messages.of(400)) == 400


class Model:
    """Two layers with a kernel, whose launches do nothing."""

    def __init__(self, subject: type[OneTokenLayer] = OneTokenLayer) -> None:
        driver = NoDriver()
        self.kernel = subject(hopper(), driver=driver)
        self.launches = driver.launches
        family = next(f for f in families() if f.name == "shared")
        device, self.hidden = hopper(), family.hidden
        self.tiny = TinyModel(
            device, "bfloat16", family, [self.kernel], PagedState(TUNING, SHORT_TOKENS), list(BUILTIN)
        )

    def step(self) -> list[Layer]:
        """The arguments of the layers of a step of one token behind three others."""
        self.launches.arguments.clear()
        with torch.inference_mode():
            self.tiny.step(torch.ones(1, self.hidden), (3,), (1,))
        return [layer for launch in self.launches.arguments for layer in launch.layer[: launch.count]]

    def before_second(self, act: Callable[[torch.Tensor], torch.Tensor]) -> None:
        """Let ``act`` do something to ``x`` before the second layer."""
        site = self.tiny.layers[1].sites[0]
        run = site.table[0]
        site.table = (lambda x, *others: run(act(x), *others), *site.table[1:])


def test_a_layer_takes_the_stream_of_the_layer_before_from_its_messages() -> None:
    model = Model()
    first, second = model.step()
    assert first.before == 0 and first.residual is None and first.x == first.out
    assert second.before == first.after != second.after
    assert (second.x, second.residual, second.stream) == (first.out, first.stream, first.stream)
    assert first.site != second.site and len({each.messages for each in model.launches.arguments}) == 1
    assert first.page_bits == model.tiny.block.bit_length() - 1


def test_layers_with_nothing_between_them_are_one_launch_in_a_capture() -> None:
    model = Model(OneTokenLayers)
    for _ in range(2):  # the second step begins a launch of its own
        first, second = model.step()
        assert [each.count for each in model.launches.arguments] == [2]
        assert first.before == 0 and second.before == first.after


@pytest.mark.parametrize("why", ["a change", "no capture", "an older driver", "no room"])
def test_layers_are_launches_of_their_own_if_they_cannot_be_one(why: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(OneTokenLayers, "_way", lambda self, sizes: Way(0, 1 if why == "no room" else 2))
    model = Model(OneTokenLayers)
    model.launches.older = why == "an older driver"
    if why == "no capture":
        model.launches.capture = 0
    if why == "a change":
        model.before_second(torch.clone)
    first, second = model.step()
    assert [each.count for each in model.launches.arguments] == [1, 1]
    assert second.before == (first.after if why in ("an older driver", "no room") else 0)


def test_a_layer_reads_the_stream_from_memory_outside_a_capture() -> None:
    model = Model()
    model.launches.capture = 0
    assert [each.before for each in model.step()] == [0, 0]


def test_a_layer_reads_the_stream_from_memory_where_another_capture_began_between() -> None:
    model = Model()

    def begin(x: torch.Tensor) -> torch.Tensor:
        model.launches.capture += 1
        return x

    model.before_second(begin)
    assert [each.before for each in model.step()] == [0, 0]


def test_a_layer_reads_the_stream_from_memory_after_a_change_in_place() -> None:
    model = Model()

    def change(x: torch.Tensor) -> torch.Tensor:
        model.launches.nodes += 1  # of the launch that adds
        return x.add_(1.0)

    model.before_second(change)
    assert [each.before for each in model.step()] == [0, 0]


def test_a_layer_reads_the_stream_from_memory_if_it_is_another_tensor() -> None:
    model = Model()
    model.before_second(torch.clone)
    assert [each.before for each in model.step()] == [0, 0]


def test_a_layer_reads_the_stream_from_memory_if_the_one_before_has_other_messages(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Of another size: it would wait for messages that nobody sends."""
    monkeypatch.setattr(Messages, "of", lambda self, count: torch.zeros(count, dtype=torch.int64))
    assert [each.before for each in Model().step()] == [0, 0]


def test_long_state_is_computed_in_several_launches(monkeypatch: pytest.MonkeyPatch) -> None:
    model, seen = Model(), list[str]()

    def built(name: str) -> Any:
        def run(x: torch.Tensor, residual: torch.Tensor, *others: Any) -> tuple[torch.Tensor, torch.Tensor]:
            seen.append(name)
            return x, residual

        return lambda call: run

    for part, name in ((model.kernel._attention, "attention"), (model.kernel._mlp, "mlp")):
        monkeypatch.setattr(part, "build", built(name))
    static = model.tiny.layers[0].sites[0].static
    run = model.kernel.build(call(dict(static)))
    state = StateStep(
        tokens=1, requests=1, max_query=1, max_kv=SHORT_TOKENS - 1, query_start=torch.tensor([0, 1]).int(),
        kv_lens=torch.tensor([4]).int(), positions=torch.tensor([3]).int(), slot_mapping=torch.tensor([35]).int(),
        block_table=torch.tensor([[1]]).int(), host_query_lens=[1], host_kv_lens=[4],
    )  # fmt: skip
    slot, layer_ = static["attention"]["state"], model.tiny.layers[0]
    x, stream = torch.ones(1, model.hidden, dtype=torch.bfloat16), torch.zeros(1, model.hidden)
    for longest, launches in ((SHORT_TOKENS - 1, 1), (SHORT_TOKENS, 0)):
        model.launches.arguments.clear()
        step = replace(state, max_kv=longest)
        meta = slot.provider.prepare(step, slot.spec, slot.attention, model.tiny.block)
        run(x, stream, state.positions, layer_.attention.values, layer_.mlp.values, slot.views, meta)
        assert len(model.launches.arguments) == launches
    assert seen == ["attention", "mlp"]
    assert slot.provider.capture_limits(slot.spec, slot.attention, 1)[0] == SHORT_TOKENS
    assert SHORT_TOKENS not in slot.provider.capture_limits(slot.spec, slot.attention, 2)


@pytest.mark.parametrize("newer", [True, False], ids=["CUDA 12.3 and later", "earlier"])
def test_a_place_in_a_capture_has_the_nodes_that_the_next_launch_waits_for(
    newer: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With a driver library that is made up: its call writes what a capture with two nodes would be."""
    nodes = (ctypes.c_void_p * 2)(11, 12)

    def info(stream: ctypes.c_void_p, status: Any, number: Any, graph: None, held: Any, *edges_and_count: Any) -> int:
        assert len(edges_and_count) == (2 if newer else 1)
        status._obj.value = capturing
        number._obj.value, edges_and_count[-1]._obj.value = 5, 2
        held._obj.contents = ctypes.cast(nodes, ctypes.POINTER(ctypes.c_void_p)).contents
        return 0

    name = "cuStreamGetCaptureInfo_v3" if newer else "cuStreamGetCaptureInfo_v2"
    monkeypatch.setattr(compiled, "_cuda", lambda: SimpleNamespace(**{name: info}))
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: SimpleNamespace(cuda_stream=7))
    launch = CompiledKernel.__new__(CompiledKernel)
    capturing = 1
    assert launch.place(torch.device("cpu")) == Place(7, 5, (11, 12))
    capturing = 0
    assert launch.place(torch.device("cpu")) == Place(7)


@pytest.mark.gpu
@pytest.mark.parametrize("changed", [False, True], ids=["nothing between", "changed in place"])
def test_two_layers_in_a_captured_graph_give_what_they_give_eagerly(changed: bool) -> None:
    subject = open_subject("cuda")
    kernel = next(each.value for each in subject.kernels if isinstance(each.value, OneTokenLayer))
    provider = next(each.value for each in subject.states if each.value.layout == kernel.state_layout)
    family = next(f for f in families() if f.name == "shared")
    tiny = TinyModel(subject.device, "bfloat16", family, [kernel], provider, list(BUILTIN))
    first, second = tiny.layers

    def both(x: torch.Tensor, residual: None, step: Any) -> tuple[torch.Tensor, torch.Tensor]:
        x, stream = first(x.clone(), residual, step)
        return second(x.add_(1.0) if changed else x, stream, step)

    def captured(x: torch.Tensor, residual: None, step: Any) -> tuple[torch.Tensor, torch.Tensor]:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            results = both(x, residual, step)
        graph.replay()
        return results

    found = []
    with torch.inference_mode():
        for run in (both, captured):
            tiny.layers = [run]  # type: ignore[list-item]
            found.append(tiny.step(torch.ones(1, family.hidden), (3,), (1,))[0])
    assert torch.equal(*found)


def test_programs_that_find_no_memory_have_no_stages() -> None:
    assert Sizes(1024, 3072, 16, 128).stages(0) == 0


def test_machine_code_is_compiled_once(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    made: list[Mapping[str, object]] = []

    def compile_source(source: str, defines: Mapping[str, object], architecture: str) -> bytes:
        made.append(defines)
        return f"{source} {sorted(defines.items())} {architecture}".encode()

    monkeypatch.setattr(compiled, "compile_source", compile_source)
    monkeypatch.setattr(compiled, "nvrtc", lambda: SimpleNamespace(nvrtcVersion=lambda major, minor: 0))
    first, again = (Driver().compile("a", {"B": 1}) for _ in range(2))
    other = Driver().compile("a", {"B": 2})
    assert first == again != other and len(made) == 2


def test_a_machine_without_the_compiler_is_told_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> ctypes.CDLL:
        raise OSError(name)

    monkeypatch.setattr(ctypes, "CDLL", missing)
    compiled.nvrtc.cache_clear()
    assert "there is no NVRTC: install" in str(Driver().refusal())
    compiled.nvrtc.cache_clear()
