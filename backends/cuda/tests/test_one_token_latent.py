"""One token's latent attention in one launch computes what the reference does. Its kernel's source runs on the host,
with all programs and threads of it."""

from __future__ import annotations

import ctypes
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from emulated import EmulatedDriver, Schedule, hopper

from evener.contracts.declared import StateSlot
from evener.contracts.ops import Bucket, OpCall
from evener.contracts.state import SplitMetadata, StateSpec, StateStep, StoredStateProvider
from evener.contracts.statics import LatentStatic
from evener.contracts.weights import LatentWeights
from evener.layers.builder import Builder
from evener.layers.decoder import MixerLayer, MLPConfig
from evener.layers.latent import IndexConfig, LatentConfig
from evener.layers.rotary import RotaryConfig
from evener.ops.reference.linear import PLAIN
from evener.ops.reference.state import ReferenceState
from evener.ops.schemas import BUILTIN
from evener_backend_cuda.capability import SHORT_LATENT_TOKENS, capabilities
from evener_backend_cuda.compiled import Driver
from evener_backend_cuda.one_token_latent import Latent, LatentSizes, OneTokenLatent, defines, source
from evener_backend_cuda.plugin import evener_kernels
from evener_conformance.kit import composites
from evener_conformance.kit.composites import TinyModel
from evener_conformance.kit.families import families
from evener_conformance.reference.device import HostDevice
from evener_kernels_triton.features import number_of
from evener_kernels_triton.latent_state import LatentState
from evener_kernels_triton.tuning import Tuning

HOPPER = capabilities((9, 0), 132, 232_448)
TUNING = Tuning.of(HOPPER)
SHARED = next(f for f in families() if f.name == "shared")
#: Of the largest value of a result: a few roundings to bfloat16.
TOLERANCE = 2**-7
SMALL = LatentConfig(
    heads=8, nope_dim=128, rope_dim=32, value_dim=32, rank=256, q_rank=None, rotary=RotaryConfig(32)
)  # fmt: skip
LITE = LatentConfig(
    heads=16, nope_dim=128, rope_dim=64, value_dim=128, rank=512, q_rank=None,
    rotary=RotaryConfig(64, interleaved=True),
)  # fmt: skip


@pytest.fixture(autouse=True)
def tiny_tensors(one_thread: None) -> None:
    """Every test here runs on one thread."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("emulated")


class Pages(LatentState):
    """Pages of so many tokens."""

    def __init__(self, block: int) -> None:
        super().__init__(TUNING, SHORT_LATENT_TOKENS)
        self._block = block

    def block_sizes(self, spec: StateSpec) -> Sequence[int]:
        return (self._block,)


class Models:
    """Attention of layers with the kernel, the same with references in float32, and state of so many tokens in both.
    The layers are launched in a graph, where each may start before the one ahead has ended.

    Attributes:
        tokens: before the next step.
        times: how often a step runs the layers, one after another.
        change: (optional) what happens to a step before the kernel gets it.
    """

    def __init__(
        self, driver: EmulatedDriver, config: LatentConfig, tokens: int = 0, block: int = 16, hidden: int = 512,
        layers: int = 1, **more: Any,
    ) -> None:  # fmt: skip
        device = hopper()
        self.driver, self.tokens, self.hidden, self.times = driver, tokens, hidden, 1
        self.change: Callable[[StateStep], StateStep] | None = None
        self.kernel = OneTokenLatent(device, driver=driver)
        kind = replace(SHARED, attention=config, mlp=MLPConfig(inner=64), hidden=hidden, **more)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(composites, "MAX_POSITIONS", max(192, tokens + 8))
            patch.setattr(composites, "LAYERS", layers)
            self.tiny = TinyModel(device, "bfloat16", kind, [self.kernel], Pages(block), list(BUILTIN))
            self.reference = TinyModel(HostDevice(0), "float32", kind, [], ReferenceState(), list(BUILTIN), self.tiny)
        self._layers, self._right = ([layer.mixer for layer in m.layers] for m in (self.tiny, self.reference))
        self.tiny.layers = [self._launched]  # type: ignore[list-item]
        noise = torch.Generator().manual_seed(1)
        for slots in zip(self.tiny.build.slots, self.reference.build.slots, strict=True):
            state = [torch.randn(tokens, width, generator=noise).bfloat16() for width in (config.rank, config.rope_dim)]
            for slot, model in zip(slots, (self.tiny, self.reference), strict=True):
                write_state(slot, model, state)

    def _launched(self, x: torch.Tensor, stream: Any, step: Any) -> tuple[torch.Tensor, Any]:
        if self.change is not None:
            metas = [SplitMetadata(replace(m.decode, step=self.change(m.decode.step)), None, 1) for m in step.metas]
            step = replace(step, metas=metas)
        with self.driver.graph():
            for layer in self._layers * self.times:
                x, stream = layer(x, stream, step)
        return x, stream

    @property
    def weights(self) -> LatentWeights:
        """Of the first layer."""
        return cast(LatentWeights, self._layers[0].weights.values)

    def step(self, seed: int = 0) -> list[torch.Tensor]:
        """Hidden states and logits of the next token, after comparing them and the state with the reference's."""
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


def write_state(slot: StateSlot, model: TinyModel, values: Sequence[torch.Tensor]) -> None:
    """Latents and keys [tokens, width] of the first request."""
    tokens = len(values[0])
    if tokens:
        assert isinstance(slot.provider, StoredStateProvider)
        blocks = model.table[0, : -(-tokens // model.block)].long()
        pages = slot.provider.export_blocks(slot.views, blocks)
        for page, value in zip(pages, values, strict=True):
            page.flatten(0, 1)[:tokens] = value
        slot.provider.import_blocks(slot.views, blocks, pages)


@pytest.mark.parametrize("tokens", [0, 1, 40, 300])
def test_attention_gives_what_the_reference_gives(folder: Path, tokens: int) -> None:
    """A team's 16 programs have no token, one, three, and more than a stage."""
    models = Models(EmulatedDriver(folder), SMALL, tokens)
    models.step(0)
    models.step(1)
    assert len(models.driver.arguments) == 2, "each step is a launch"


@pytest.mark.parametrize("config, hidden, more", [
    pytest.param(replace(SMALL, heads=16, nope_dim=64, rotary=RotaryConfig(32, interleaved=True)), 1024, {},
                 id="16 heads, neighbours are rotated"),
    pytest.param(replace(SMALL, nope_dim=16), 512, {}, id="no more rows than a tile has"),
    pytest.param(replace(SMALL, heads=32, rope_dim=64, rank=512, rotary=RotaryConfig(64)), 512, {"offset": 1.0},
                 id="32 heads, a norm with an offset"),
    pytest.param(LITE, 2048, {}, id="as DeepSeek-V2-Lite"),
    pytest.param(replace(LITE, heads=32, rotary=RotaryConfig(64)), 4096, {}, id="32 large heads",
                 marks=pytest.mark.slow),
    pytest.param(replace(LITE, heads=8, rotary=RotaryConfig(64)), 1536, {}, id="8 heads", marks=pytest.mark.slow),
])  # fmt: skip
def test_attention_of_other_sizes(folder: Path, config: LatentConfig, hidden: int, more: dict[str, Any]) -> None:
    models = Models(EmulatedDriver(folder), config, 70, 32, hidden, **more)
    models.driver.schedule = Schedule(room=132)  # one program in each multiprocessor
    models.change = lambda step: replace(step, slot_mapping=step.slot_mapping.long())
    models.step()


@pytest.mark.parametrize("tokens, block", [(4000, 16), pytest.param(4000, 128, marks=pytest.mark.slow)])
def test_long_state_is_read(folder: Path, tokens: int, block: int) -> None:
    """Each of a head's four programs reads numbers of pages from the table more than once, or several stages from one
    page."""
    Models(EmulatedDriver(folder), replace(SMALL, heads=32), tokens, block).step()


def test_a_step_of_no_request_reads_its_own_token_alone(folder: Path) -> None:
    """A padded step has length 0. Its results are of no use, but it ends."""
    models = Models(EmulatedDriver(folder), SMALL)
    models.change = lambda step: replace(step, kv_lens=torch.zeros_like(step.kv_lens))
    models.step()


@pytest.fixture(scope="module")
def two(folder: Path) -> Models:
    """Two layers, with up to 300 tokens."""
    return Models(EmulatedDriver(folder), SMALL, 300, layers=2)


def again(models: Models, tokens: int, times: int = 1) -> list[torch.Tensor]:
    """Results of a step behind so many tokens, also after a launch that failed."""
    models.tokens, models.times = tokens, times
    for messages in models.kernel._messages._held.values():
        messages.zero_()
    return models.step()


@pytest.mark.parametrize("schedule", [
    Schedule(1, room=132), Schedule(2, room=129),
    *(pytest.param(Schedule(seed, room), marks=pytest.mark.slow) for seed in range(3, 9) for room in (129, 264)),
], ids=str)  # fmt: skip
def test_results_do_not_depend_on_the_order_in_which_threads_copies_and_messages_come(
    two: Models, schedule: Schedule
) -> None:
    """Two steps' layers follow each other in one graph."""
    results = []
    for each in (Schedule(), schedule):
        two.driver.schedule = each
        results.append(again(two, 300, 2))
    assert all(torch.equal(*pair) for pair in zip(*results, strict=True))


@dataclass(frozen=True)
class Fault:
    """A change of the source.

    Attributes:
        place: what stands in the source, once.
        planted: what stands there instead; {} is true if this fault is wanted.
        found: in the message of the error.
        seeds: of the schedules that are tried.
        tokens: before the step; by default a program has more than two stages of them.
    """

    place: str
    planted: str
    found: str
    seeds: Sequence[int] = (0,)
    tokens: int = 1200


DIFFERENT, STUCK = "are not close", "nobody can go on"
EITHER = f"{DIFFERENT}|{STUCK}"
FAULTS = {
    "all launches mark their messages alike": Fault(
        "<< 8) + launch.site + 1;", "<< 8) * !{} + launch.site * !{} + 1;", EITHER
    ),
    "messages of a team that came before are taken": Fault(
        "is_there<3>(v[n], flag));", "is_there<3>(v[n], flag) || {});", EITHER, range(1, 9)
    ),
    "messages of a team come to another program's place": Fault(
        "region + (program * COUNT + threadIdx.x)", "region + ((program ^ {}) * COUNT + threadIdx.x)", DIFFERENT
    ),
    "the stream is read before the launch ahead has ended": Fault(
        "    grid_wait();\n    const u32 flag = flag_of(launch);\n    float total[EACH];\n    take_stream(",
        "    float total[EACH];\n    if ({}) take_stream(total, launch.x, launch.residual);\n    grid_wait();\n"
        "    const u32 flag = flag_of(launch);\n    if (!{}) take_stream(",
        DIFFERENT, range(1, 9),
    ),
    "state is read before it is there": Fault(
        "wait(here.state_full + stage * 8, parity, l", "if (!{}) wait(here.state_full + stage * 8, parity, l", EITHER,
        range(9),
    ),
    "a stage of state is overwritten": Fault(
        "wait(here.state_empty + stage * 8,", "if (!{}) wait(here.state_empty + stage * 8,",
        f"{EITHER}|one too many arrives", range(1, 9),
    ),
    "the new token is read before it is there": Fault(
        "wait(here.newest, 0, l", "if (!{}) wait(here.newest, 0, l", DIFFERENT
    ),
    "the new token counts in each program": Fault(
        "newest = end + (rank == SHARE - 1);", "newest = end + (rank == SHARE - 1 || {});", "in wait 8,"
    ),
    "the latent is not normed": Fault(
        "const float scale = rsqrtf(square / RANK + INNER_EPS);",
        "const float scale = {} ? 1.f : rsqrtf(square / RANK + INNER_EPS);", DIFFERENT,
    ),
    "the key is not rotated": Fault("if (lane < HALF) key[first] =", "if (lane < HALF && !{}) key[first] =", DIFFERENT),
    "the rotated key is written before it is rotated": Fault(
        "INTERLEAVED ? 2 * lane + 1 : HALF + lane;", "INTERLEAVED ? 2 * lane + 1 : {} ? lane : HALF + lane;", DIFFERENT
    ),
    "queries have another program's angles": Fault(
        "+ here.rank * PAIRS + tid;", "+ (here.rank ^ {}) * PAIRS + tid;", DIFFERENT
    ),
    "rows of a pair are not its own": Fault("pair + second * HALF);", "pair + second * (HALF - {}));", DIFFERENT),
    "rows of the latent are another program's": Fault(
        "STATE + program * LATENT_ROWS + i;", "STATE + (program ^ {}) * LATENT_ROWS + i;", DIFFERENT
    ),
    "queries go into latent space by another program's rows": Fault(
        "(here.rank * NOPE_ROWS + row) * RANK, bytes", "((here.rank ^ {}) * NOPE_ROWS + row) * RANK, bytes", DIFFERENT
    ),
    "values are another program's": Fault(
        "NOPE + here.rank * VALUE_ROWS + i", "NOPE + (here.rank ^ {}) * VALUE_ROWS + i", DIFFERENT
    ),
    "a token that is not there counts": Fault(
        "weight[t] = t < count ? power", "weight[t] = t < count || {} ? power", DIFFERENT, tokens=300
    ),
    "the last token of a program is left out": Fault(
        "end = MIN(begin + each, old), newest", "end = MIN(begin + each, old) - {}, newest", DIFFERENT, tokens=40
    ),
    "parts are merged as if their largest scores were equal": Fault(
        "power(__uint_as_float(part[0]) - top)", "power({} ? 0.f : __uint_as_float(part[0]) - top)", DIFFERENT
    ),
    "results are written before all have read the stream": Fault(
        "    STAMP(2);\n",
        "    STAMP(2);\n    if ({} && tid < OUT_ROWS) launch.x[program * OUT_ROWS + tid] = 0x7f00;\n",
        DIFFERENT, range(1, 9),
    ),
    "state goes to the next page": Fault(
        "(slot >> launch.page_bits) * launch.page +", "((slot >> launch.page_bits) + {}) * launch.page +", DIFFERENT
    ),
}  # fmt: skip


@pytest.fixture(scope="module")
def faulty(folder: Path) -> Models:
    """All faults are compiled together; a number says which one is there."""
    planted = {each.place: each.planted.replace("{}", f"FAULT({n})") for n, each in enumerate(FAULTS.values(), 1)}
    return Models(EmulatedDriver(folder, planted), SMALL, 1200, layers=2)


@pytest.mark.parametrize("number", range(len(FAULTS) + 1), ids=["none", *FAULTS])
def test_a_fault_is_found(faulty: Models, number: int) -> None:
    fault = [Fault("", "", ""), *FAULTS.values()][number]
    faulty.driver.planted, found = number, None
    for seed in fault.seeds:
        faulty.driver.schedule = Schedule(seed, room=132)
        try:
            again(faulty, fault.tokens)
        except (AssertionError, RuntimeError) as error:
            found = str(error)
            break
    assert (found is None) if number == 0 else re.search(fault.found, str(found)), found


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


def latent_call(
    config: LatentConfig = SMALL, hidden: int = 512, dtype: str = "bfloat16", state: str = "", absorb: str = "auto"
) -> OpCall:  # fmt: skip
    """The op call of a layer's attention, for one token."""
    build = Builder(dtype, 64, absorb=absorb)
    MixerLayer(build, "model.layers.3", hidden, config, MLPConfig(inner=64), 1e-6)
    static = dict(next(site.static for site in build.sites if site.op == "latent_attention_block"))
    for name in ("down", "kv_b", "o"):
        static[name].layout = PLAIN.layout
    slot: StateSlot = static["state"]
    slot.provider = Pages(16)
    if state:
        slot.spec = replace(slot.spec, tensors=tuple(replace(tensor, dtype=state) for tensor in slot.spec.tensors))
    return OpCall("latent_attention_block", static, Bucket(1, 1), HOPPER)


def refusal(call: OpCall, missing: str | None = None, off: str | None = None) -> str | None:
    return OneTokenLatent(hopper(), driver=NoDriver(missing), off=off).supports(call)


SPARSE = replace(SMALL, q_rank=256, index=IndexConfig(heads=2, head_dim=64, top=64))


@pytest.mark.parametrize("call, reason", [
    (latent_call(dtype="float16"), "computes in bfloat16, not in float16"),
    (latent_call(replace(SMALL, q_rank=256)), "projects queries at once"),
    (latent_call(SPARSE), "projects queries at once"),
    (latent_call(absorb="absorb"), "absorbs without precomputed products"),
    (latent_call(absorb="none"), "absorbs without precomputed products"),
    (latent_call(state="float8_e4m3fn"), "reads state in bfloat16"),
    (latent_call(replace(SMALL, heads=128)), "shares 128 programs out to (8, 16, 32) heads, not to 128"),
    (latent_call(replace(SMALL, rank=384)), "takes latents of (256, 512) and keys of (32, 64), not of 384 and 32"),
    (latent_call(replace(SMALL, rope_dim=16, rotary=RotaryConfig(16))), "not of 256 and 16"),
    (latent_call(replace(SMALL, nope_dim=40)), "16 programs cannot share 40 rows of a query and 32 of a value"),
    (latent_call(replace(SMALL, value_dim=48)), "cannot share 128 rows of a query and 48 of a value"),
    (latent_call(hidden=768), "hidden 768 and 8 values of 32 are not multiples of 512 and 256"),
    (replace(latent_call(), bucket=Bucket(2, 2)), "computes one token"),
    (replace(latent_call(), device=replace(HOPPER, variant="sm_100")), "its machine code is for sm_90, not sm_100"),
    (replace(latent_call(), device=capabilities((9, 0), 100, 232_448)), "needs 128 multiprocessors"),
    (replace(latent_call(), device=capabilities((9, 0), 132, 65_536)), "does not fit into a multiprocessor"),
])  # fmt: skip
def test_refuses_others_with_the_reason(call: OpCall, reason: str) -> None:
    assert reason in str(refusal(call))


def test_refuses_weights_that_are_stored_otherwise_and_machines_without_a_compiler() -> None:
    call = latent_call()
    assert refusal(call) is None and refusal(latent_call(LITE, 2048)) is None
    assert refusal(call, missing="there is no NVRTC") == "there is no NVRTC"
    assert refusal(call, off="is used with cuda.one_launch=all") == "is used with cuda.one_launch=all"
    call.static["o"].layout = "another"
    assert refusal(call) == "reads weights as plain numbers"


def test_the_user_may_leave_it_out() -> None:
    reasons = {}
    for option in ("small", "all"):
        kernels = evener_kernels(hopper(), {"one_launch": option})
        reasons[option] = [str(k.supports(latent_call())) for k in kernels if isinstance(k, OneTokenLatent)]
    assert reasons["small"] == ["is used with cuda.one_launch=all"] != reasons["all"]


@pytest.mark.parametrize("change, launches", [
    ({}, 1), ({"tokens": SHORT_LATENT_TOKENS}, 0), ({"tokens": SHORT_LATENT_TOKENS - 1}, 1), ({"bias": "down"}, 0),
    ({"bias": "o"}, 0),
], ids=str)  # fmt: skip
def test_biases_and_long_state_are_left_to_several_launches(
    two: Models, change: dict[str, Any], launches: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    kernel, asked = OneTokenLatent(hopper(), driver=NoDriver()), list[str]()
    monkeypatch.setattr(kernel._several, "build", lambda call: lambda *inputs: asked.append("several"))
    site = SimpleNamespace(run=lambda *inputs: asked.append("one"))
    monkeypatch.setattr(kernel, "site", lambda call: site)
    mixer: Any = two.tiny.build.slots[0]
    w = two.weights
    if "bias" in change:
        rows = {"down": w.down.shape[0], "o": 512}[change["bias"]]
        w = w._replace(**{f"{change['bias']}_bias": torch.zeros(rows).bfloat16()})
    step = StateStep(
        tokens=1, requests=1, max_query=1, max_kv=change.get("tokens", 5), query_start=torch.tensor([0, 1]).int(),
        kv_lens=torch.tensor([5]).int(), positions=torch.tensor([4]).int(), slot_mapping=torch.tensor([4]).int(),
        block_table=torch.zeros(1, 8).int(), host_query_lens=[1], host_kv_lens=[5],
        captured=True,
    )  # fmt: skip
    meta = mixer.provider.metadata(step, mixer.spec, mixer.attention, 16)
    x, residual = torch.zeros(1, 512).bfloat16(), torch.zeros(1, 512)
    kernel.build(latent_call())(x, residual, step.positions, w, mixer.views, meta)
    assert asked == (["one"] if launches else ["several"])


def test_steps_of_one_request_with_short_state_are_captured_apart() -> None:
    slot: StateSlot = latent_call().static["state"]
    provider = Pages(16)
    assert provider.capture_limits(slot.spec, slot.attention, 1) == (SHORT_LATENT_TOKENS,)
    assert provider.capture_limits(slot.spec, slot.attention, 2) == ()
    other: StateSlot = latent_call(state="float8_e4m3fn").static["state"]
    assert provider.capture_limits(other.spec, other.attention, 1) == ()
    assert LatentState(TUNING).capture_limits(slot.spec, slot.attention, 1) == ()


@pytest.mark.parametrize("name", ["norm", "down", "kv_norm", "heads", "o", "cos_sin"])
def test_weights_must_begin_where_copies_can(two: Models, name: str) -> None:
    value = getattr(two.weights, name)
    data: torch.Tensor = getattr(value, "data", value) if name in ("down", "o") else value
    moved = torch.zeros(data.numel() + 8, dtype=data.dtype)[1 : 1 + data.numel()].view(data.shape)
    w = two.weights._replace(**{name: replace(value, data=moved) if name in ("down", "o") else moved})
    site = two.kernel.site(latent_call())
    with pytest.raises(ValueError, match="does not begin at a multiple of 16 bytes"):
        site._bind(w, two.tiny.build.slots[0].views)


def test_the_workspace_has_room_for_messages() -> None:
    call, kernel = latent_call(), OneTokenLatent(hopper(), driver=NoDriver())
    sizes = LatentSizes(512, 8, 128, 32, 32, 256)
    assert kernel.workspace(call) == 8 * sizes.messages() + kernel._several.workspace(call)


def test_layers_of_one_size_are_compiled_alike() -> None:
    driver = NoDriver()
    kernel = OneTokenLatent(hopper(), driver=driver)
    sites = [kernel.site(latent_call(LITE, 2048)) for _ in range(2)]
    assert driver.compiled[0] == driver.compiled[1] and driver.compiled[0]["STAGES"] == 7
    assert len(kernel._loaded) == 1 and sites[0]._argument.site != sites[1]._argument.site
    assert sites[0]._argument.messages == sites[1]._argument.messages


def test_every_macro_of_the_source_is_given() -> None:
    """A name in capitals that nothing defines would be 0 in a condition of the preprocessor."""
    text = source()
    macros = defines(cast(LatentStatic, latent_call().static), 12, 12)
    given = {*macros, *re.findall(r"#define (\w+)", text), "STAMPS"}
    given |= set(re.findall(r"(?:int|,) ([A-Z]\w+)(?= =|,|>)", text))  # constants and parameters of templates
    code = re.sub(r"//.*|\"[^\"\n]*\"", "", text)
    used = set(re.findall(r"\b[A-Z][A-Z_]{2,}\b", code))
    assert used - given == set() and set(macros) - used == set()


def test_the_argument_is_laid_out_as_in_the_source() -> None:
    text = re.sub(r"//.*", "", re.findall(r"struct Latent {(.*?)};", source(), re.S)[0])
    assert re.findall(r"(\w+)\s*[,;]", text) == [field[0] for field in Latent._fields_]
    assert ctypes.sizeof(Latent) == 8 * 18 + 16
