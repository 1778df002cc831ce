"""The kit's parts with several processes at a time: each check has one of its own. Torch-free.

A GPU's kernels are compiled one by one by a processor's core, so most of a run's time is that of one core.
"""

from __future__ import annotations

import os
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial

import msgspec

from evener_conformance.first_contact.child import Task
from evener_conformance.first_contact.evidence_file import MOST_CASES, Outcome, Part
from evener_conformance.first_contact.journal import Journal
from evener_conformance.first_contact.private_data import Redactor
from evener_conformance.first_contact.supervisor import Findings, run_part

#: From the worst: a part has the outcome of its worst check.
_WORST: Sequence[Outcome] = ("failed", "passed", "not applicable")


#: Areas whose checks take longest. They start first, so that none of them runs alone at the end.
_LONGEST = ("formats", "composites", "memory")


class ParallelParts:
    """Parts whose checks run in a pool of processes, all parts at once."""

    def __init__(self, tasks: Mapping[str, Sequence[Task]], run: Callable[[Task], tuple[Part, Findings]],
                 pool: ThreadPoolExecutor) -> None:  # fmt: skip
        self._running: dict[str, list[Future[tuple[Part, Findings]]]] = {
            name: [pool.submit(run, task) for task in each] for name, each in tasks.items()
        }

    def __contains__(self, name: str) -> bool:
        return name in self._running

    def wait(self, name: str) -> tuple[Part, Findings]:
        """A part, once all its checks have ended. Its seconds are those of all its processes."""
        return _merge(name, [future.result() for future in self._running[name]])


@contextmanager
def start_checks(
    task: Task, areas: Sequence[str], listed: Mapping[str, Sequence[str]], jobs: int, silence: float,
    redact: Redactor, journal: Journal | None,
) -> Iterator[ParallelParts]:  # fmt: skip
    """Start a process for each check of some areas.

    Args:
        task: what all have in common.
        listed: area → names of its checks.
        jobs: processes at a time.
    """
    stop = threading.Event()
    tasks = {area: [msgspec.structs.replace(task, part=area, area=area, only=name) for name in listed[area]]
             for area in sorted(areas, key=lambda area: area not in _LONGEST) if listed.get(area)}  # fmt: skip
    # References are computed on the host, in as many threads as there are cores if nobody says otherwise.
    threads = max(1, (os.cpu_count() or 1) // jobs)
    with ThreadPoolExecutor(jobs) as pool:
        try:
            run = partial(run_or_recall, silence=silence, redact=redact, journal=journal, stop=stop, threads=threads)
            yield ParallelParts(tasks, run, pool)
        except BaseException:
            stop.set()
            pool.shutdown(wait=False, cancel_futures=True)
            raise


def run_or_recall(
    task: Task, silence: float, redact: Redactor, journal: Journal | None, stop: threading.Event | None = None,
    threads: int = 0,
) -> tuple[Part, Findings]:  # fmt: skip
    """What the journal has of a part or check; otherwise run it, and add it to the journal."""
    if journal is not None and (before := journal.find(task)) is not None:
        return before
    part, found = run_part(task, silence, redact, stop, threads)
    if journal is not None and not (stop is not None and stop.is_set()):
        journal.add(task, part, found)
    return part, found


def _merge(name: str, ended: Sequence[tuple[Part, Findings]]) -> tuple[Part, Findings]:
    parts, counts, all_found = [part for part, _ in ended], Counter[str](), Findings()
    for part, found in ended:
        counts.update(part.counts)
        all_found.timings += found.timings
        for kind, facts in found.facts.items():
            all_found.facts[kind] |= facts
    outcomes = {part.outcome for part in parts}
    merged = Part(
        name, next(each for each in _WORST if each in outcomes), round(sum(part.seconds for part in parts), 1),
        "\n".join(part.detail for part in parts if part.detail), dict(counts),
        tuple(case for part in parts for case in part.cases)[:MOST_CASES],
        next((part.printed for part in parts if part.printed), ""),
    )  # fmt: skip
    return merged, all_found
