"""The search of the largest logit gives the id that all logits would give. Its kernel's source runs on the host, with
all programs and threads of it."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from emulated import EmulatedDriver, Schedule, hopper

from evener.contracts.declared import LinearWeight, Slice, Span
from evener.contracts.ops import Bucket, Kernel, OpCall, OpFunction
from evener.contracts.quant import PackedWeight, QuantFormat, WeightPart, plain
from evener.ops.norms import any_norm
from evener.ops.reference import norm as reference_norm
from evener_backend_cuda import descriptor
from evener_backend_cuda.capability import capabilities
from evener_backend_cuda.compiled import Driver
from evener_backend_cuda.plugin import evener_kernels
from evener_backend_cuda.screened import GROUP, SCREENED, ScreenedMatrix, decoded, distance
from evener_backend_cuda.screened_head import CHANCE, Screen, ScreenedGreedy, ScreenedHead, ScreenedLinear

#: Few multiprocessors, so that a launch has nine programs.
UNITS = 3
HOPPER = capabilities((9, 0), UNITS, 232_448)
HOST = torch.device("cpu")


@pytest.fixture(autouse=True)
def tiny_tensors(one_thread: None) -> None:
    """Every test here runs on one thread."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("emulated")


def head(rows: int, columns: int, **changes: Any) -> LinearWeight:
    part = WeightPart("head", rows, columns, plain("bfloat16"))
    weight = LinearWeight("head", (part,), rows, columns, "bfloat16", out="float32")
    weight.layout = SCREENED.layout
    return replace(weight, **changes)


def greedy_call(
    rows: int, columns: int, weight: LinearWeight | None = None, device: Any = HOPPER, **changes: Any
) -> OpCall:
    """The call of one token."""
    static = {
        "hidden": columns, "dtype": "bfloat16", "eps": 1e-6, "offset": 0.0, "norm": "rms", "vocab": rows,
        "weight": weight or head(rows, columns), "logit_scale": 1.0, "cap": None, "communicator": None, **changes,
    }  # fmt: skip
    return OpCall("vocab_greedy", static, Bucket(1, 1), device, {"weight": SCREENED.layout})


def packed(values: torch.Tensor) -> PackedWeight:
    part = WeightPart("head", *values.shape, plain("bfloat16"), {"weight": values})
    return SCREENED.pack([part], "bfloat16", HOST)


class Head:
    """A head, its search, and all its logits."""

    def __init__(
        self, values: torch.Tensor, driver: EmulatedDriver, gain: torch.Tensor | None = None, offset: float = 0.0
    ) -> None:
        rows, columns = values.shape
        call = greedy_call(rows, columns, offset=offset)
        kernel = ScreenedGreedy(hopper(UNITS), driver)
        assert kernel.supports(call) is None
        self.values, self.weight, self.offset = values, packed(values), offset
        self.gain = torch.ones(columns) if gain is None else gain
        self.search = kernel.search(call)

    def found(self, x: torch.Tensor) -> int:
        return int(self.search(x, self.gain, self.weight.data))

    def logits(self, x: torch.Tensor) -> torch.Tensor:
        scale = torch.rsqrt(x.square().mean() + 1e-6)
        normed = (x * scale * (self.gain + self.offset)).bfloat16()
        return (normed.double() @ self.values.double().T)[0]


def numbers(*shape: int, seed: int = 0, scale: float = 1.0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)) * scale


def near_ties(rows: int, columns: int, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    """A head and x whose largest logits are closer to each other than codes can tell."""
    common = numbers(columns, seed=seed)
    values = (common + numbers(rows, columns, seed=seed + 1, scale=0.25)).bfloat16()
    return values, (common + numbers(columns, seed=seed + 2))[None]


@pytest.mark.parametrize("rows, columns, schedule", [
    pytest.param(8192, 128, Schedule(), id="one lane in eight has columns"),
    pytest.param(8201, 1024, Schedule(3), id="eight rows at a time"),
    pytest.param(8195, 1184, Schedule(), id="four rows at a time, the last group is short"),
    pytest.param(8193, 2176, Schedule(7, 9), id="two rows at a time", marks=pytest.mark.slow),
    pytest.param(8192, 4224, Schedule(), id="a row at a time", marks=pytest.mark.slow),
    pytest.param(8200, 8192, Schedule(2), id="eight steps", marks=pytest.mark.slow),
    pytest.param(8192, 8320, Schedule(), id="a row in two turns", marks=pytest.mark.slow),
])  # fmt: skip
def test_the_id_is_that_of_the_largest_logit(folder: Path, rows: int, columns: int, schedule: Schedule) -> None:
    driver = EmulatedDriver(folder)
    driver.schedule = schedule
    values, close = near_ties(rows, columns)
    near = Head(values, driver)
    far = Head(numbers(rows, columns, seed=9, scale=0.02).bfloat16(), driver, 1 + numbers(columns, scale=0.3))
    outliers = numbers(1, columns, seed=4)
    outliers[0, ::97] *= 40
    for asked, inputs in ((near, [close, 1e-3 * close]), (far, [numbers(1, columns, seed=3), outliers])):
        for x in inputs:
            assert asked.found(x) == int(asked.logits(x).argmax())
    assert len(driver.arguments) == 4, "each search is a launch"


def test_codes_alone_would_choose_another_id(folder: Path) -> None:
    """So the tests with near ties are about the comparison that follows."""
    values, x = near_ties(8201, 1024)
    asked, inputs = Head(values, EmulatedDriver(folder)), [x + numbers(1, 1024, seed=n) for n in range(6)]
    by_codes = [int((x @ decoded(asked.weight.data).T).argmax()) for x in inputs]
    exact = [int(asked.logits(x).argmax()) for x in inputs]
    assert [asked.found(x) for x in inputs] == exact != by_codes


def test_a_norm_may_have_an_offset(folder: Path) -> None:
    values, x = near_ties(8192, 128)
    asked = Head(values, EmulatedDriver(folder), numbers(128, seed=5, scale=0.4), offset=1.0)
    assert asked.found(x) == int(asked.logits(x).argmax())


@pytest.mark.parametrize("norm, offset, factor", [
    ("layer", 0.0, 0.0625), ("layer", 1.0, 1.0), ("biased_layer", 0.0, 2.0), ("bare_layer", 0.0, 1.0)])  # fmt: skip
def test_heads_behind_other_norms_and_with_a_factor_are_searched(
    folder: Path, norm: str, offset: float, factor: float
) -> None:
    rows, columns, driver = 8195, 160, EmulatedDriver(folder)
    values, x = near_ties(rows, columns)
    gain = numbers(2 * columns, seed=5, scale=0.1) + 1 - offset
    given = {"layer": gain[:columns], "biased_layer": gain, "bare_layer": None}[norm]
    call = greedy_call(rows, columns, norm=norm, offset=offset, logit_scale=factor)
    kernel = ScreenedGreedy(hopper(UNITS), driver)
    assert kernel.supports(call) is None and {"norm", "logit_scale"} <= kernel.non_default
    run, weight = kernel.build(call), packed(values)

    def layer_norm(op: str, /, **static: Any) -> OpFunction:
        return getattr(reference_norm, op)(static, layer_norm)  # type: ignore[no-any-return]

    normed = any_norm({**call.static, "dtype": "float32"}, layer_norm)
    for step in (x, -3 * x):
        logits = normed(step, given).bfloat16().double() @ values.double().T * factor
        assert run(step.clone(), given, weight, None).tolist() == [int(logits.argmax())]
    assert len(driver.arguments) == 2, "each search is a launch"
    assert kernel.workspace(call) >= 4 * rows
    # With a bias all logits are computed: the product gets what is normed.
    bias = numbers(rows, seed=6, scale=30.0).bfloat16()
    kernel._linear = Products()  # type: ignore[assignment]
    run = kernel.build(call)
    logits = normed(x, given).bfloat16().double() @ values.double().T + bias.double()
    assert run(x.clone(), given, weight, bias).tolist() == [int(logits.argmax())]
    assert len(driver.arguments) == 2


class Products:
    """The kernel of products, in torch."""

    def build(self, call: OpCall) -> OpFunction:
        assert call.op == "linear" and call.static["out"] == "float32"
        return lambda x, weight, bias: x.float() @ weight.data.values.float().T + bias.float()


def test_of_equal_logits_the_lowest_id_wins(folder: Path) -> None:
    values = numbers(8192, 128, scale=0.02).bfloat16()
    best = values[5000].clone()
    for row in (8191, 777, 4000):
        values[row] = best * 4
    driver = EmulatedDriver(folder)
    assert Head(values, driver).found(best.float()[None]) == 777
    assert Head(torch.full((8192, 128), 0.5).bfloat16(), driver).found(torch.ones(1, 128)) == 0


def test_x_that_is_zero_or_no_number_gives_an_id_of_the_vocabulary(folder: Path) -> None:
    asked = Head(numbers(8192, 128).bfloat16(), EmulatedDriver(folder))
    for value in (0.0, math.nan, math.inf):
        assert asked.found(torch.full((1, 128), value)) == 0
    x = numbers(1, 128)
    assert asked.found(x) == int(asked.logits(x).argmax()), "what one launch found is not left for the next"


def test_launches_of_a_graph_follow_each_other(folder: Path) -> None:
    driver = EmulatedDriver(folder)
    driver.schedule = Schedule(seed=11)
    values, _ = near_ties(8201, 1024)
    asked = Head(values, driver)
    inputs = [numbers(1, 1024, seed=n) + near_ties(8201, 1024)[1] for n in range(3)]
    with driver.graph():
        found = [asked.search(x, asked.gain, asked.weight.data) for x in inputs]
    assert [int(each) for each in found] == [int(asked.logits(x).argmax()) for x in inputs]


#: Places of the source, with what stands there while a fault is planted.
FAULTS = {
    "sum + DISTANCE * sqrtf(square)": "sum + (FAULT(1) ? 0.f : DISTANCE) * sqrtf(square)",
    "(float)(upper * 256 + lower)": "(float)((FAULT(2) ? 0 : upper * 256) + lower)",
    "key_of(logit[0] - mean.x)": "key_of(logit[0] - (FAULT(3) ? -mean.x : mean.x))",
    "make_float4(factor, factor * total": "make_float4(factor, factor * total * (FAULT(4) ? 0.93f : 1.f)",
    "sums[0] = value_of(": "sums[0] = FAULT(5) ? __uint_as_float(0x7f800000u) : value_of(",
    "key = its > key ? its : key;": "key = its > key != FAULT(6) ? its : key;",
    "if (key) atomicMax(launch.found, key);": "if (key && !FAULT(7)) atomicMax(launch.found, key);",
    "atomicExch(launch.found + 1, (u64)0);": "if (!FAULT(8)) atomicExch(launch.found + 1, (u64)0);",
    "scale = widen(scales[r][j])": "scale = widen(scales[FAULT(9) ? 0 : r][j])",
}  # fmt: skip


@pytest.fixture(scope="module")
def faulty(folder: Path) -> tuple[EmulatedDriver, list[Head]]:
    driver = EmulatedDriver(folder, FAULTS)
    values, _ = near_ties(8201, 1024)
    # Neighbouring rows of very different sizes, with logits that are mostly below zero.
    sizes = torch.rand(8201, 1, generator=torch.Generator().manual_seed(1)) * 0.02
    uneven = numbers(8201, 1024, seed=8) * sizes - 0.05
    return driver, [Head(values, driver), Head(uneven.bfloat16(), driver)]


def wrong_ids(asked: Head, seed: int) -> int:
    """Searches in which another id is found. The first has a larger logit than those that follow."""
    common, noise = near_ties(8201, 1024)[1], numbers(4, 1024, seed=seed)
    aligned = asked.values[17].float() - asked.values.float().mean(0)
    inputs = [aligned[None], noise[:1], noise[1:2] + common, noise[2:3] / 3 - 1, noise[3:] / 3 + 1]
    return sum(asked.found(x) != int(asked.logits(x).argmax()) for x in inputs)


@pytest.mark.parametrize("number", range(len(FAULTS) + 1))
def test_a_planted_fault_gives_other_ids(faulty: tuple[EmulatedDriver, list[Head]], number: int) -> None:
    driver, heads = faulty
    driver.planted = number
    try:
        assert bool(sum(wrong_ids(asked, 20) for asked in heads)) == bool(number)
    finally:
        driver.planted = 0
        for asked in heads:
            assert asked.search.found is not None
            asked.search.found.zero_()  # where a fault left something


def test_codes_are_right_on_average_and_never_further_off_than_half_a_scale() -> None:
    values = (numbers(4096, 256, scale=0.02) + numbers(256, seed=1)).bfloat16()
    matrix = packed(values).data
    error = (decoded(matrix) - values.float()).view(4096, -1, GROUP) / matrix.scales.float()[..., None]
    assert float(error.abs().max()) < 0.5001
    assert abs(float(error.mean())) < 5 * math.sqrt(1 / 12 / error.numel())
    assert float(error.square().mean()) == pytest.approx(1 / 12, rel=0.02), "evenly distributed"
    assert all(torch.equal(a, b) for a, b in zip(matrix, packed(values.clone()).data, strict=True))


def test_rows_of_equal_numbers_have_codes_too() -> None:
    values = torch.zeros(300, 256).bfloat16()
    values[7] = 1.0
    again = decoded(packed(values).data)
    assert torch.isfinite(again).all() and float((again - values.float()).abs().max()) < 0.2


def test_no_logit_is_further_above_its_codes_than_the_distance() -> None:
    """And some get close, so that the distance is not much too large."""
    values = (numbers(8192, 256, scale=0.02) + numbers(256, seed=1, scale=0.1)).bfloat16()
    matrix = packed(values).data
    x = numbers(64, 256, seed=2)
    above = x @ (values.float() - decoded(matrix)).T
    squares = x.view(64, -1, GROUP).square().sum(2) @ matrix.scales.float().square().T
    apart, rounding = distance(256, CHANCE)
    assert 1 < float((above / squares.sqrt()).max()) < apart < 2.4
    assert 0 < rounding < 1e-4
    assert distance(256, 1e-9)[0] < apart


@pytest.mark.parametrize(
    "columns, reason", [(128, None), (1024, None), (96, None), (200, "multiples of 32 columns, not 200")]
)
def test_the_packing_holds_whole_groups_and_says_how_much(columns: int, reason: str | None) -> None:
    part = WeightPart("head", 64, columns, plain("bfloat16"), {"weight": numbers(64, columns).bfloat16()})
    refused = SCREENED.supports([replace(part, tensors={})], "bfloat16")
    assert (refused is None) if reason is None else (reason in str(refused))
    if reason is None:
        made = SCREENED.pack([part], "bfloat16", HOST)
        assert made.nbytes == SCREENED.nbytes([part], "bfloat16") == sum(t.nbytes for t in made.data)
        saved = SCREENED.saved(made)
        again = SCREENED.restored([t.clone() for t in saved], [part], 0, "bfloat16", HOST)
        assert all(torch.equal(a, b) for a, b in zip(made.data, again.data, strict=True)) and again.shape == made.shape
        with pytest.raises(ValueError, match=r"cuda\.screened holds"):
            SCREENED.restored(list(saved[:3]), [part], 0, "bfloat16", HOST)


def test_the_weight_itself_is_not_copied_if_its_address_is_whole() -> None:
    values = numbers(64, 128).bfloat16()
    assert packed(values).data.values.data_ptr() == values.data_ptr(), "an embedding that is tied to it is the same"
    shifted = torch.cat((values.flatten()[:1], values.flatten()))[1:].view(64, 128)
    assert shifted.data_ptr() % 16 and packed(shifted).data.values.data_ptr() % 16 == 0


def test_inputs_may_begin_anywhere(folder: Path) -> None:
    asked = Head(numbers(8192, 128).bfloat16(), EmulatedDriver(folder))
    x = numbers(1, 129)[:, 1:]
    asked.gain = torch.ones(129)[1:]
    assert x.data_ptr() % 16 and asked.found(x) == int(asked.logits(x).argmax())


def refusal(call: OpCall, missing: str | None = None, off: str | None = None) -> str | None:
    class NoCompiler(Driver):
        def refusal(self) -> str | None:
            return missing

    return ScreenedGreedy(hopper(UNITS), NoCompiler(), off).supports(call)


CUT = (Slice(0, Span(0, 9000, 18_000)),)
STORED_PART = WeightPart("head", 9000, 1024, QuantFormat("float8_e4m3fn", 128, 128, scale="float32"))


@pytest.mark.parametrize("call, reason", [
    (replace(greedy_call(9000, 1024), bucket=Bucket(1, 2)), "computes one token"),
    (greedy_call(9000, 1024, cap=30.0), "no soft cap"),
    (greedy_call(9000, 1024, logit_scale=3.0), "factors that are powers of two"),
    (greedy_call(9000, 1024, logit_scale=-0.5), "factors that are powers of two"),
    (greedy_call(9000, 1024, logit_scale=0.0), "factors that are powers of two"),
    (greedy_call(9000, 1024, head(9000, 1024, out=None)), "is for heads that one rank has"),
    (greedy_call(9000, 1024, head(9000, 1024, slices=CUT)), "is for heads that one rank has"),
    (greedy_call(8000, 1024), "is for 8192 rows or more of up to 16384 columns, not 8000 x 1024"),
    (greedy_call(9000, 16512), "not 9000 x 16512"),
    (greedy_call(9000, 1000), "holds multiples of 32 columns, not 1000"),
    (greedy_call(9000, 1024, head(9000, 1024, dtype="float16")), "holds bfloat16, not float16"),
    (greedy_call(9000, 1024, head(9000, 1024, parts=(STORED_PART,))), "stored as float8_e4m3fn"),
    (greedy_call(9000, 1024, device=replace(HOPPER, variant="sm_100")), "its machine code is for sm_90, not sm_100"),
    (greedy_call(200_000, 16384), "bytes of shared memory of a multiprocessor, not 233472"),
])  # fmt: skip
def test_refuses_others_with_the_reason(call: OpCall, reason: str) -> None:
    assert reason in str(refusal(call))


def test_it_needs_a_compiler_and_the_users_consent() -> None:
    call = greedy_call(9000, 1024)
    assert refusal(call) is None
    assert refusal(call, missing="there is no NVRTC") == "there is no NVRTC"
    kinds = ScreenedGreedy, ScreenedHead, ScreenedLinear
    for wanted in (True, False):
        kernels = [k for k in evener_kernels(hopper(UNITS), {"screened_head": wanted}) if isinstance(k, kinds)]
        assert [k.op for k in kernels] == ["vocab_greedy", "head", "linear"]
        calls = [
            replace(call, op=k.op, static={**call.static, "rows": 9000, "columns": 1024, "out": "float32"})
            for k in kernels
        ]
        reasons = {str(k.supports(each)) for k, each in zip(kernels, calls, strict=True)}
        assert (reasons == {"is used with cuda.screened_head=true"}) == (not wanted)
    assert descriptor.options["screened_head"].default is True


class Recorded(Kernel):
    """Keeps what it is asked."""

    op, name = "head", "recorded"

    def __init__(self, reason: str | None = None) -> None:
        self.reason, self.calls, self.inputs = reason, list[OpCall](), list[tuple[Any, ...]]()

    def supports(self, call: OpCall) -> str | None:
        self.calls.append(call)
        return self.reason

    def workspace(self, call: OpCall) -> int:
        return 77

    def build(self, call: OpCall) -> OpFunction:
        self.calls.append(call)

        def run(*inputs: Any) -> torch.Tensor:
            self.inputs.append(inputs)
            return torch.tensor([[0.0, 3.0, 1.0]])

        return run


def test_other_uses_of_the_head_read_the_weight_as_it_is() -> None:
    values = numbers(9000, 128).bfloat16()
    given, call = packed(values), replace(greedy_call(9000, 128), op="head", bucket=Bucket(5, 8))
    slow, fast = Recorded("is slow"), Recorded()
    kernel = ScreenedHead(hopper(UNITS))
    kernel._inner = slow, fast
    assert kernel.supports(call) is None and kernel.workspace(call) == 77
    kernel.build(call)("x", "norm", given, None)
    (x, norm, weight, bias), asked = fast.inputs[0], fast.calls[-1]
    assert (x, norm, bias) == ("x", "norm", None) and weight.layout == "plain" and weight.data is values
    assert asked.static["weight"].layout == asked.layouts["weight"] == "plain" and asked.bucket == Bucket(5, 8)
    fast.reason = "is away"
    assert kernel.supports(call) == "is slow; is away"
    assert call.static["weight"].layout == SCREENED.layout, "the declaration is not changed"


def test_a_head_with_a_bias_computes_all_logits(folder: Path) -> None:
    driver, inner = EmulatedDriver(folder), Recorded()
    kernel = ScreenedGreedy(hopper(UNITS), driver)
    kernel._head._inner = (inner,)
    call = greedy_call(8192, 128)
    run = kernel.build(call)
    bias = torch.zeros(8192).bfloat16()
    assert run(torch.ones(1, 128), torch.ones(128), packed(numbers(8192, 128).bfloat16()), bias).tolist() == [1]
    assert inner.inputs[0][3] is bias and not driver.arguments


def test_the_structure_of_the_argument_is_that_of_the_source() -> None:
    assert [name for name, _ in Screen._fields_] == [
        "x", "norm", "dither", "values", "mean", "codes", "scales", "found", "id", "report"
    ]  # fmt: skip
    assert isinstance(packed(numbers(8, 128).bfloat16()).data, ScreenedMatrix)
