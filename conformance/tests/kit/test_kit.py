"""The kit as a whole: what it requires of a backend, what it prints, and the defects that it finds."""

from __future__ import annotations

import copy
import inspect
import json
import re
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from warm import warm

from evener.contracts.communicator import Communicator
from evener.contracts.device import DeviceCapabilities, MemoryInfo, Readback, ReadyReadback
from evener.contracts.graph import GraphCapture, Replay
from evener.contracts.ops import Kernel, OpCall, OpFunction
from evener.contracts.quant import PackedWeight, Packing, WeightPart
from evener.contracts.state import AttentionSpec, StateSpec
from evener.errors import BackendError, ConfigError
from evener.ops.reference.linear import PLAIN
from evener.ops.reference.state import ReferenceState
from evener.ops.schemas import PRIMITIVES
from evener.plugins.catalog import Provided
from evener_conformance.distributions import install_reference_backend, write_distribution
from evener_conformance.graph.record import RecordingCapture
from evener_conformance.kit import graphs
from evener_conformance.kit.checklist import Checklist, CheckRequest, ReferenceKernel
from evener_conformance.kit.collectives import check_collectives, collective_results, device_count
from evener_conformance.kit.fallback_monitor import FallbackMonitor
from evener_conformance.kit.graphs import _replayed
from evener_conformance.kit.model import describe_divergence
from evener_conformance.kit.outcome import CaseResult, Check
from evener_conformance.kit.report import show
from evener_conformance.kit.result import Result
from evener_conformance.kit.run import run_on
from evener_conformance.kit.subject import Subject, open_subject
from evener_conformance.reference.device import HostDevice
from evener_inspection.thread_communicator import ThreadCommunicator, run_on_threads

SCHEMAS = {schema.name: schema for schema in PRIMITIVES}


@pytest.fixture
def subject(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Subject:
    """The reference backend, which registers nothing but a device."""
    install_reference_backend(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    return open_subject("reference")


class Changed(Kernel):
    """The reference of an op, with a change."""

    name = "changed"

    def __init__(self, op: str, change: Callable[[OpFunction], OpFunction], **claims: Any) -> None:
        self.op, self._reference, self._change = op, ReferenceKernel(SCHEMAS[op]), change
        self.packings = self._reference.packings
        for claim, value in claims.items():
            setattr(self, claim, value)

    def supports(self, call: OpCall) -> str | None:
        return None

    def build(self, call: OpCall) -> OpFunction:
        return self._change(self._reference.build(call))


def results(subject: Subject, kernel: Kernel) -> list[CaseResult]:
    changed = replace(subject, kernels=(Provided(kernel, "reference", "mine", "1"),))
    return list(run_on(changed, CheckRequest(3, (kernel.op,), ("bfloat16",))).cases)


def truncated(run: OpFunction) -> OpFunction:
    return lambda *x: (run(*(t.float() for t in x)).view(torch.int32) & -65536).view(torch.float32).bfloat16()


def unfinished(run: OpFunction) -> OpFunction:
    def go(x: torch.Tensor) -> torch.Tensor:
        out, right = torch.empty_like(x), run(x)
        whole = len(x) // 8 * 8
        out[:whole] = right[:whole]
        return out if len(x) > 8 else right

    return go


def one_buffer(run: OpFunction) -> OpFunction:
    kept: list[torch.Tensor] = []

    def go(x: torch.Tensor) -> torch.Tensor:
        kept[1:] = [run(x)]
        if not kept or kept[0].shape != x.shape:
            kept[:1] = [torch.zeros_like(x)]
        return kept[0].copy_(kept[-1])

    return go


def remembering(run: OpFunction) -> OpFunction:
    kept: list[torch.Tensor] = []

    def go(x: torch.Tensor) -> torch.Tensor:
        kept.append(run(x))
        return kept[0].clone()

    return go


def needing_a_row(run: OpFunction) -> OpFunction:
    def go(x: torch.Tensor) -> torch.Tensor:
        return run(x) if x[0].numel() else x

    return go


@pytest.mark.parametrize(
    ("change", "found"),
    [
        (needing_a_row, "raised IndexError"),
        (truncated, "is something rounded towards zero"),
        (unfinished, "got nan"),
        (one_buffer, "they need memory of their own"),
        (remembering, "a second call with other rows"),
        (lambda run: lambda x: x, "shares memory with input x"),
    ],
    ids=["needing a row", "truncated", "unfinished", "one buffer", "remembering", "aliasing"],
)
def test_a_defect_of_a_kernel_is_found(subject: Subject, change: Any, found: str) -> None:
    wrong = [r for r in results(subject, Changed("softcap", change)) if r.outcome == "failed"]
    assert any(found in r.detail for r in wrong), [str(r) for r in wrong][:3]


def test_kernels_that_compute_on_the_host_get_two_threads(subject: Subject) -> None:
    assert torch.get_num_threads() == 2


def test_the_commonest_refusal_is_quoted(subject: Subject) -> None:
    kernel, asked = Changed("softcap", lambda run: run), iter(range(1000))
    kernel.supports = lambda call: "not today" if next(asked) else "a rare reason"  # type: ignore[method-assign]
    last = [r for r in results(subject, kernel) if r.outcome == "failed"]
    assert [r.detail for r in last] == ["it refused every case, so it could not be checked: not today"]


def test_a_kernel_that_refuses_every_case_fails(subject: Subject) -> None:
    kernel = Changed("softcap", lambda run: run)
    kernel.supports = lambda call: "not today"  # type: ignore[method-assign]
    last = [r for r in results(subject, kernel) if r.outcome == "failed"]
    assert [r.detail for r in last] == ["it refused every case, so it could not be checked: not today"]


def test_a_kernel_of_an_absent_library_is_not_judged_though_some_cases_are_refused_for_their_sizes(
    subject: Subject,
) -> None:
    kernel, asked = Changed("softcap", lambda run: run), iter(range(1000))
    kernel.supports = lambda call: "libx is not installed" if next(asked) else "too wide"  # type: ignore[method-assign]
    found = [r for r in results(subject, kernel) if r.case == "all"]
    assert [(r.outcome, r.detail) for r in found] == [("not applicable", "libx is not installed")]
    assert not any(r.outcome == "failed" for r in results(subject, kernel))


class OnDevice(HostDevice):
    """Stands for a device whose memory is its own, and which no simulator answers for."""

    def __init__(self, index: int, count: int) -> None:
        if index >= count:
            raise BackendError(f"there are {count} devices")
        super().__init__(index)
        self.simulated, self.capabilities = False, replace(self.capabilities, host_memory=False)


@pytest.mark.parametrize(("count", "found"), [(1, 1), (2, 2)])
def test_a_pretended_backend_with_one_real_device_has_no_second_rank(subject: Subject, count: int, found: int) -> None:
    class Loaded:
        def open_device(self, index: int) -> OnDevice:
            return OnDevice(index, count)

    pretended: Any = replace(subject, pretended=True, device=OnDevice(0, count), loaded=Loaded())
    assert device_count(pretended) == found
    if found == 1:
        check = Check("collectives", "x", "", lambda: ())
        (result,) = collective_results(check, pretended, 5)
        assert result.outcome == "unknown" and "two devices are needed" in result.detail


class Blocks(Packing):
    """Supports no plain weights."""

    layout = "blocks"

    def supports(self, parts: Sequence[WeightPart], dtype: str) -> str | None:
        return "it is plain"

    def nbytes(self, parts: Sequence[WeightPart], dtype: str) -> int:
        raise AssertionError("nothing was accepted")

    def pack(self, parts: Sequence[WeightPart], dtype: str, device: torch.device) -> PackedWeight:
        raise AssertionError("nothing was accepted")


def test_a_linear_kernel_without_plain_weights_is_checked_by_the_formats_area_only(subject: Subject) -> None:
    kernel = Changed("linear", lambda run: run)
    kernel.packings = (Blocks(),)
    found = [r for r in results(subject, kernel) if r.area == "primitives"]
    assert {r.outcome for r in found} == {"not applicable"}
    (last,) = (r for r in found if r.case == "all")
    assert last.detail.startswith("it accepts no plain weights (packing blocks: it is plain); `--op formats` checks")


def test_a_linear_kernel_gets_the_first_of_its_packings_that_takes_the_weights(subject: Subject) -> None:
    kernel = Changed("linear", lambda run: run)
    kernel.packings = (Blocks(), PLAIN)
    found = [r for r in results(subject, kernel) if r.area == "primitives" and ", in " in r.case]
    assert found and {r.outcome for r in found} == {"passed"}


def test_a_kernel_without_a_schema_fails(subject: Subject) -> None:
    kernel = Changed("softcap", lambda run: run)
    kernel.op = "conjure"
    assert [r.detail for r in results(subject, kernel)] == [
        "there are kernels for op 'conjure', which no package defines"
    ]


class Blind(HostDevice):
    """Claims not to be the host, but its tensors are host tensors."""

    def __init__(self) -> None:
        super().__init__(0)
        self.simulated, self.capabilities = False, replace(self.capabilities, host_memory=False)


class Counting(Blind):
    count = 0

    def host_fallbacks(self) -> int:
        return self.count


def test_an_undetectable_fallback_is_unknown_and_does_not_pass(subject: Subject) -> None:
    case = run_on(replace(subject, device=Blind()), CheckRequest(1, ("softcap",), ("float32",))).cases[-1]
    assert case.outcome == "unknown" and "host_fallbacks" in case.detail
    assert not Result([case], {}).passed


def test_a_fallback_that_the_device_counts_is_found() -> None:
    device = Counting()
    watch = FallbackMonitor(device)
    with watch():
        device.count += 2
    assert watch.undetectable is None and watch.lines() == ["2 x ops that the device counted in host_fallbacks()"]


class Hasty(HostDevice):
    """Returns the device's own memory, reports more free memory than there is, and leaves one row of zeros unset."""

    def readback(self, tensor: torch.Tensor) -> Readback:
        return ReadyReadback(tensor)

    def memory(self) -> MemoryInfo:
        return MemoryInfo(2, 1)

    def zeros(self, nbytes: int) -> torch.Tensor:
        return torch.ones(nbytes, dtype=torch.uint8)


def test_device_defects_are_found(subject: Subject) -> None:
    cases = run_on(replace(subject, device=Hasty(0)), CheckRequest(1, ("device",))).cases
    wrong = {c.case: c.detail for c in cases if c.outcome == "failed"}
    assert wrong.keys() == {"memory", "zeros", "readback", "readback keeps order"}
    assert "other values, or with later ones" in wrong["readback"]


class Stale(GraphCapture):
    """Replays do nothing: results of the capture stay."""

    def capture(self, segment: Callable[[], None]) -> Replay:
        segment()

        class Nothing(Replay):
            def __call__(self) -> None:
                return

        return Nothing()


@pytest.mark.parametrize(("capture", "right"), [(RecordingCapture(None, False), True), (Stale(), False)])
def test_a_replay_is_run_with_other_inputs(subject: Subject, capture: GraphCapture, right: bool) -> None:
    kernel = ReferenceKernel(SCHEMAS["rms_norm"])
    problems = _replayed(subject, capture, kernel, SCHEMAS["rms_norm"], "float32", 1)
    assert (problems == []) == right, problems


def test_captured_steps_are_compared_in_a_dtype_that_the_device_has(
    subject: Subject, monkeypatch: pytest.MonkeyPatch
) -> None:
    device, asked = HostDevice(0), list[str]()
    device.capabilities = replace(device.capabilities, dtypes=frozenset({"bfloat16"}), emulated=frozenset())

    def engine(of: Subject, folder: Path, dtype: str, **keys: Any) -> Any:
        asked.append(dtype)
        raise RuntimeError("seen enough")

    monkeypatch.setattr(graphs, "engine", engine)
    (found,) = graphs._steps(Check("graphs", "x", "", lambda: []), replace(subject, device=device), 1, "", {})
    assert "seen enough" in found.detail and asked == ["bfloat16"]


def test_differing_answers_are_shown_from_the_first_differing_token() -> None:
    asked, eager = [[1], [2, 3], [4]], [[5, 6], [7, 8, 9], [1, 1]]
    assert describe_divergence(asked, {"eager": eager, "captured": eager}) == ""
    said = describe_divergence(asked, {"eager": eager, "captured": [[5, 6], [7, 0, 0], [1, 2]]})
    assert said == (
        "prompt 1 of 2 tokens: the answers differ from token 1 on; from token 0 eager [7, 8, 9], "
        "captured [7, 0, 0]; the answers to prompts [2] differ too"
    )


class Averaging(ThreadCommunicator):
    def all_reduce(self, tensor: torch.Tensor) -> torch.Tensor:
        return super().all_reduce(tensor).div_(2)


class Tailless(ThreadCommunicator):
    def all_reduce(self, tensor: torch.Tensor) -> torch.Tensor:
        last = tensor.flatten()[-1].clone()
        tensor = super().all_reduce(tensor)
        tensor.view(-1)[-1] = last
        return tensor


def test_a_wrong_element_of_a_collective_is_shown_with_its_place() -> None:
    def work(talk: ThreadCommunicator) -> dict[str, Any]:
        ready = Tailless(talk.name, talk.rank, talk._shared)
        return check_collectives(ready, torch.device("cpu"), lambda t: t.clone(), 5)

    for rank in run_on_threads(2, work):
        first = rank["all_reduce float32"][0]
        assert first.startswith("1 of 222 elements of torch.float32 [6, 37] differ; the first at [5, 36]: got ")
        assert len(set(re.findall("got (.*), expected (.*)", first)[0])) == 2


class Reversed(ThreadCommunicator):
    def all_gather(self, tensor: torch.Tensor, dim: int = -1) -> torch.Tensor:
        return torch.cat(super().all_gather(tensor, dim).chunk(2, dim)[::-1], dim)


@pytest.mark.parametrize(("kind", "found"), [(None, ""), (Averaging, "all_reduce"), (Reversed, "all_gather")])
def test_collectives_are_compared_with_values_computed_from_all_ranks(kind: Any, found: str) -> None:
    def work(talk: ThreadCommunicator) -> dict[str, Any]:
        ready: Communicator = talk if kind is None else kind(talk.name, talk.rank, talk._shared)
        return check_collectives(ready, torch.device("cpu"), lambda t: t.clone(), 5)

    for rank in run_on_threads(2, work):
        wrong = {case.split()[0] for case, problems in rank.items() if problems}
        assert wrong <= {found, "reduce_scatter"} and (found in wrong) == bool(found), rank


@pytest.mark.parametrize(
    ("asked", "why"),
    [
        (CheckRequest(1, ("rms_nrom",)), r"--op rms_nrom: no area, .* has this name \(did you mean 'rms_norm'\?\)"),
        (
            CheckRequest(1, ("composites",)),
            "--op composites: there is nothing to check, as 'reference' has no kernel for a",
        ),
        (CheckRequest(1, ("mlp_block",)), "--op mlp_block: there is nothing to check: it is a composite"),
        (CheckRequest(1, ("graphs",)), "it announces no contract `graph`"),
    ],
    ids=lambda each: each.ops[0] if isinstance(each, CheckRequest) else "",
)
def test_a_selection_without_checks_is_an_error_with_the_reason_and_the_choices(
    subject: Subject, asked: CheckRequest, why: str
) -> None:
    with pytest.raises(ConfigError, match=why) as raised:
        Checklist(subject, asked)
    assert "areas: device, primitives, attention, formats, memory, model\n" in str(raised.value)
    assert "ops and state layouts: embedding, rms_norm, " in str(raised.value)


def test_an_unsupported_dtype_is_an_error_that_lists_the_supported_ones(
    subject: Subject,
) -> None:
    with pytest.raises(ConfigError, match=r"--dtype float64: .* claims float32, bfloat16"):
        Checklist(subject, CheckRequest(1, dtypes=("float64",)))


def test_a_mode_without_matching_checks_is_an_error(subject: Subject) -> None:
    with pytest.raises(ConfigError, match="--mode perf times kernels of primitive ops, and --op device names none"):
        run_on(subject, CheckRequest(1, ("device",)), "perf")


def test_a_run_in_which_nothing_was_checked_does_not_pass_and_says_why(
    subject: Subject, capsys: pytest.CaptureFixture[str]
) -> None:
    result = run_on(subject, CheckRequest(1, ("softcap",)))
    show(result)
    assert not result.passed
    assert "as nothing was checked (no kernel: the reference runs" in " ".join(capsys.readouterr().out.split())


def test_a_kernel_is_found_by_its_own_name(subject: Subject) -> None:
    mine = replace(subject, kernels=(Provided(Changed("softcap", lambda run: run), "reference", "mine", "1"),))
    assert [c.name for c in Checklist(mine, CheckRequest(1, ("changed",))).checks] == [
        "primitives/softcap[reference/changed]"
    ]


def asking_torch(run: OpFunction) -> OpFunction:
    return lambda x: torch.nn.functional.interpolate(x, mode="no such mode")


def giving_nothing(run: OpFunction) -> OpFunction:
    return lambda x: None


def test_an_exception_from_inside_torch_names_the_line_of_the_backend_that_led_to_it(
    subject: Subject, capsys: pytest.CaptureFixture[str]
) -> None:
    cases = results(subject, Changed("softcap", asking_torch))
    line = asking_torch.__code__.co_firstlineno + 1
    wrong = next(c for c in cases if "raised" in c.detail)
    assert f"(at {__file__}:{line}, which led to {torch.nn.functional.__file__}:" in wrong.detail
    show(Result([wrong], run_on(subject, CheckRequest(1, ("softcap",))).facts))
    said = "".join(capsys.readouterr().out.split())
    assert f"{__file__}:{line},".replace(" ", "") in said


def test_every_failure_names_the_source_location_of_the_failing_class(
    subject: Subject,
) -> None:
    wrong = [c for c in results(subject, Changed("softcap", giving_nothing)) if c.outcome == "failed"]
    place = f"{__file__}:{inspect.getsourcelines(Changed)[1]}"
    assert wrong and {c.place for c in wrong} == {place}
    assert {c["place"] for c in Result(wrong, {}).to_json()["cases"]} == {place}
    assert str(wrong[0]).endswith(f"(of {place})"), "what the pytest plugin prints"


def test_failures_that_differ_in_their_numbers_only_are_shown_once(
    subject: Subject, capsys: pytest.CaptureFixture[str]
) -> None:
    def wrong(detail: str, case: str = "c") -> CaseResult:
        return CaseResult("primitives", "softcap", "mine/k", "float32", case, "failed", detail)

    cases = [wrong("y is float32, not bfloat16", str(n)) for n in range(14)]
    cases += [wrong(f"{n} of 7 elements differ; worst at [{n}, 2]: got -{n}.5e-05") for n in range(3)]
    cases += [wrong("worst at [1, 2]: got nan"), wrong("raised E: no (at a.py:3)"), wrong("raised E: no (at a.py:4)")]
    result = Result(cases, run_on(subject, CheckRequest(1, ("softcap",))).facts)
    assert [len(alike) for alike in result.causes] == [14, 3, 1, 1, 1]
    named = [wrong(f"{case}: off by 1.5", case) for case in ("full", "full, sinks")]
    assert [len(alike) for alike in Result(named, {}).causes] == [2], "the case's name is no part of the reason"
    assert len(result.to_json()["cases"]) == len(cases), "the file has them all"
    show(result)
    said = capsys.readouterr().out
    assert said.count("not bfloat16") == 1 and "and 13 more like it; --json FILE has them all" in said


@pytest.mark.parametrize("columns", ["60", None])
def test_the_printed_rerun_command_can_be_pasted(
    columns: str | None, subject: Subject, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", columns) if columns else monkeypatch.delenv("COLUMNS", raising=False)
    facts = run_on(subject, CheckRequest(7, ("softcap",), thorough=True)).facts | {"pretended": True}
    facts["backend"] |= {"options": {"mychip": {"note": "two words"}}}
    show(Result([CaseResult("primitives", "softcap", "mine/k", "float32", "c", "failed", "no")], facts))
    assert (
        "again    evener conformance --backend reference --pretend --thorough --op softcap --seed 7 --dtype float32 "
        "'mychip.note=two words'\n"
    ) in capsys.readouterr().out


class Doubled(ReferenceState):
    """Every result of attention is twice the correct one."""

    name = layout = "doubled"
    kinds = frozenset({"full"})

    def attend(self, *given: Any) -> torch.Tensor:
        return super().attend(*given) * 2


@pytest.mark.slow
def test_a_case_of_attention_is_counted_once_whether_it_passes_or_fails(subject: Subject) -> None:
    def seen(provider: ReferenceState) -> list[tuple[str, str]]:
        mine = replace(subject, states=(Provided(provider, "reference", "mine", "1"),))
        cases = run_on(mine, CheckRequest(1, (provider.layout,), ("float32",))).cases
        return [(c.case, c.outcome) for c in cases if c.area == "attention"]

    right = Doubled()
    right.attend = ReferenceState().attend  # type: ignore[method-assign]
    passed, failed = seen(right), seen(Doubled())
    assert [case for case, _ in passed] == [case for case, _ in failed]
    assert [outcome for _, outcome in failed] == ["failed" if o == "passed" else o for _, o in passed]
    assert ("full: 9/3 heads of 64/64", "failed") in failed


def test_a_state_provider_that_refuses_every_shape_fails_with_its_commonest_reason(subject: Subject) -> None:
    class Refusing(ReferenceState):
        name = layout = "refusing"

        def supports(self, spec: StateSpec, attention: AttentionSpec, device: DeviceCapabilities) -> str | None:
            return "not today" if next(asked) else "a rare reason"

    asked = iter(range(100_000))
    mine = replace(subject, states=(Provided(Refusing(), "reference", "mine", "1"),))
    found = run_on(mine, CheckRequest(1, ("refusing",), ("float32",))).cases
    assert [c.detail for c in found if c.outcome == "failed"] == [
        "it refused every shape, so it could not be checked: not today"
    ]


PLUGIN = """
from evener.contracts.descriptor import Descriptor
from evener.contracts.hooks import hookimpl
from evener.ops.reference.state import ReferenceState

descriptor = Descriptor(
    name="halving", summary="s", contracts={"state": 2}, module="halving_state", states=("halving",)
)


class Halving(ReferenceState):
    name = layout = "halving"
    kinds = frozenset({"full"})

    def attend(self, *given):
        return super().attend(*given) / 2


@hookimpl
def evener_state_providers(device, options):
    return [Halving()]
"""


def test_the_state_provider_of_a_plugin_is_checked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    install_reference_backend(tmp_path)
    write_distribution(tmp_path, "halving", {"evener.plugins": {"halving": "halving_state:descriptor"}})
    (tmp_path / "halving_state.py").write_text(PLUGIN)
    monkeypatch.syspath_prepend(tmp_path)
    subject = open_subject("reference")
    assert [provided.package for provided in subject.states] == ["halving"]
    found = run_on(subject, CheckRequest(1, ("halving",), ("float32",))).cases
    assert ("full: 9/3 heads of 64/64", "failed") in [(c.case, c.outcome) for c in found]


def test_perf_times_a_kernel_on_the_largest_case_that_it_takes(subject: Subject) -> None:
    class Halves(Changed):
        def supports(self, call: OpCall) -> str | None:
            return "turns halves" if call.static["interleaved"] else None

    mine = replace(subject, kernels=(Provided(Halves("rotary", lambda run: run), "reference", "mine", "1"),))
    result = run_on(mine, CheckRequest(1, ("rotary",), ("float32",)), "perf")
    assert result.passed and {c.outcome for c in result.cases} == {"passed"}


def test_a_graph_hook_that_returns_none_is_distinguished_from_a_missing_hook(subject: Subject) -> None:
    chosen = subject.loaded.selection
    offering = replace(chosen.backend.descriptor, contracts={**chosen.backend.descriptor.contracts, "graph": 1})
    selection = replace(chosen, backend=replace(chosen.backend, descriptor=offering))
    loaded = copy.copy(subject.loaded)
    loaded.selection = selection
    why = "its hook evener_graph_capture returned nothing for this device, whose capabilities do not name graphs"
    with pytest.raises(ConfigError, match=f"--op graphs: there is nothing to check: {why}"):
        Checklist(replace(subject, loaded=loaded), CheckRequest(1, ("graphs",)))


@pytest.mark.slow  # a Python of its own, in which torch is imported anew
def test_the_torch_profiler_does_not_write_into_the_progress_output(tmp_path: Path) -> None:
    code = (
        "import sys; from evener_conformance.command import main\n"
        "main(['--backend', 'cpu', '--op', 'softcap', '--seed', '1'])\n"
        "import torch\nwith torch.autograd.profiler.profile(use_kineto=True): torch.ones(2) + 1"
    )
    assert "profiler_start" not in run_in(tmp_path, "-c", code).stderr


def test_a_table_written_to_a_pipe_is_not_truncated_and_explains_missing_figures(
    subject: Subject, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("COLUMNS", raising=False)
    long = "a reason that is longer than any terminal has columns " * 5
    result = run_on(subject, CheckRequest(1, ("softcap",)), "support")
    refused = CaseResult("primitives", "rms_norm", "mine/k", "float32", "c", "not applicable", long)
    show(Result([*result.cases, refused], result.facts))
    rows = {line.split()[0]: line.rstrip() for line in capsys.readouterr().out.splitlines() if line.strip()}
    assert rows["rms_norm"].endswith(long.rstrip())
    assert rows["softcap"].endswith("no kernel: the reference runs, with nothing to compare")


def test_unknown_outcomes_are_shown_with_the_reason_even_when_the_run_passes(
    subject: Subject, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "400")
    good = CaseResult("primitives", "op", "k", "", "c", "passed")
    unseen = CaseResult("memory", "chip", "", "", "all", "unknown", "the device does not count")
    result = Result([good, unseen], run_on(subject, CheckRequest(1, ("softcap",))).facts)
    show(result)
    said = capsys.readouterr().out
    assert result.passed and "unknown memory/chip: the device does not count\n" in said
    assert "1 unknown where nothing is required" in said


def test_progress_names_a_check_before_it_finishes(subject: Subject) -> None:
    said: list[str] = []

    def say(text: str) -> None:
        said.append(text)

    run_on(subject, CheckRequest(1, ("softcap", "device")), say=say)
    assert said[0].startswith("1 of 2: device/") and said[0].endswith(": ")
    assert said[2:] == ["2 of 2: primitives/softcap[reference]: ", "1 case\n"]


def test_an_unknown_outcome_passes_only_where_nothing_is_required() -> None:
    good = CaseResult("primitives", "op", "k", "", "c", "passed")
    unseen = replace(good, area="collectives", outcome="unknown")
    assert Result([good, unseen], {}).passed
    assert not Result([good, replace(unseen, area="primitives")], {}).passed
    assert not Result([unseen], {}).passed


def test_a_check_has_a_name_that_says_what_it_asks() -> None:
    assert Check("primitives", "rms_norm", "x/norm", lambda: []).name == "primitives/rms_norm[x/norm]"


def run_in(folder: Path, *words: str, program: str | Path = sys.executable) -> subprocess.CompletedProcess[str]:
    """A process of its own, without this repository's pytest settings."""
    return subprocess.run([program, *words], cwd=folder, capture_output=True, text=True)


def test_the_command_and_the_plugin_say_the_same(tmp_path: Path) -> None:
    command = "import sys; from evener.cli.main import main; sys.exit(main())"
    asked = ("--backend", "cpu", "--pretend", "--op", "softcap", "--op", "rms_norm", "--seed", "3", "--json", "a.json")
    done = run_in(tmp_path, "-c", command, "conformance", *asked, program=warm() / "python")
    assert done.returncode == 0, done.stdout + done.stderr
    (tmp_path / "pytest.ini").write_text("[pytest]\nasyncio_default_fixture_loop_scope = function\n")
    plugin = ("-p", "evener_conformance.pytest_plugin") if not _announced() else ()
    options = ("--evener-backend", "cpu", "--evener-pretend", "--evener-seed", "3", "--evener-json", "b.json")
    # Other packages' plugins are not imported: one of them takes as long as the check.
    options += ("-p", "no:schemathesis", "-p", "no:hypothesispytest", "-p", "no:hydra_pytest")
    tested = run_in(tmp_path, "-m", "pytest", *plugin, *options, "-k", "rms_norm and not add and not gated",
                    program=warm() / "python")  # fmt: skip
    assert tested.returncode == 0 and "backend cpu, seed 3" in tested.stdout, tested.stdout + tested.stderr
    first, second = (json.loads((tmp_path / name).read_text()) for name in ("a.json", "b.json"))
    assert first["level"] == second["level"] == "L3" and first["seed"] == second["seed"] == 3
    norms = [[c for c in each["cases"] if c["subject"] == "rms_norm"] for each in (first, second)]
    assert norms[0] == norms[1] and norms[0]
    assert {"evener", "torch", "contracts", "packages"} <= first["versions"].keys()


def _announced() -> bool:
    from importlib_metadata import entry_points

    return any(e.value == "evener_conformance.pytest_plugin" for e in entry_points(group="pytest11"))
