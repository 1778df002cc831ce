"""Mutants of our own kernels, each judged by the default conformance kit: how much "the kit passes" is worth.

    python scripts/mutants.py [--seed 1] [--target NAME …] [--only TEXT] [--list] [--jobs N] [--out FILE]

A mutant is a copy of a backend with one small fault: a bound off by one, a wrong stride, a dropped bias, a narrower
dtype, a swapped operator. ``mutation/targets.py`` lists the mutated code and the exceptions. The mutants of a seed are
always the same while the files are. Each runs in a process of its own with a time limit; the kit stops at the first
wrong case. A mutant that crashes or hangs the kit, or ends it with an error, is caught. Limits are on processor time,
so that a busy machine catches no more. With ``--out``, mutants that the file has already are not run again: a run that
was broken off goes on.

- ``cpu-native``: C++, compiled with -O1 into a cache folder of its own. A mutant whose library has the same bytes as
  that of the original is equivalent, and one that does not compile is none. The whole kit runs.
- ``cpu-python``: the Python around it. The whole kit runs.
- ``triton``: under Triton's interpreter, in float32, because the interpreter does not round to nearest. The whole kit
  would take an hour there, so only the checks that most likely find a mutant run. What they catch the kit catches; what
  they do not catch counts as a survivor.

Then each fault of tests/packages/evener-backend-planted runs in the same way.

``mutation/reviewed.yaml`` says, as a person has judged, which survivors are equivalent (no input can tell them apart)
and why the others survive. The exit code is 0 if the kit catches at least 95 of 100 mutants that are not equivalent and
every planted fault, every survivor is reviewed, and no review contradicts what was seen.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import re
import sys
import tempfile
import threading
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

from mutation.mutant import Mutant
from mutation.reviewed import Review, read_reviews, review_of
from mutation.targets import NATIVE, PYTHON, TARGETS, TRITON, Target
from mutation.trial import CAUGHT, EQUAL, NO_CASE, NOT_BUILT, ROOT, SURVIVED, Bench, Verdict
from planted_defects import PACKAGE, install, known_defects

from evener_conformance.distributions import write_distribution

# At the end: this folder has a module named like one of Python's own, profile.
sys.path.append(str(ROOT / "benchmarks"))

from machine import cpu_name

RESULTS = ROOT / "docs/results/mutants.jsonl"
EQUIVALENT = "equivalent"
LEAST_CAUGHT = 0.95
#: The seed of the kit's inputs.
KIT_SEED = 1
#: The last option wins: mutants are built in half the time.
_COMPILER = '#!/bin/sh\nexec "{cxx}" "$@" -O1\n'

Record = dict[str, Any]


def native_bench(folder: Path) -> Bench:
    """The CPU backend with its kernels compiled anew."""
    compiler = folder / "cxx"
    compiler.write_text(_COMPILER.format(cxx=os.environ.get("CXX", "g++")))
    compiler.chmod(0o755)
    spec = {"backend": "cpu", "seed": KIT_SEED, "library": ""}
    return Bench(NATIVE.sources, spec, environ={"CXX": str(compiler)})


def python_bench() -> Bench:
    """The CPU backend with the kernels that this machine has compiled already, or compiles now."""
    return Bench(PYTHON.sources, {"backend": "cpu", "seed": KIT_SEED}, environ={"XDG_CACHE_HOME": _cache_home()})


def _cache_home() -> str:
    return os.environ.get("XDG_CACHE_HOME") or str(Path.home() / ".cache")


def triton_bench(folder: Path) -> Bench:
    """The Triton kernels on host memory, interpreted."""
    site = folder / "interpreted"
    write_distribution(
        site, "evener-backend-interpreted", {"evener.backends": {"interpreted": "triton_host:descriptor"}}
    )
    spec = {"backend": "interpreted", "seed": KIT_SEED, "dtypes": ["float32"], "imports": ["interpreted"]}
    environ = {"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    return Bench(TRITON.sources, spec, (site, ROOT / "backends/triton/tests"), environ, 3600.0)


def planted_bench(folder: Path, defect: str) -> Bench:
    """The backend with planted faults; ``folder`` has it installed."""
    spec = {"backend": "planted", "seed": KIT_SEED}
    return Bench(str(PACKAGE.relative_to(ROOT)), spec, (folder,), {"PLANTED_DEFECT": defect})


class Runs:
    """Runs mutants of the CPU backend, after the backend without a mutant has passed.

    Raises:
        RuntimeError: it does not pass.
    """

    def __init__(self, target: Target, bench: Bench) -> None:
        self._target, self._bench = target, bench
        found = bench.run(None)
        if found.outcome != SURVIVED:
            raise RuntimeError(f"{target.name}: the kit does not pass without a mutant: {found.outcome} {found.by}")
        print(f"{target.name}: the kit passes without a mutant, in {found.seconds:.0f} s", flush=True)
        self._library = {"library": found.answer["library"]} if target is NATIVE else {}

    def judge(self, mutant: Mutant) -> Verdict:
        """The kit's verdict on a mutant."""
        return self._bench.run(mutant, first=self._target.first(mutant), **self._library)


class LikelyRuns:
    """Runs mutants of the Triton kernels over the checks that most likely find them, one after another until one fails.
    A check runs without a mutant first, once, and must pass; one whose kernel takes no case of it is left out: the op
    ``linear`` has kernels that take stored weights alone.

    Raises:
        RuntimeError: it does not pass.
    """

    def __init__(self, target: Target, bench: Bench) -> None:
        self._target, self._bench = target, bench
        self._all: list[str] = bench.run(None, list=True).answer["checks"]
        self._seconds: dict[str, float] = {}
        self._empty: set[str] = set()
        self._one = threading.Lock()

    def judge(self, mutant: Mutant) -> Verdict:
        """The kit's verdict on a mutant; one that survives might not survive the rest of the kit."""
        seconds = 0.0
        for check in self._likely(mutant):
            with self._one:
                if check not in self._seconds:
                    self._run_without(check)
            if check in self._empty:
                continue
            found = replace(self._bench, limit=120.0 + 10 * self._seconds[check]).run(mutant, only=[check])
            seconds += found.seconds
            if found.outcome != SURVIVED:
                return replace(found, seconds=seconds)
        return Verdict(SURVIVED, "", seconds)

    def _likely(self, mutant: Mutant) -> list[str]:
        areas = "(primitives|attention|composites)/"
        names = (re.compile(rf"^{'' if '/' in name else areas}{re.escape(name)}\[triton/triton\.")
                 for name in self._target.first(mutant))  # fmt: skip
        return [check for name in names for check in self._all if name.search(check)]

    def _run_without(self, check: str) -> None:
        found = self._bench.run(None, only=[check])
        if found.outcome != SURVIVED and found.by != NO_CASE:
            raise RuntimeError(f"{self._target.name}: {check} does not pass without a mutant: {found.by}")
        if found.by == NO_CASE:
            self._empty.add(check)
        what = "has no case" if check in self._empty else "passes without a mutant"
        print(f"{self._target.name}: {check} {what}, in {found.seconds:.0f} s", flush=True)
        self._seconds |= found.answer["seconds"]


def runs_of(name: str, folder: Path) -> Runs | LikelyRuns:
    """What runs the mutants of a target; ``folder`` is its own."""
    if name == TRITON.name:
        return LikelyRuns(TRITON, triton_bench(folder))
    return Runs(TARGETS[name], native_bench(folder) if name == NATIVE.name else python_bench())


def record(target: str, mutant: Mutant, found: Verdict, review: Review | None, command: str) -> Record:
    """A line of the results."""
    outcome, why = found.outcome, found.by
    if outcome == EQUAL:
        outcome, why = EQUIVALENT, "the compiler makes the same library"
    elif outcome == SURVIVED:
        outcome = EQUIVALENT if review and review.equivalent else SURVIVED
        why = review.why if review else "not reviewed"
    return {
        **_where(command), "target": target, "file": mutant.file, "line": mutant.line, "operator": mutant.operator,
        "was": mutant.was, "now": mutant.now, "outcome": outcome, ("by" if outcome == CAUGHT else "why"): why[:300],
    }  # fmt: skip


def _where(command: str) -> Record:
    return {
        "device": f"{cpu_name()}, {len(os.sched_getaffinity(0))} cores", "model": "none: kernels alone",
        "date": datetime.date.today().isoformat(), "command": command,
    }  # fmt: skip


def earlier(wanted: argparse.Namespace) -> list[Record]:
    """What the file of ``--out`` holds already."""
    if wanted.out is None or not wanted.out.exists():
        return []
    return [json.loads(line) for line in wanted.out.read_text("utf-8").splitlines()]


def generated(name: str, wanted: argparse.Namespace, reviews: Sequence[Review], command: str) -> Iterator[Record]:
    """Records of a target's mutants."""
    mutants = [m for m in TARGETS[name].sample(wanted.seed) if wanted.only in str(m)]
    if wanted.list or not mutants:
        print(*mutants, sep="\n")
        return
    done = {(r["file"], r["line"], r["now"]) for r in earlier(wanted) if r["target"] == name}
    mutants = [m for m in mutants if (m.file, m.line, m.now) not in done]
    if not mutants:
        return
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(wanted.jobs) as pool:
        for mutant, found in zip(mutants, pool.map(runs_of(name, Path(folder)).judge, mutants), strict=True):
            if found.outcome == NOT_BUILT:
                print(f"not built: {mutant}: {found.by}", flush=True)
                continue
            review = review_of(mutant, reviews)
            made = record(name, mutant, found, review, command)
            stale = "; REVIEWED AS A SURVIVOR" * (review is not None and made["outcome"] == CAUGHT)
            print(f"{made['outcome']}: {mutant}: {made.get('by') or made['why']}{stale} ({found.seconds:.0f} s)",
                  flush=True)  # fmt: skip
            yield made | ({"stale": True} if stale else {})


def planted(wanted: argparse.Namespace, command: str) -> Iterator[Record]:
    """Records of the planted faults."""
    done = {r["operator"] for r in earlier(wanted) if r["target"] == "planted"}
    faults = {n: what for n, what in known_defects().items() if wanted.only in f"{n}: {what}" and n not in done}
    if wanted.list or not faults:
        print(*faults, sep="\n")
        return
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(wanted.jobs) as pool:
        site = Path(folder) / "site"
        install(site)
        right = planted_bench(site, "").run(None)
        if right.outcome != SURVIVED:
            raise RuntimeError(f"the backend without a planted fault does not pass: {right.by}")
        judged = pool.map(lambda name: planted_bench(site, name).run(None), faults)
        for (name, what), found in zip(faults.items(), judged, strict=True):
            print(f"{found.outcome}: {name}: {found.by or what} ({found.seconds:.0f} s)", flush=True)
            yield {**_where(command), "target": "planted", "operator": name, "was": "", "now": what,
                   "outcome": found.outcome, ("by" if found.outcome == CAUGHT else "why"): found.by[:300]}  # fmt: skip


def summary(records: Sequence[Record]) -> list[str]:
    """The problems of a run's records, after its counts were printed."""
    wrong = []
    for name in dict.fromkeys(r["target"] for r in records):
        counts = Counter(r["outcome"] for r in records if r["target"] == name)
        print(f"{name}: {', '.join(f'{n} {outcome}' for outcome, n in counts.items())}")
    made = [r for r in records if r["target"] != "planted" and r["outcome"] != EQUIVALENT]
    caught = sum(r["outcome"] == CAUGHT for r in made)
    print(f"{caught} of {len(made)} mutants that are not equivalent were caught")
    if caught < LEAST_CAUGHT * len(made):
        wrong.append(f"fewer than {LEAST_CAUGHT:.0%} were caught")
    wrong += [f"not caught: planted fault {r['operator']}" for r in records
              if r["target"] == "planted" and r["outcome"] != CAUGHT]  # fmt: skip
    wrong += [f"not reviewed: {r['file']}:{r['line']}: {r['was']} -> {r['now']}" for r in records
              if r.get("why") == "not reviewed"]  # fmt: skip
    wrong += [f"reviewed as a survivor, but caught: {r['file']}:{r['line']}" for r in records if r.get("stale")]
    return wrong


def main(argv: Sequence[str]) -> int:
    """Run the mutants; see above."""
    parser = argparse.ArgumentParser(description="Judge mutants of our kernels by the conformance kit.")
    parser.add_argument("--seed", type=int, default=1, help="which mutants (default: 1)")
    parser.add_argument(
        "--target", action="append", choices=[*TARGETS, "planted"], help="default: all; may be repeated"
    )
    parser.add_argument("--only", default="", metavar="TEXT", help="mutants whose description contains this text")
    parser.add_argument("--list", action="store_true", help="show the mutants, run nothing")
    parser.add_argument("--jobs", type=int, default=1, metavar="N", help="mutants at a time (default: 1)")
    parser.add_argument("--out", type=Path, help="add a record of each mutant to this file, unless it has one")
    wanted = parser.parse_args(argv)
    command = f"python scripts/mutants.py --seed {wanted.seed}"
    reviews, records = read_reviews(), [] if wanted.list else earlier(wanted)
    for name in wanted.target or [*TARGETS, "planted"]:
        rows = planted(wanted, command) if name == "planted" else generated(name, wanted, reviews, command)
        for row in rows:
            records.append(row)
            if wanted.out is not None:
                with wanted.out.open("a", encoding="utf-8") as file:
                    file.write(json.dumps(row, ensure_ascii=False) + "\n")
    if wanted.list:
        return 0
    wrong = summary(records)
    print(*wrong, sep="\n", file=sys.stderr)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
