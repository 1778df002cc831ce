"""Every kernel under Triton's interpreter, against the references; the slow ones over whole layers."""

from __future__ import annotations

from collections import Counter
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import pytest
import torch
from interpreted import every_access_checked, host_kernels, host_states, schemas

from evener.contracts.ops import Bucket, OpCall
from evener.contracts.state import AttentionSpec, StateSpec, StateStep, StateTensor
from evener.layers.experts import MoEConfig
from evener.ops.parts import load_reference
from evener.ops.reference.linear import PLAIN
from evener.ops.reference.sampling import sample
from evener.ops.reference.state import ReferenceState
from evener_conformance.kit import families as family_list
from evener_conformance.kit.composites import TinyModel, check_composite
from evener_conformance.kit.families import Family, families
from evener_conformance.kit.ops import check_kernel, forbid_nested_ops
from evener_conformance.kit.shapes import SHAPES
from evener_conformance.kit.state import check_provider
from evener_conformance.reference.device import HostDevice
from evener_kernels_triton import composites
from evener_kernels_triton.experts import Choice, route, scores, sort
from evener_kernels_triton.latent_state import LatentState
from evener_kernels_triton.linear import gemv, skinny
from evener_kernels_triton.sampling import sample_filtered
from evener_kernels_triton.stored import STORED
from evener_kernels_triton.tuning import MAX_OWN_TOKENS_FEW_ROWS, Tuning

DTYPES = ("float32", "bfloat16")
#: Ops whose kernels were not seen under the check of accesses yet.
UNCHECKED = ("sample", "logprobs")
#: Ops that take the interpreter longest for a row, and whose rows do not depend on each other.
SLOW_PER_ROW = (*UNCHECKED, "route", "rotary")
#: Ops whose kernels put rows of tokens together in tiles, and choose their size by the type.
TILED_BY_TYPE = ("grouped_linear",)
#: The kit's steps, the last one with as many rows as go to the library's products, not with twice as many.
FEW_AND_MANY = (*family_list.STEPS[:-1], (MAX_OWN_TOKENS_FEW_ROWS, 1))
#: Numbers of the logits in the cases of ``sample`` with many draws.
MANY_DRAWS = 128 * 259


@pytest.fixture(autouse=True)
def tiny_tensors(one_thread: None) -> None:
    """Every test here runs on one thread."""


def primitives() -> list[Any]:
    """Kernels of primitives and numbers of rows of the narrow type. Those that search and that list make many passes,
    which the interpreter takes its time for."""
    slow = {op: [pytest.mark.slow] for op in ("sample", "logprobs", "route", "rotary", "grouped_linear", "mix_experts",
                                              "add_adapters")}  # fmt: skip
    # Stored elements have tests of their own (test_triton_stored.py, test_triton_packed.py): the ops' cases are plain.
    plain = [k for k in host_kernels(composite=False) if STORED not in k.packings or PLAIN in k.packings]
    few = [pytest.param(k, 3, id=f"{k.name}-few", marks=pytest.mark.slow) for k in plain]
    # Quick: one type and one size, of kernels that no other quick test launches in so many forms.
    quick = [pytest.param(k, 0, id=f"{k.name}-one type") for k in plain if k.op not in slow]
    # A program of the others takes one row. Of those that take several, in tiles whose size depends on the type,
    # ``linear`` has all its rows in both types anyway.
    tiled = [k for k in plain if k.op in TILED_BY_TYPE]
    return quick + few + [pytest.param(k, 17, id=f"{k.name}-17 narrow rows", marks=pytest.mark.slow) for k in tiled]


@pytest.mark.parametrize(("kernel", "narrow"), primitives())
def test_a_kernel_agrees_with_its_reference(kernel: Any, narrow: int) -> None:
    # The interpreter takes its time for each row, and cuts off where the compiler rounds. Rows of some know nothing of
    # each other; products choose their tiles by the number of rows, others of the narrow type take those of float32.
    wide = 3 if kernel.op in SLOW_PER_ROW else 17
    rows = {"float32": wide, "bfloat16": wide if kernel.op == "linear" else min(wide, narrow)}
    dtypes: tuple[str, ...] = DTYPES
    if not narrow:
        rows, dtypes = {"bfloat16": 3}, ("bfloat16",)
    # Scores are numbers of float32 once they are loaded: the hundreds of draws that show slightly wrong ones need no
    # other type. Each takes two searches of 32 passes.
    most = {"float32": 1 << 16, "bfloat16": MANY_DRAWS - 1 if kernel.op == "sample" else 1 << 16}
    results = []
    with nullcontext() if kernel.op in UNCHECKED else every_access_checked():
        for dtype in dtypes:
            results += check_kernel(
                kernel, schemas()[kernel.op], HostDevice(0), (dtype,), sizes=(rows[dtype],), nearest=False,
                most_numbers=most[dtype],
            )  # fmt: skip
    assert not [str(r) for r in results if r.outcome == "failed"]
    passed = Counter(r.dtype for r in results if r.outcome == "passed")
    assert set(passed) == set(dtypes), f"{kernel.name} was never computed: {sorted({r.detail for r in results})}"
    draws = [r for r in results if r.dtype == "float32" and r.case.startswith("128 rows") and r.outcome == "passed"]
    assert len(draws) == (2 if kernel.op == "sample" else 0), "many draws, with and without filters"


@pytest.mark.slow
@pytest.mark.parametrize("op", ["penalize", "grouped_linear"])
def test_chunked_kernels_match_their_reference(op: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("evener_kernels_triton.logits._ROWS_PER_COUNT", 4)
    monkeypatch.setattr("evener_kernels_triton.experts.MAX_PAIRS", 20)
    (kernel,) = (k for k in host_kernels(composite=False) if k.op == op)
    results = check_kernel(
        kernel, schemas()[op], HostDevice(0), ("float32",), sizes=(17,), nearest=False, most_numbers=1 << 16
    )
    assert {r.outcome for r in results} == {"passed"}


@pytest.mark.slow
@pytest.mark.parametrize("kernel", host_kernels(composite=True), ids=lambda k: k.name)
def test_a_composite_agrees_with_its_expansion(kernel: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    every, linears = list(schemas().values()), [k for k in host_kernels(composite=False) if k.op == "linear"]
    plain = next(family.name for family in families() if family.calls(kernel.op))
    # Each row takes the interpreter its time: more than the own products take, and the narrow type, in the plainest
    # layers only.
    few, many = family_list.STEPS[:-1], ((17, 5), (MAX_OWN_TOKENS_FEW_ROWS, 1))
    small = tuple(family.name for family in families() if family.hidden < 128)
    results = []
    for dtype, steps, kinds in (("bfloat16", many, (plain,)), ("float32", few, small)):
        monkeypatch.setattr(family_list, "STEPS", steps)
        results += check_composite(kernel, every, HostDevice(0), host_states(), linears, (dtype,), kinds=kinds)
    assert not [str(r) for r in results if r.outcome == "failed"]
    assert "float32" in {r.dtype for r in results if r.outcome == "passed"}


@pytest.mark.slow
@pytest.mark.parametrize("op", ["attention_block", "mlp_block", "moe_block"])
def test_a_block_with_stored_weights_agrees_with_its_expansion(op: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """One token, which takes paths of its own, and a few."""
    (kernel,) = (k for k in host_kernels(composite=True) if k.op == op)
    linears = [k for k in host_kernels(composite=False) if k.op in ("linear", "grouped_linear")]
    kinds = ("int8 quantized expert", "float8 quantized expert") if op == "moe_block" else ("float8 quantized",)
    monkeypatch.setattr(family_list, "STEPS", ((3, 1), (1,), (1,)))
    every = list(schemas().values())
    results = check_composite(kernel, every, HostDevice(0), host_states(), linears, ("float32",), kinds=kinds)
    assert not [str(r) for r in results if r.outcome == "failed"]
    assert sum(r.outcome == "passed" for r in results) >= len(kinds)


@pytest.mark.parametrize(
    ("steps", "apart"),
    [(((3, 2),), False), pytest.param(((17, 5),), True, marks=pytest.mark.slow)],
    ids=["few", "more"],
)
def test_few_tokens_have_the_activation_in_the_product_with_stored_gate_and_up(
    steps: tuple[tuple[int, ...], ...], apart: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    (kernel,) = (k for k in host_kernels(composite=True) if k.op == "mlp_block")
    linears = [k for k in host_kernels(composite=False) if k.op == "linear"]
    monkeypatch.setattr(family_list, "STEPS", steps)
    every, asked = list(schemas().values()), list[bool]()
    enter = composites.act_rows

    def act(*args: Any) -> torch.Tensor:
        asked.append(True)
        return enter(*args)

    monkeypatch.setattr(composites, "act_rows", act)
    results = check_composite(
        kernel, every, HostDevice(0), host_states(), linears, ("float32",), kinds=("float8 quantized",)
    )
    assert {r.outcome for r in results if r.case != "all"} <= {"passed", "not applicable"} and bool(asked) == apart
    assert "passed" in {r.outcome for r in results}


@pytest.mark.slow
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    "family", [f for f in families() if isinstance(f.mlp, MoEConfig) and f.hidden < 128], ids=lambda f: f.name
)
def test_single_token_experts_match_their_expansion(family: Family, dtype: str) -> None:
    kernels = [k for k in host_kernels(composite=True) if k.op == "moe_block"]
    every, place, noise = list(schemas().values()), HostDevice(0), torch.Generator().manual_seed(6)
    model = TinyModel(place, dtype, family, kernels, ReferenceState(), every)
    reference = TinyModel(place, "float32", family, (), ReferenceState(), every, model)
    for before in range(3):
        x = torch.randn(1, family.hidden, generator=noise).to(getattr(torch, dtype))
        with torch.inference_mode():
            got, want = (m.step(x, (before,), (1,))[0].float() for m in (model, reference))
        assert (got - want).abs().max() <= (1e-4 if dtype == "float32" else 3e-2) * want.abs().max()


@pytest.mark.slow
def test_a_layer_with_windows_caps_and_norms_everywhere_agrees_with_its_expansion(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(family_list, "STEPS", FEW_AND_MANY)
    kernel = next(k for k in host_kernels(composite=True) if k.op == "attention_block")
    linears = [k for k in host_kernels(composite=False) if k.op == "linear"]
    every = list(schemas().values())
    states = [state for state in host_states() if "window" in state.kinds]
    results = check_composite(kernel, every, HostDevice(0), states, linears, ("bfloat16",), kinds=("windowed",))
    assert [r.outcome for r in results] == ["passed"], [str(r) for r in results]


@pytest.mark.slow
@pytest.mark.parametrize("dtype", DTYPES)
def test_the_state_provider_keeps_the_contract(dtype: str) -> None:
    # Quantized state: test_triton_quantized_state.py.
    for provider in host_states():
        report = check_provider(provider, HostDevice(0), dtype, SHAPES)
        assert report.problems == []
        words = [": no kind ", ": attends to every earlier token, not to selected ones"]
        if dtype == "float32":  # latents as wide as DeepSeek's, on a device with the least memory
            words.append("heads of 576/512: tiles of float32 do not fit into 49152 bytes of shared memory")
        assert [reason for reason in report.refused if not any(word in reason for word in words)] == []


LATENT = [s for s in SHAPES if s.kind == "latent" and s.top is None]


@pytest.mark.slow
@pytest.mark.parametrize("shared", [48 << 10, 227 << 10], ids=["little memory", "much memory"])
def test_latent_state_is_attended_to_in_tiles_of_any_size(shared: int) -> None:
    provider = LatentState(Tuning(132, shared, False))
    provider.block_sizes = lambda spec: (16,)  # type: ignore[method-assign]
    report = check_provider(provider, HostDevice(0), "bfloat16", LATENT)
    assert (report.problems, len(report.checked)) == ([], len(LATENT))


def test_narrow_latent_state_is_read_as_the_reference_reads_it() -> None:
    device = HostDevice(0)
    tensors = (StateTensor("latent", (32,), "float8_e4m3fn"), StateTensor("rope", (10,), "float8_e4m3fn"))
    spec, attention = StateSpec("latent", tensors), AttentionSpec(5, 42, 0.2, dtype="bfloat16")
    mine = LatentState(Tuning(132, 48 << 10, False))
    assert "float8_e4m3fn" in (mine.supports(spec, attention, device.capabilities) or "")
    able = replace(device.capabilities, features=frozenset({"fp8"}))
    assert mine.supports(spec, attention, able) is None
    noise = torch.Generator().manual_seed(2)
    # Numbers that the narrow type has: the interpreter rounds into it otherwise than devices do.
    values = [torch.randn(40, n, generator=noise).to(torch.float8_e4m3fn).bfloat16() for n in (32, 10)]
    query = torch.randn(40, 5, 42, generator=noise).bfloat16()
    ints = torch.arange(40, dtype=torch.int32)
    table = torch.tensor([[2, 1, 3]], dtype=torch.int32)
    slots = table[0, ints // 16] * 16 + ints % 16
    found = []
    providers: tuple[Any, ...] = (mine, ReferenceState())
    for provider in providers:
        views = provider.bind(torch.zeros(4, 16 * spec.nbytes, dtype=torch.uint8), spec, 16)
        for first, stop in ((0, 39), (39, 40)):
            lengths, starts = torch.tensor([stop]).int(), torch.tensor([0, stop - first]).int()
            rows = slice(first, stop)
            step = StateStep(stop - first, 1, stop - first, stop, starts, lengths, ints[rows], slots[rows], table,
                             [stop - first], [stop])  # fmt: skip
            meta = provider.prepare(step, spec, attention, 16)
            provider.write(views, meta, *(v[rows] for v in values))
            found.append(provider.attend(views, meta, query[rows]))
    for got, want in zip(found[:2], found[2:], strict=True):
        torch.testing.assert_close(got, want, rtol=2e-2, atol=2e-2)


@pytest.mark.slow
def test_latent_attention_of_new_and_old_requests_agrees_with_its_expansion(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(family_list, "STEPS", FEW_AND_MANY)
    kernel = next(k for k in host_kernels(composite=True) if k.op == "latent_attention_block")
    linears = [k for k in host_kernels(composite=False) if k.op == "linear"]
    states = [p for p in host_states() if "latent" in p.kinds]
    every, kinds = list(schemas().values()), ("latent queries",)
    results = check_composite(kernel, every, HostDevice(0), states, linears, ("bfloat16",), kinds=kinds)
    assert [r.outcome for r in results] == ["passed"], [str(r) for r in results]


def test_a_chunked_prefill_runs_beside_a_whole_new_prompt() -> None:
    kernel = next(k for k in host_kernels(composite=True) if k.op == "latent_attention_block")
    linears = [k for k in host_kernels(composite=False) if k.op == "linear"]
    provider, metas = LatentState(Tuning(64, 48 << 10, False)), []
    prepare = provider.prepare
    provider.prepare = lambda *a: metas.append(prepare(*a)) or metas[-1]  # type: ignore[func-returns-value,method-assign]
    family, every = next(f for f in families() if f.name == "latent"), list(schemas().values())
    model = TinyModel(HostDevice(0), "float32", family, [kernel, *linears], provider, every)
    reference = TinyModel(HostDevice(0), "float32", family, (), ReferenceState(), every, model)
    noise = torch.Generator().manual_seed(8)
    with torch.inference_mode():
        for before, counts in (((0,), (9,)), ((9, 0), (5, 7))):
            x = torch.randn(sum(counts), family.hidden, generator=noise)
            for got, want in zip(*(m.step(x, before, counts) for m in (model, reference)), strict=True):
                torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-3)
    assert [[(run.whole, rows.stop) for run, rows in meta.runs] for meta in metas] == [[], [(False, 5), (True, 12)]]


def test_sampling_filters_match_the_sorted_reference() -> None:
    noise = torch.Generator().manual_seed(4)
    logits = (torch.randn(4, 37, generator=noise) * 4).round() / 4  # so that bounds fall on equal scores
    temperature = torch.tensor([0.7, 1.0, 1.3, 0.0])
    top_k, top_p = torch.tensor([5, 0, 20, 3], dtype=torch.int32), torch.tensor([1.0, 0.8, 0.9, 0.5])
    min_p = torch.tensor([0.0, 0.0, 0.05, 0.0])
    seed, position = torch.tensor([3, -4, 5, 6], dtype=torch.int32), torch.tensor([0, 9, 77, 2], dtype=torch.int32)
    want = sample({"vocab": 37, "filters": True}, forbid_nested_ops)(
        logits, temperature, top_k, top_p, min_p, seed, position
    )
    assert torch.equal(sample_filtered(logits, temperature, top_k, top_p, min_p, seed, position), want)


def test_top_logprobs_across_chunks_break_ties_by_lowest_id() -> None:
    call = OpCall("logprobs", {"vocab": 4099}, Bucket(1, 2), HostDevice(0).capabilities)
    kernel = next(k for k in host_kernels(composite=False) if k.op == "logprobs")
    logits = torch.full((2, 4099), -torch.inf)
    logits[0, [7, 4098, 30, 4097]] = torch.tensor([1.0, 2.0, 1.0, 3.0])
    logits[1, 4096] = 0.5
    chosen, values, ids = kernel.build(call)(logits, torch.tensor([30, 4096], dtype=torch.int32), 4)
    want = logits.log_softmax(-1)
    torch.testing.assert_close(chosen, want[[0, 1], [30, 4096]])
    torch.testing.assert_close(values, want.topk(4).values)
    assert ids[0].tolist() == [4097, 4098, 7, 30]
    assert ids[1].tolist() == [4096, 0, 1, 2]  # ids of probability zero are listed too, each once


def test_biases_of_more_entries_than_a_tile_are_summed_by_id() -> None:
    call = OpCall("add_bias", {"vocab": 50}, Bucket(1, 2), HostDevice(0).capabilities)
    kernel = next(k for k in host_kernels(composite=False) if k.op == "add_bias")
    noise = torch.Generator().manual_seed(1)
    ids = torch.randint(0, 50, (2, 300), generator=noise, dtype=torch.int32)
    until, values = torch.randint(0, 9, (2, 300), generator=noise, dtype=torch.int32), torch.ones(2, 300)
    position = torch.tensor([4, 0], dtype=torch.int32)
    inputs = ids, values, until, position
    want = load_reference(schemas()["add_bias"])({"vocab": 50}, forbid_nested_ops)(torch.zeros(2, 50), *inputs)
    assert torch.equal(kernel.build(call)(torch.zeros(2, 50), *inputs), want)


@pytest.mark.parametrize("tokens", [3, 17])
@pytest.mark.parametrize(("rows", "columns", "spans"), [(64, 512, 4), (40, 1000, 4), (96, 1024, 8), (96, 96, 1)])
def test_split_k_matches_the_whole_product(tokens: int, rows: int, columns: int, spans: int) -> None:
    noise = torch.Generator().manual_seed(rows)
    x, w = torch.randn(tokens, columns, generator=noise), torch.randn(rows, columns, generator=noise)
    bias, tuning = torch.randn(rows, generator=noise), Tuning(64, 48 << 10, False)
    assert tuning.skinny(tokens, rows, columns, 4).splits == spans
    for _ in range(2):  # the counters of the first time are zero again
        got = skinny(tuning, x, w, torch.float32, bias=bias)
        torch.testing.assert_close(got, torch.nn.functional.linear(x, w, bias), rtol=1e-4, atol=1e-3)
    assert not tuning.arrivals.of(x.device, 1).any()


@pytest.mark.parametrize("activation", ["", "silu"])
@pytest.mark.parametrize(("rows", "columns"), [(6, 64), (7, 5000)])
def test_rows_of_any_length_are_multiplied_a_tile_at_a_time(rows: int, columns: int, activation: str) -> None:
    noise = torch.Generator().manual_seed(columns)
    halves = 2 if activation else 1
    x, w = torch.randn(1, columns, generator=noise), torch.randn(rows * halves, columns, generator=noise)
    bias = torch.randn(rows * halves, generator=noise)
    got = gemv(Tuning(0, 48 << 10, False), x, w, torch.float32, bias=bias, activation=activation)
    want = torch.nn.functional.linear(x, w, bias)
    if activation:
        want = torch.nn.functional.silu(want[:, :rows]) * want[:, rows:]
    torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-3)


def test_lists_written_by_routing_match_those_from_sorting() -> None:
    """Experts that are elsewhere, one that is here twice, and counters that held something."""
    random, tuning, tokens, matrices = torch.Generator().manual_seed(3), Tuning(64, 48 << 10, False), 40, 5
    choice = Choice.of(
        {"experts": 6, "groups": 1, "top": 3, "top_groups": 1, "group_best": 1, "scoring": "softmax",
         "renormalize": False, "scale": 1.0}
    )  # fmt: skip
    places = torch.tensor([[3, 3], [0, 4], [-1, -1], [1, 1], [-1, -1], [2, 2]], dtype=torch.int32)
    copies = torch.tensor([1, 2, 1, 1, 1, 1], dtype=torch.int32)
    x, router = torch.randn(tokens, 32, generator=random), torch.randn(6, 32, generator=random)
    lists, counts = torch.full((matrices, tokens), -7, dtype=torch.int32), torch.full((matrices,), 9, dtype=torch.int32)
    logits = scores(tuning, x, router, counts)
    slots, _ = route(tuning, choice, logits, None, slots=places, copies=copies, lists=lists, counts=counts)
    work = sort(tuning, slots, matrices, tokens)
    assert work.lists is not None
    assert work.counts is not None
    assert counts.tolist() == work.counts.tolist() == [int((slots == m).sum()) for m in range(matrices)]
    assert 0 < counts.min() < tokens
    assert (slots < 0).any()
    for got, want, count in zip(lists, work.lists, counts.tolist(), strict=True):
        assert sorted(got[:count].tolist()) == want[:count].tolist()
        assert (got[count:] == -7).all()
