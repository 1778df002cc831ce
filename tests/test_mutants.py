"""The mutation run: what counts as a mutant, how one is judged, how results are reviewed and counted."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import mutants
import pytest
from mutation import cpp_code, python_code
from mutation.mutant import Mutant
from mutation.reviewed import Review, read_reviews, review_of
from mutation.targets import NATIVE, TARGETS, TRITON
from mutation.trial import CAUGHT, EQUAL, NO_CASE, NOT_BUILT, SURVIVED, Bench, Verdict, judge
from planted_defects import PACKAGE

from evener_conformance.distributions import write_distribution

CPP = """\
#include <a - b>
// Not i + 1, "nor" this.
template <class T> INLINE T* row(const T* x, long i, long n) {
  const char* s = "i + 1";
  for (; i + 16 <= n; i += 16) put(y + i, bias ? x[i] + wide(bias[i]) : x[i]);
  return x + i * n;
}
"""
PYTHON = '''\
"""Not i + 1."""
LIMIT = 4

def f(x, n=3):
    """Nor i + 1."""
    if n < 2 and x.dtype is torch.float32:
        n = n.float()
    if n > 5:
        raise ValueError(f"{n + 1}")
    return tl.load(x + 1, mask=(x < n) & real, num_warps=4)
'''


def changes(found: list[Mutant]) -> set[tuple[str, str]]:
    return {(m.operator, m.now) for m in found}


def test_cpp_mutants_change_code_and_leave_comments_strings_and_templates_alone() -> None:
    found = list(cpp_code.mutants("a.h", CPP))
    assert {m.line for m in found} == {5, 6}
    assert changes(found) >= {
        ("bound", "for (; i + 16 < n; i += 16) put(y + i, bias ? x[i] + wide(bias[i]) : x[i]);"),
        ("off by one", "for (; i + 15 <= n; i += 16) put(y + i, bias ? x[i] + wide(bias[i]) : x[i]);"),
        ("dropped addend", "for (; i + 16 <= n; i += 16) put(y + i, bias ? x[i] : x[i]);"),
        ("ignored condition", "for (; i + 16 <= n; i += 16) put(y + i, false ? x[i] + wide(bias[i]) : x[i]);"),
        ("wrong dtype", "for (; i + 16 <= n; i += 16) put(y + i, rounded1<bf16>(bias ? x[i] + wide(bias[i]) : x[i]));"),
        ("stride", "return x + i * (n + 1);"),
        ("swapped operator", "return x - i * n;"),
    }


def test_python_mutants_change_what_is_computed_and_leave_refusals_and_launch_speed_alone() -> None:
    found = list(python_code.mutants("a.py", PYTHON))
    assert {m.line for m in found} == {6, 10}
    assert changes(found) >= {
        ("bound", "if n <= 2 and x.dtype is torch.float32:"), ("mask", "if n < 2 or x.dtype is torch.float32:"),
        ("wrong dtype", "if n < 2 and x.dtype is torch.float16:"),
        ("dropped mask", "return tl.load(x + 1, mask=x < n, num_warps=4)"),
        ("dropped addend", "return tl.load(x, mask=(x < n) & real, num_warps=4)"),
    }  # fmt: skip


def test_a_mutant_is_found_again_after_lines_have_moved() -> None:
    source = "a = b + c;\na = b + c;\n"
    first, second = (m for m in cpp_code.mutants("x/a.h", source) if m.now == "a = b - c;")
    assert (first.nth, second.nth) == (0, 1)
    assert second.apply(source) == "a = b + c;\na = b - c;\n"
    review = Review("a.h", "a = b + c;", "a = b - c;", 1, True, "why")
    moved = list(cpp_code.mutants("x/a.h", f"int z;\n{source}"))
    assert [m.line for m in moved if review_of(m, [review])] == [3]


def test_a_sample_is_the_same_for_a_seed_and_has_every_file_and_many_kinds_of_change() -> None:
    found = NATIVE.sample(1)
    assert [str(m) for m in found] == [str(m) for m in NATIVE.sample(1)] != [str(m) for m in NATIVE.sample(2)]
    assert {m.file.rpartition("/src/")[2] for m in found} == set(NATIVE.files)
    assert len({m.operator for m in found}) >= 6
    assert sum(target.count for target in TARGETS.values()) >= 50


@pytest.mark.parametrize(
    ("code", "out", "errors", "outcome", "by"),
    [
        (0, '{"wrong": ""}', "", SURVIVED, ""),
        (0, 'noise\n{"wrong": "linear: off"}', "", CAUGHT, "linear: off"),
        (0, '{"library": "abc"}', "", EQUAL, ""),
        (0, '{"unbuilt": "no"}', "", NOT_BUILT, "no"),
        (-11, "", "", CAUGHT, "SIGSEGV"),
        (1, "", "Traceback\nKeyError: 'x'", CAUGHT, "KeyError: 'x'"),
        (0, "", "", CAUGHT, "exit code 0"),
    ],
)
def test_how_the_kit_ended_is_the_verdict(code: int, out: str, errors: str, outcome: str, by: str) -> None:
    found = judge(code, out, errors, 1.0)
    assert found.outcome == outcome
    assert by in found.by


@pytest.mark.slow
def test_of_two_mutants_the_kit_catches_the_wrong_one_and_the_equivalent_one_survives(tmp_path: Path) -> None:
    path = "tests/packages/evener-backend-planted/evener_backend_planted/kernels.py"
    source = (PACKAGE / "evener_backend_planted/kernels.py").read_text()
    made = {m.now: m for m in python_code.mutants(path, source)}
    wrong = next(made[now] for now in made if now.startswith("found = wide.float() * torch.rsqrt(squares.float() * "))
    same = made['limit = 64 if planted("too-much-supported") else 1 << 31']
    write_distribution(
        tmp_path, "evener-backend-planted", {"evener.backends": {"planted": "evener_backend_planted:descriptor"}}
    )
    only = ["primitives/rms_norm[planted/planted_norm]"]
    bench = Bench(str(PACKAGE.relative_to(mutants.ROOT)), {"backend": "planted", "seed": 1, "only": only}, (tmp_path,))
    caught, survived = bench.run(wrong), bench.run(same)
    assert (caught.outcome, survived.outcome) == (CAUGHT, SURVIVED)
    assert caught.by.startswith(f"{only[0]}: 5 rows, hidden=60")


@dataclass(frozen=True)
class PretendedBench(Bench):
    """A kit whose check ``wrong`` fails, with a mutant only unless ``always``, and whose check ``empty`` has no case.

    ``calls``: with a mutant or not, and which check.
    """

    wrong: str = ""
    always: bool = False
    empty: str = ""
    calls: list[tuple[bool, str]] = field(default_factory=list)

    def run(self, mutant: Mutant | None, **more: Any) -> Verdict:
        if "list" in more:
            names = ("primitives/take_rows[triton/triton.take_rows]", SOFTCAP, "memory/softcap[triton/triton.softcap]")
            return Verdict(SURVIVED, "", 1.0, {"checks": names})
        (check,) = more["only"]
        self.calls.append((mutant is not None, check))
        if check == self.empty:
            return Verdict(CAUGHT, NO_CASE, 1.0, {"seconds": {check: 1.0}})
        if check == self.wrong and (self.always or mutant is not None):
            return Verdict(CAUGHT, "it is off", 1.0)
        return Verdict(SURVIVED, "", 1.0, {"seconds": {check: 1.0}})


SOFTCAP = "primitives/softcap[triton/triton.softcap]"


def test_likely_checks_run_in_their_order_and_each_once_without_a_mutant() -> None:
    file = "evener_kernels_triton/jit/rows.py"
    one, other = TRITON.mutants_of(file)[:2]
    bench = PretendedBench(TRITON.sources, {})
    runs = mutants.LikelyRuns(TRITON, bench)
    assert runs.judge(one).outcome == SURVIVED
    rows = "primitives/take_rows[triton/triton.take_rows]"
    assert bench.calls == [(False, SOFTCAP), (True, SOFTCAP), (False, rows), (True, rows)]
    bench = PretendedBench(TRITON.sources, {}, wrong=SOFTCAP)
    runs = mutants.LikelyRuns(TRITON, bench)
    assert [runs.judge(each).outcome for each in (one, other)] == [CAUGHT, CAUGHT]
    assert bench.calls == [(False, SOFTCAP), (True, SOFTCAP), (True, SOFTCAP)]
    bench = PretendedBench(TRITON.sources, {}, empty=SOFTCAP)
    runs = mutants.LikelyRuns(TRITON, bench)
    assert runs.judge(one).outcome == SURVIVED
    assert bench.calls == [(False, SOFTCAP), (False, rows), (True, rows)]
    with pytest.raises(RuntimeError, match=r"softcap.* does not pass without a mutant: it is off"):
        mutants.LikelyRuns(TRITON, PretendedBench(TRITON.sources, {}, wrong=SOFTCAP, always=True)).judge(one)


def test_a_verdict_names_files_from_the_root_of_the_repository(tmp_path: Path) -> None:
    (tmp_path / "evener_conformance.py").write_text("raise ValueError(__file__)\n")
    found = Bench(str(tmp_path), {"backend": "cpu", "seed": 1}).run(None)
    assert found.by == f"the kit ended with an error: ValueError: {tmp_path}/evener_conformance.py"


def test_a_mutant_that_hangs_is_ended_and_counts_as_caught(tmp_path: Path) -> None:
    """Computing has a limit on processor time, so that a busy machine catches no more; waiting has one on wall time."""
    (tmp_path / "evener_conformance.py").write_text("import time\ntime.sleep(600)\n")
    found = Bench(str(tmp_path), {"backend": "cpu", "seed": 1}, limit=0.1).run(None)
    assert (found.outcome, found.by) == (CAUGHT, "the kit did not end within 1 s")
    (tmp_path / "evener_conformance.py").write_text(
        "import sys\nprint('linear', file=sys.stderr, flush=True)\nwhile 1: 0\n"
    )
    found = Bench(str(tmp_path), {"backend": "cpu", "seed": 1}, limit=1.0).run(None)
    assert (found.outcome, found.by) == (CAUGHT, "the kit was ended by SIGXCPU, in linear")


@pytest.mark.slow
def test_a_run_that_was_broken_off_goes_on(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out, faults = tmp_path / "out.jsonl", list(mutants.known_defects())
    done = [{"target": "planted", "operator": name, "outcome": CAUGHT} for name in faults]
    done += [{"target": t.name, "file": m.file, "line": m.line, "now": m.now, "outcome": CAUGHT}
             for t in TARGETS.values() for m in t.sample(1)]  # fmt: skip
    out.write_text("".join(json.dumps(each) + "\n" for each in done))
    assert mutants.main(["--seed", "1", "--out", str(out)]) == 0
    assert f"{len(done) - len(faults)} of {len(done) - len(faults)} mutants" in capsys.readouterr().out
    assert out.read_text().count("\n") == len(done), "nothing ran again"


def test_reviews_that_lack_a_reason_are_refused(tmp_path: Path) -> None:
    file = tmp_path / "reviewed.yaml"
    file.write_text("- {file: a.h, was: x, now: y}\n")
    with pytest.raises(ValueError, match=r"entry 1 has .*; it needs file, was, now, and either equivalent or survives"):
        read_reviews(file)
    file.write_text("- {file: a.h, was: x, now: y, survives: nobody looks}\n")
    assert read_reviews(file) == [Review("a.h", "x", "y", 0, False, "nobody looks")]


def test_reviews_name_lines_that_exist() -> None:
    known: dict[str, list[str]] = {}
    for target in TARGETS.values():
        for file in target.files:
            path = mutants.ROOT / target.sources / file
            known[file] = [line.strip() for line in path.read_text().splitlines()]
    for review in read_reviews():
        (lines,) = (lines for file, lines in known.items() if f"/{file}".endswith(f"/{review.file}"))
        assert lines.count(review.was) > review.nth, review


def result(outcome: str, **more: Any) -> dict[str, Any]:
    return {"target": "cpu-native", "file": "a.h", "line": 1, "was": "x", "now": "y", "outcome": outcome, **more}


@pytest.mark.parametrize(
    ("records", "wrong"),
    [
        ([result("caught")] * 19 + [result("survived", why="seen")], []),
        ([result("caught")] * 18 + [result("equivalent", why="seen")], []),
        ([result("caught")] * 18 + [result("survived", why="seen")], ["fewer than 95% were caught"]),
        ([result("caught")] * 19 + [result("survived", why="not reviewed")], ["not reviewed: a.h:1: x -> y"]),
        ([result("caught", stale=True)], ["reviewed as a survivor, but caught: a.h:1"]),
        ([result("caught"), {"target": "planted", "operator": "norm-half", "outcome": "survived"}],
         ["not caught: planted fault norm-half"]),
    ],
)  # fmt: skip
def test_a_run_fails_if_too_few_are_caught_or_nobody_has_judged_a_survivor(
    records: list[dict[str, Any]], wrong: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert mutants.summary(records) == wrong
    assert "mutants that are not equivalent were caught" in capsys.readouterr().out


def test_the_recorded_run_met_its_goal_and_the_page_has_its_counts() -> None:
    records = [json.loads(line) for line in mutants.RESULTS.read_text().splitlines()]
    assert mutants.summary(records) == []
    made = [r for r in records if r["target"] != "planted"]
    assert len(made) >= 50
    assert {r["target"] for r in made} == set(TARGETS)
    page = (mutants.ROOT / "docs/conformance.md").read_text()
    for target in TARGETS:
        found = Counter(r["outcome"] for r in made if r["target"] == target)
        counts = [found.total(), found["equivalent"], found["caught"], found["survived"]]
        assert f"| `{target}` | {' | '.join(map(str, counts))} |" in page
