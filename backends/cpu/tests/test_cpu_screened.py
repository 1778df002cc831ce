"""The search of the largest logit gives the id that all logits would give."""

from __future__ import annotations

import ctypes
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from screened_source import SearchLibrary

from evener.backend.native_code import Unavailable
from evener.contracts.declared import LinearWeight, Slice, Span
from evener.contracts.ops import Bucket, OpCall
from evener.contracts.quant import PackedWeight, QuantFormat, WeightPart, plain
from evener.ops.composites import head as reference_head
from evener.ops.reference import norm as reference_norm
from evener_backend_cpu import descriptor, isa
from evener_backend_cpu.device import CpuDevice
from evener_backend_cpu.layer_norm import LayerNorm
from evener_backend_cpu.levels import LEVELS
from evener_backend_cpu.native_library import Native
from evener_backend_cpu.plugin import evener_kernels
from evener_backend_cpu.screened import ScreenedMatrix, certainty, decoded
from evener_backend_cpu.screened_head import CHANCE, FEW, LEAST_ROWS, Patience, ScreenedGreedy, ScreenedLinear

CPU = torch.device("cpu")
EPS = 1e-6


def head(rows: int, columns: int, **changes: Any) -> LinearWeight:
    part = WeightPart("head", rows, columns, plain("bfloat16"))
    weight = LinearWeight("head", (part,), rows, columns, "bfloat16", out="float32")
    weight.layout = "cpu.screened"
    return replace(weight, **changes)


def greedy_call(
    device: CpuDevice, rows: int, columns: int, weight: LinearWeight | None = None, **changes: Any
) -> OpCall:
    """The call of one token."""
    static = {
        "hidden": columns, "dtype": "bfloat16", "eps": EPS, "offset": 0.0, "norm": "rms", "vocab": rows,
        "weight": weight or head(rows, columns), "logit_scale": 1.0, "cap": None, "communicator": None, **changes,
    }  # fmt: skip
    return OpCall("vocab_greedy", static, Bucket(1, 1), device.capabilities, {"weight": "cpu.screened"})


def packed(device: CpuDevice, values: torch.Tensor) -> PackedWeight:
    part = WeightPart("head", *values.shape, plain("bfloat16"), {"weight": values})
    return device.screened.pack([part], "bfloat16", CPU)


def numbers(*shape: int, seed: int = 0, scale: float = 1.0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)) * scale


def near_ties(rows: int, columns: int, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    """A head and x whose largest logits are closer to each other than codes can tell."""
    common = numbers(columns, seed=seed)
    values = (common + numbers(rows, columns, seed=seed + 1, scale=0.25)).bfloat16()
    return values, (common + numbers(columns, seed=seed + 2))[None]


class Head:
    """A head, its search, and all its logits.

    Args:
        library: what has the search; None: the device's kernels.
    """

    def __init__(
        self, device: CpuDevice, values: torch.Tensor, library: Any = None, gain: torch.Tensor | None = None,
        offset: float = 0.0,
    ) -> None:  # fmt: skip
        columns = values.shape[1]
        self.values, self.weight, self.offset, self.threads = values, packed(device, values), offset, device.threads
        self.matrix: ScreenedMatrix = self.weight.data
        self.gain = torch.ones(columns) if gain is None else gain
        self._library, self._device = library or device.native, device
        if library:
            self._library.code_rows(ctypes.addressof(self.matrix.struct), None, 2)
        self.candidates = 0
        #: Factor and soft cap.
        self.shaping = 1.0, 0.0

    def found(self, x: torch.Tensor, few: int | None = None, bias: torch.Tensor | None = None) -> int:
        """The id; ``few``: see ``largest`` of screened.h, default: any number of candidates."""
        best, candidates = torch.full((1,), -7, dtype=torch.int32), ctypes.c_int64()
        result = self._library.largest(
            ctypes.addressof(self.matrix.struct), x.data_ptr(), self.gain.data_ptr(),
            None if bias is None else bias.data_ptr(), EPS, self.offset, certainty(CHANCE),
            len(self.values) if few is None else few, best.data_ptr(), ctypes.addressof(candidates), self.threads,
            *self.shaping,
        )  # fmt: skip
        assert result == 0
        self.candidates = candidates.value
        return int(best)

    def logits(self, x: torch.Tensor) -> torch.Tensor:
        """As the head computes them: by the kernels of the norm and of the product."""
        scale = torch.rsqrt(x.square().mean() + EPS)
        normed = (x * scale * (self.gain + self.offset)).bfloat16()
        call = greedy_call(self._device, *self.values.shape)
        static = {"rows": self.values.shape[0], "columns": self.values.shape[1], "dtype": "bfloat16", "out": "float32"}
        linear = ScreenedLinear(self._device).build(replace(call, op="linear", static={**call.static, **static}))
        return linear(normed, self.weight)[0]  # type: ignore[no-any-return]


@pytest.mark.parametrize("rows, columns", [
    pytest.param(8192, 64, id="half a vector of codes"),
    pytest.param(8201, 576, id="an end that is half a vector, and rows that are no multiple of four"),
    pytest.param(8195, 896, id="whole vectors"),
    pytest.param(8200, 4160, id="many columns", marks=pytest.mark.slow),
])  # fmt: skip
@pytest.mark.parametrize("threads", [1, 3])
def test_the_id_is_that_of_the_largest_logit(device: CpuDevice, rows: int, columns: int, threads: int) -> None:
    values, close = near_ties(rows, columns)
    near = Head(device, values)
    far = Head(device, numbers(rows, columns, seed=9, scale=0.02).bfloat16(), gain=1 + numbers(columns, scale=0.3))
    outliers = numbers(1, columns, seed=4)
    outliers[0, ::97] *= 40
    for asked, inputs in ((near, [close, 1e-3 * close]), (far, [numbers(1, columns, seed=3), outliers])):
        asked.threads = threads
        for x in inputs:
            assert asked.found(x) == int(asked.logits(x).argmax())
            assert 0 < asked.candidates < rows


def test_codes_alone_would_choose_another_id(device: CpuDevice) -> None:
    """So the tests with near ties are about the comparison that follows."""
    values, x = near_ties(8201, 1024)
    asked, inputs = Head(device, values), [x + numbers(1, 1024, seed=n) for n in range(40)]
    about = decoded(asked.matrix)
    by_codes = [int((x @ about.T).argmax()) for x in inputs]
    exact = [int(asked.logits(x).argmax()) for x in inputs]
    assert [asked.found(x) for x in inputs] == exact != by_codes


def test_a_norm_may_have_an_offset(device: CpuDevice) -> None:
    values, x = near_ties(8192, 128)
    asked = Head(device, values, gain=numbers(128, seed=5, scale=0.4), offset=1.0)
    assert asked.found(x) == int(asked.logits(x).argmax())


def test_of_equal_logits_the_lowest_id_wins(device: CpuDevice) -> None:
    values = numbers(8192, 128, scale=0.02).bfloat16()
    best = values[5000].clone()
    for row in (8191, 777, 4000):
        values[row] = best * 4
    asked = Head(device, values)
    for threads in (1, 2, 3):
        asked.threads = threads
        assert asked.found(best.float()[None]) == 777
    assert Head(device, torch.full((8192, 128), 0.5).bfloat16()).found(torch.ones(1, 128)) == 0


def test_x_that_is_zero_or_no_number_gives_the_id_of_all_logits(device: CpuDevice) -> None:
    asked = Head(device, numbers(8192, 128).bfloat16())
    for value in (0.0, math.nan, math.inf, 1e-42):
        assert asked.found(torch.full((1, 128), value)) == 0 and asked.candidates == -1
    one = numbers(1, 128)
    one[0, 3] = math.inf
    assert asked.found(one) == 0
    x = numbers(1, 128)
    assert asked.found(x) == int(asked.logits(x).argmax())


def test_logits_that_overflow_are_all_computed(device: CpuDevice) -> None:
    values = numbers(8192, 128, scale=1e38).clamp(-3e38, 3e38).bfloat16()
    asked = Head(device, values)
    x = numbers(1, 128)
    logits = asked.logits(x)
    assert bool(logits.isinf().any()) and asked.found(x) == int(logits.nan_to_num(-math.inf, math.inf).argmax())


def test_a_row_whose_numbers_are_too_large_for_a_scale_is_compared(device: CpuDevice) -> None:
    values, x = numbers(8201, 128, scale=0.02).bfloat16(), numbers(1, 128)
    values[4101] = 0
    values[4101, 7] = 3e38
    x[0, 7] = 1e-35
    asked = Head(device, values)
    assert asked.found(x) == 4101 == int(asked.logits(x).argmax()) and asked.candidates > 0


def test_with_too_many_candidates_all_logits_are_computed(device: CpuDevice) -> None:
    values, x = near_ties(8201, 576)
    asked = Head(device, values)
    want = int(asked.logits(x).argmax())
    for few in (len(values), 100, 0, -1):
        assert asked.found(x, few) == want
        assert few == len(values) or asked.candidates > few or asked.candidates == few == -1
    bias = torch.zeros(8201)
    bias[4321] = 1e4
    assert asked.found(x, bias=bias.bfloat16()) == 4321 and asked.candidates == -1


#: Places of the source, with what stands there while a fault is planted.
FAULTS = {
    "bound = about + scale * a.apart": "bound = about + scale * (FAULT(1) ? 0.f : a.apart)",
    "(double)y * (CODE_REACH + s.dither[k])": "(double)y * (CODE_REACH + (FAULT(2) ? 0 : s.dither[k]))",
    "shaping.alike(known) - a.mean;": "shaping.alike(known) - (FAULT(3) ? -a.mean : a.mean);",
    "const float y = wide(x[k]) * s.spread[k];": "const float y = wide(x[k]) * (FAULT(4) ? 1.f : s.spread[k]);",
    "known = bests[t].known > known ? bests[t].known : known": "known = FAULT(5) ? INFINITY : bests[t].known",
    "other == value && (id < 0 || its < id)": "other == value && (id < 0 || (its < id) != FAULT(6))",
    "      ready = have, have = 0, now = 1 - now;": "      ready = FAULT(7) ? 0 : have, have = 0, now = 1 - now;",
    "memcpy(&scale, s.scales + r, some": "memcpy(&scale, s.scales + (FAULT(8) ? r / 16 : r), some",
    "memcpy(bounds + r, &bound": "memcpy(bounds + (FAULT(9) ? r / 2 : r), &bound",
    "ids[i] * K, K * sizeof(bf16)": "ids[FAULT(10) ? 0 : i] * K, K * sizeof(bf16)",
}  # fmt: skip


@pytest.fixture(scope="module")
def faulty(device: CpuDevice, tmp_path_factory: pytest.TempPathFactory) -> tuple[SearchLibrary, list[Head]]:
    library = SearchLibrary(tmp_path_factory.mktemp("faulty"), None, FAULTS)
    values, _ = near_ties(8201, 576)
    # Neighbouring rows of very different sizes, with logits that are mostly below zero.
    sizes = torch.rand(8201, 1, generator=torch.Generator().manual_seed(1)) * 0.02
    uneven = (numbers(8201, 576, seed=8) * sizes - 0.05).bfloat16()
    twice = torch.cat((uneven[:4100], uneven[:4101]))
    return library, [Head(device, each, library) for each in (values, uneven, twice)]


def wrong_ids(asked: Head, seed: int) -> int:
    """Searches in which another id is found."""
    common, noise, wrong = near_ties(8201, 576)[1], numbers(4, 576, seed=seed), 0
    aligned, dither = asked.values[17].float() - asked.values.float().mean(0), asked.matrix.columns[2:]
    for x in (aligned[None], noise[:1], noise[1:2] + common, noise[2:3] / 3 - 1, noise[3:] / 3 + 1, dither, -dither):
        for asked.threads in (1, 3):
            wrong += asked.found(x.contiguous(), len(asked.values) // 2) != int(asked.logits(x).argmax())
    return wrong


@pytest.mark.parametrize("number", range(len(FAULTS) + 1))
def test_a_planted_fault_gives_other_ids(faulty: tuple[SearchLibrary, list[Head]], number: int) -> None:
    library, heads = faulty
    library.plant(number)
    try:
        assert bool(sum(wrong_ids(asked, 20) for asked in heads)) == bool(number)
    finally:
        library.plant(0)


#: Those that this machine can run, and what is compiled for processors that have none of them.
RUNNABLE = [
    *(pytest.param(each, (), id=each.name) for each in LEVELS if each.needs <= isa.read().words | isa.read().slower),
    pytest.param(None, ("-DEVENER_PORTABLE",), id="portable"),
]


@pytest.mark.slow
@pytest.mark.parametrize("level, flags", RUNNABLE)
def test_each_level_makes_the_same_codes_and_finds_the_same_ids(
    device: CpuDevice, tmp_path: Path, level: Any, flags: tuple[str, ...]
) -> None:
    library = SearchLibrary(tmp_path, level, None, *flags)
    for rows, columns in ((8201, 576), (8195, 896)):
        values, x = near_ties(rows, columns)
        asked, here = Head(device, values, library), Head(device, values)
        apart = (asked.matrix.codes != here.matrix.codes).float().mean()
        assert float(apart) < 1e-4, "sums of columns may be rounded otherwise, and no more"
        for other in [x + numbers(1, columns, seed=n) for n in range(6)]:
            # Logits of two levels are rounded otherwise, so that the best of near ties may be another one.
            logits = here.logits(other)
            assert float(logits.max() - logits[asked.found(other)]) < 1e-3
            assert 0 < asked.candidates < rows / 2


def test_codes_are_right_on_average_and_never_further_off_than_half_a_scale(device: CpuDevice) -> None:
    values = (numbers(4096, 256, scale=0.02) + numbers(256, seed=1)).bfloat16()
    matrix: ScreenedMatrix = packed(device, values).data
    error = (decoded(matrix) - values.float()) / (matrix.scales[:, None] * matrix.columns[1])
    assert float(error.abs().max()) < 0.5001
    assert abs(float(error.mean())) < 5 * math.sqrt(1 / 12 / error.numel())
    assert abs(float(error.square().mean()) - 1 / 12) < 1e-3, "it is spread evenly"
    again: ScreenedMatrix = packed(device, values.clone()).data
    assert all(torch.equal(a, b) for a, b in zip(matrix[:4], again[:4], strict=True))
    assert float(matrix.columns[2].abs().max()) <= 0.5 and abs(float(matrix.columns[2].mean())) < 0.1


def test_rows_of_equal_numbers_have_codes_too(device: CpuDevice) -> None:
    values = torch.zeros(300, 256).bfloat16()
    assert float(decoded(packed(device, values).data).abs().max()) < 1e-30
    values[7] = 1.0
    again = decoded(packed(device, values).data)
    assert torch.isfinite(again).all() and float((again - values.float()).abs().max()) < 0.2


def test_no_logit_is_further_above_its_codes_than_the_distance(device: CpuDevice) -> None:
    """And some get close, so that the distance is not much too large."""
    values = (numbers(8192, 256, scale=0.02) + numbers(256, seed=1, scale=0.1)).bfloat16()
    matrix: ScreenedMatrix = packed(device, values).data
    x = numbers(64, 256, seed=2)
    above = (x @ (values.float() - decoded(matrix)).T) / matrix.scales
    apart = (above / (x * matrix.columns[1]).square().sum(1).sqrt()[:, None]).max()
    assert 1.2 < float(apart) < certainty(CHANCE) < 2.2
    assert certainty(1e-9) < certainty(CHANCE)


@pytest.mark.parametrize("huge", ["auto", "off"])
def test_the_packing_says_how_much_it_takes_and_saves_the_matrix_alone(huge: str) -> None:
    device = CpuDevice(0, {"huge_pages": huge})
    values = numbers(64, 128).bfloat16()
    part = WeightPart("head", 64, 128, plain("bfloat16"), {"weight": values})
    made, bare = device.screened.pack([part], "bfloat16", CPU), replace(part, tensors={})
    wanted = 64 * (256 + 64 + 4) + 12 * 128
    assert made.nbytes == device.screened.nbytes([part], "bfloat16") == made.data.nbytes == wanted
    assert torch.equal(made.data.values, values) and made.shape == (64, 128)
    saved = device.screened.saved(made)
    assert saved is not None and len(saved) == 1
    again = device.screened.restored([saved[0].clone()], [bare], 0, "bfloat16", CPU)
    assert all(torch.equal(a, b) for a, b in zip(made.data[:4], again.data[:4], strict=True))
    with pytest.raises(ValueError, match="plain packing holds"):
        device.screened.restored([values.float()], [bare], 0, "bfloat16", CPU)
    with pytest.raises(ValueError, match="one matrix, not 3"):
        device.screened.restored([values], [bare], 3, "bfloat16", CPU)


def test_parts_become_one_matrix(device: CpuDevice) -> None:
    values = numbers(192, 64).bfloat16()
    parts = [WeightPart("h", len(v), 64, plain("bfloat16"), {"weight": v}) for v in values.split((128, 64))]
    made = device.screened.pack(parts, "bfloat16", CPU)
    assert torch.equal(made.data.values, values) and torch.equal(made.data.codes, packed(device, values).data.codes)


def test_without_huge_pages_the_weight_itself_is_not_copied() -> None:
    device, values = CpuDevice(0, {"huge_pages": "off"}), numbers(64, 128).bfloat16()
    assert packed(device, values).data.values.data_ptr() == values.data_ptr(), "it stays mapped from its file"
    part = WeightPart("head", 64, 128, plain("bfloat16"))
    assert device.screened.keeps_storage([part]) and not device.screened.keeps_storage([part, part])


CUT = (Slice(0, Span(0, 9000, 18_000)),)
STORED_PART = WeightPart("head", 9000, 1024, QuantFormat("float8_e4m3fn", 128, 128, scale="float32"))


@pytest.mark.parametrize("rows, columns, weight, changes, reason", [
    (9000, 1024, None, {"cap": -30.0}, "no negative soft cap"),
    (9000, 1024, None, {"logit_scale": -0.5}, "factors above 0"),
    (9000, 1024, None, {"cap": 30.0, "logit_scale": 0.3, "norm": "layer"}, "None"),
    (9000, 1024, {"out": None}, {}, "is for heads that one rank has"),
    (9000, 1024, {"slices": CUT}, {}, "is for heads that one rank has"),
    (8000, 1024, None, {}, "is for 8192 rows or more, not 8000"),
    (9000, 16448, None, {}, "multiples of 64 columns up to 16384, not 16448"),
    (9000, 1000, None, {}, "multiples of 64 columns up to 16384, not 1000"),
    (9000, 1024, {"dtype": "float32"}, {}, "holds bfloat16, not float32"),
    (9000, 1024, {"parts": (STORED_PART,)}, {}, "stored as float8_e4m3fn"),
    (9000, 1024, None, {}, "None"),
])  # fmt: skip
def test_refuses_others_with_the_reason(
    device: CpuDevice, rows: int, columns: int, weight: dict[str, Any] | None, changes: dict[str, Any], reason: str
) -> None:
    call = greedy_call(device, rows, columns, head(rows, columns, **(weight or {})), **changes)
    assert reason in str(ScreenedGreedy(device).supports(call))


def test_refuses_several_tokens_other_processors_and_no_kernels(device: CpuDevice) -> None:
    call = greedy_call(device, 9000, 1024)
    assert "one token" in str(ScreenedGreedy(device).supports(replace(call, bucket=Bucket(1, 2))))
    other = replace(call, device=replace(device.capabilities, features=frozenset({"asimd"})))
    assert "AVX2" in str(ScreenedGreedy(device).supports(other))
    none = CpuDevice(0, {"native": "off"})
    assert isinstance(none.native, Unavailable) and ScreenedGreedy(none).supports(call) == "cpu.native=off"
    assert none.screened.supports(head(9000, 1024).parts, "bfloat16") == "cpu.native=off"


def test_the_user_may_leave_it_out() -> None:
    for wanted in (True, False):
        device = CpuDevice(0, {"screened_head": wanted})
        kinds = ScreenedGreedy, ScreenedLinear
        kernels = [k for k in evener_kernels(device, {}) if isinstance(k, kinds)]
        call, static = greedy_call(device, 9000, 1024), {"rows": 9000, "columns": 1024, "out": "float32"}
        calls = [replace(call, op=k.op, static={**call.static, **static}) for k in kernels]
        reasons = {k.supports(each) for k, each in zip(kernels, calls, strict=True)}
        assert reasons == ({None} if wanted else {"is used with cpu.screened_head=true"})
        assert [k.op for k in kernels] == ["vocab_greedy", "linear"]
    assert descriptor.options["screened_head"].default is True


def test_a_step_is_a_search_unless_the_last_ones_had_too_many_candidates() -> None:
    patience, tried = Patience(), []
    for step in range(40):
        if patience.tries():
            tried.append(step)
            patience.note(helped=False)
    assert tried == [0, 2, 5, 10, 19, 36], "further and further apart"
    patience = Patience()
    patience.note(helped=False)
    assert not patience.tries() and patience.tries()
    patience.note(helped=True)
    assert patience.tries() and patience.tries()


@pytest.mark.parametrize("norm, offset, factor", [
    ("layer", 0.0, 0.0625), ("layer", 1.0, 1.0), ("biased_layer", 0.0, 4.0), ("bare_layer", 0.0, 1.0)])  # fmt: skip
def test_heads_behind_other_norms_and_with_a_factor_are_searched(
    device: CpuDevice, monkeypatch: pytest.MonkeyPatch, norm: str, offset: float, factor: float
) -> None:
    rows, columns = LEAST_ROWS + 5, 192
    values, x = near_ties(rows, columns, seed=7)
    weight, gain = packed(device, values), numbers(2 * columns, seed=5, scale=0.1) + 1 - offset
    given = {"layer": gain[:columns], "biased_layer": gain, "bare_layer": None}[norm]
    call = greedy_call(device, rows, columns, norm=norm, offset=offset, logit_scale=factor)
    kernel, native, found = ScreenedGreedy(device), device.native, list[int]()
    assert kernel.supports(call) is None and {"norm", "logit_scale"} <= kernel.non_default
    assert isinstance(native, Native)
    real = native.largest

    def largest(*arguments: Any) -> Any:
        assert arguments[2] is None, "the stream is normed already"
        result = real(*arguments)
        found.append(ctypes.c_int64.from_address(arguments[9]).value)
        return result

    monkeypatch.setattr(native, "largest", largest)
    run = kernel.build(call)

    def parts(op: str, /, **static: Any) -> Any:
        if op == "linear":
            return ScreenedLinear(device).build(replace(call, op="linear", static={**call.static, **static}))
        return getattr(reference_norm, op)(static, parts)

    linear = {"rows": rows, "columns": columns}
    head_of = reference_head({**call.static, "dtype": "bfloat16"}, lambda op, **s: parts(op, **(linear | s)))
    for step in (x, -x, numbers(1, columns, seed=8)):
        want = int(head_of(step.clone(), given, weight, None).argmax())
        assert run(step.clone(), given, weight, None).tolist() == [want]
    assert len(found) == 3 and all(0 < count < rows * FEW for count in found), "by a search, not by all logits"


def shaped_call(device: CpuDevice, rows: int, columns: int, factor: float, cap: float | None) -> OpCall:
    return greedy_call(device, rows, columns, logit_scale=factor, cap=cap)


@pytest.mark.parametrize("factor, cap", [(0.3, None), (3.0, None), (1.0, 30.0), (0.7, 5.0), (2.0, 0.01)])
@pytest.mark.parametrize("threads", [1, 3])
def test_the_id_behind_a_factor_and_a_soft_cap_is_that_of_all_logits(
    device: CpuDevice, monkeypatch: pytest.MonkeyPatch, factor: float, cap: float | None, threads: int
) -> None:
    rows, columns = LEAST_ROWS + 3, 128
    monkeypatch.setattr(device, "threads", threads)
    values, close = near_ties(rows, columns, seed=3)
    values[4000:4050] = values[50:100]
    asked = Head(device, values)
    run = ScreenedGreedy(device).build(shaped_call(device, rows, columns, factor, cap))
    for x in (close, close * 1e-3, close * 30, values[57:58].float(), numbers(1, columns, seed=2)):
        logits = asked.logits(x) * factor
        want = int((torch.tanh(logits / cap) * cap if cap else logits).argmax())
        assert run(x.clone(), asked.gain, asked.weight, None).tolist() == [want]


def test_rows_that_a_soft_cap_makes_equal_are_told_apart_by_all_logits(device: CpuDevice) -> None:
    values, x = near_ties(LEAST_ROWS, 128)
    values[77], values[5000] = 300 * x[0], 301 * x[0]
    asked = Head(device, values.bfloat16())
    assert asked.found(x) == 5000
    asked.shaping = 1.0, 1e6
    assert asked.found(x) == 5000, "far below the cap"
    asked.shaping = 1.0, 1.0
    assert asked.found(x) == -1, "both are the cap"
    run = ScreenedGreedy(device).build(shaped_call(device, *values.shape, 1.0, 1.0))
    capped = torch.tanh(asked.logits(x))
    assert capped[77] == capped[5000] == 1
    assert run(x, asked.gain, asked.weight, None).tolist() == [int(capped.argmax())]
    asked.shaping = -1.0, 0.0
    with pytest.raises(ValueError, match="a factor is above 0"):
        asked.found(x)


def test_an_rms_norm_without_a_weight_is_an_error(device: CpuDevice) -> None:
    values, x = near_ties(LEAST_ROWS, 64)
    run = ScreenedGreedy(device).build(greedy_call(device, *values.shape))
    with pytest.raises(ValueError, match="has a weight"):
        run(x, None, packed(device, values), None)


def test_layer_norms_are_those_of_the_reference(device: CpuDevice) -> None:
    call = OpCall("layer_norm", {"hidden": 96, "dtype": "bfloat16", "eps": EPS}, Bucket(1, 64), device.capabilities)
    kernel = LayerNorm(device)
    assert kernel.supports(call) is None
    run, want = kernel.build(call), reference_norm.layer_norm(call.static, lambda op, /, **static: None)
    weight, bias = numbers(96, seed=1).bfloat16(), numbers(96, seed=2)
    for dtype in (torch.bfloat16, torch.float32):
        x = (numbers(5, 3, 96) * 3 + 2).to(dtype)
        for gain, added in ((None, None), (weight, None), (weight.float(), bias)):
            got = run(x, gain, added)
            assert got.dtype is dtype
            torch.testing.assert_close(
                got, want(x, gain, added), rtol=1e-5 if dtype is torch.float32 else 1e-2, atol=1e-5
            )


def test_the_kernel_searches_and_knows_when_to_leave_it(device: CpuDevice, monkeypatch: pytest.MonkeyPatch) -> None:
    values, x = near_ties(LEAST_ROWS, 128)
    asked, kernel, native = Head(device, values), ScreenedGreedy(device), device.native
    assert isinstance(native, Native)
    limits = list[int]()

    def largest(*arguments: Any) -> Any:
        limits.append(arguments[7])
        return real(*arguments)

    real = native.largest
    monkeypatch.setattr(native, "largest", largest)
    call = greedy_call(device, *values.shape)
    assert kernel.workspace(call) > 4 * LEAST_ROWS
    run, want = kernel.build(call), int(asked.logits(x).argmax())
    hard = x - values.float().mean(0) * 3
    for step in (x, x, hard, hard, hard):
        assert run(step, asked.gain, asked.weight, None).tolist() == [int(asked.logits(step).argmax())]
    assert limits[:2] == [int(LEAST_ROWS * FEW)] * 2 and run(x, asked.gain, asked.weight, None).tolist() == [want]
    biased = run(x, asked.gain, asked.weight, torch.zeros(LEAST_ROWS).bfloat16())
    assert biased.tolist() == [want] and limits[-1] == -1
