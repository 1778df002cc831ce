"""Requests that arrive at random while others are answered: how evenly tokens come, for fixed token budgets of a step
and for limits that follow what steps take: ``measured`` and ``pace``, the values of ``generation.step_limit``.

    python benchmarks/mixed_load.py MODEL --budgets 512,1024,2048,4096,8192,measured,pace
    python benchmarks/mixed_load.py qwen3-8b --seconds 30 --set backend=NAME

MODEL is a folder, or a name of ``model_configs.py`` with random weights. The engine runs in this process, without a
front end: tokens in, tokens out. Requests arrive as a Poisson process, with prompts and answers of evenly spread
lengths.

The first load is ``--rate`` requests a second, which may be more than can be computed: a request that finds
``--waiting`` others waiting is refused, as by a server. The fixed budget that computes most tokens a second there gives
the capacity, of which the other loads are parts; budgets run in the opposite order at every second of these. The first
part of each run is left out. Whoever is not answered at its end is aborted. Prints a JSON line for each budget and
load, with milliseconds between the tokens of an answer (``itl``) and to its first token (``ttft``), then a table.
"""

from __future__ import annotations

import argparse
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import after_stdlib  # noqa: F401
from arrivals import offsets
from evener_pacing.timed_executor import TimedExecutor, TimedLimit
from machine import facts, record
from model_configs import CONFIGS, write

from evener.config import from_overrides
from evener.engine.batching.step_limit import StepLimit, limit_steps
from evener.engine.controller.controller import Controller
from evener.engine.processes.start import build_controller
from evener.engine.wire.messages import Finished, NewRequest, Sampling, Tokens


def parser() -> argparse.ArgumentParser:
    """The options."""
    made = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    made.add_argument("model", help="model folder, or a name of model_configs.py")
    made.add_argument("--budgets", default="512,1024,2048,4096,8192,measured,pace", help="tokens of a step, or limits")
    made.add_argument("--rate", type=float, default=64.0, help="requests a second of the first load")
    made.add_argument("--loads", default="0.5,0.8,0.95", help="parts of the capacity, in the order of the runs")
    made.add_argument("--at-loads", help="budgets at these loads (default: all of --budgets)")
    made.add_argument("--full-seconds", type=float, help="of each run of the first load (default: as --seconds)")
    made.add_argument("--waiting", type=int, default=32, help="requests that may wait")
    made.add_argument("--prompts", default="200,8000", help="tokens of the shortest and the longest prompt")
    made.add_argument("--answers", default="32,224", help="the same of answers")
    made.add_argument("--seconds", type=float, default=30.0, help="of each run")
    made.add_argument("--skip", type=float, default=6.0, help="seconds of a run that are left out")
    made.add_argument("--first", type=float, default=3.0, help="seconds of a run of each budget before all others")
    made.add_argument("--seed", type=int, default=0)
    made.add_argument("--vocab", type=int, default=1000, help="token ids are drawn below this")
    made.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="a setting of the engine")
    made.add_argument("--out", type=Path, help="append the JSON lines to this file")
    return made


class FixedBudget(TimedLimit):
    """Each step may have the same number of tokens."""

    def __init__(self, tokens: int) -> None:
        self._tokens = tokens

    def allowed(self, most: int, running: Sequence[object], waiting: Sequence[object]) -> int:
        return min(most, self._tokens)


@dataclass
class Arrival:
    """A request: seconds from the start, prompt ids, tokens of the answer."""

    at: float
    prompt: list[int]
    answer: int


@dataclass
class Seen:
    """What came of a run's arrivals, in seconds from its start."""

    gaps: list[float] = field(default_factory=list)
    firsts: list[float] = field(default_factory=list)
    refused: int = 0
    finished: int = 0
    computed: int = 0
    steps: int = 0
    longest: int = 0


def arrive(args: argparse.Namespace, rate: float, seconds: float) -> list[Arrival]:
    """The requests of a run."""
    made = random.Random(args.seed)
    prompts, answers = ([int(n) for n in each.split(",")] for each in (args.prompts, args.answers))
    ids = [made.randrange(10, args.vocab) for _ in range(2 * prompts[1])]
    found = []
    for at in offsets(int(2 * rate * seconds) + 20, rate, seed=args.seed):
        if at >= seconds:
            break
        length, first = made.randint(*prompts), made.randrange(prompts[1])
        found.append(Arrival(at, ids[first : first + length], made.randint(*answers)))
    return found


def play(
    controller: Controller, arrivals: Sequence[Arrival], waiting: int, skip: float, seconds: float,
    clock: Callable[[], float] = time.perf_counter, sleep: Callable[[float], None] = time.sleep,
) -> tuple[Seen, float]:  # fmt: skip
    """Send each request at its time; after ``seconds``, abort what is left.

    Args:
        waiting: requests that may wait; more are refused.
        skip: seconds that are left out, at the beginning.

    Returns:
        What was seen after these seconds, and how many there were.
    """
    seen, scheduler, began = Seen(), controller.scheduler, clock()
    last: dict[str, float] = {}
    due = 0
    while (now := clock() - began) < seconds:
        while due < len(arrivals) and arrivals[due].at <= now:
            each = arrivals[due]
            if len(scheduler.waiting) < waiting:
                asked = Sampling(temperature=0.0)
                controller.handle([NewRequest(id=str(due), prompt=each.prompt, max_tokens=each.answer, sampling=asked)])
            else:
                seen.refused += now >= skip
            due += 1
        if controller.idle:
            sleep((arrivals[due].at if due < len(arrivals) else seconds) - now)
            continue
        before, made = scheduler.stats.computed_tokens, scheduler.stats.steps
        events, now = controller.step(), clock() - began
        if now >= skip:
            seen.computed += scheduler.stats.computed_tokens - before
            seen.steps += scheduler.stats.steps - made
            seen.longest = max(seen.longest, len(scheduler.waiting))
        for event in events:
            if isinstance(event, Tokens):
                if now >= skip and event.id in last:
                    seen.gaps.append(now - last[event.id])
                elif now >= skip:
                    seen.firsts.append(now - arrivals[int(event.id)].at)
                last[event.id] = now
            elif isinstance(event, Finished):
                if event.reason == "error":
                    raise SystemExit(f"a request failed: {event.error}")
                seen.finished += now >= skip
    lasted = clock() - began - skip
    scheduler.end_all("abort")
    while not controller.idle:
        controller.step()
    return seen, lasted


def half_and_99(seconds: Sequence[float]) -> tuple[float, float]:
    """Milliseconds: the median and the 99th percentile; 0 of fewer than two."""
    if len(seconds) < 2:
        return 0.0, 0.0
    cuts = statistics.quantiles(seconds, n=100, method="inclusive")
    return cuts[49] * 1e3, cuts[98] * 1e3


def limit_of(folder: str, keys: Mapping[str, Any], max_reqs: int, budget: str) -> StepLimit:
    """What limits steps to ``budget``: tokens, or the name of a limit, which gets the engine's settings ``keys``."""
    if budget.isdigit():
        return FixedBudget(int(budget))
    config = from_overrides(folder, {**keys, "infer.step_tokens": "auto", "generation.step_limit": budget})
    limit = limit_steps(config, max_reqs, True)
    if type(limit) is StepLimit:
        raise SystemExit(f"{budget} does not limit steps; leave infer.step_target=0 out")
    return limit


def run(
    controller: Controller, limit: StepLimit, args: argparse.Namespace, budget: str, rate: float, seconds: float
) -> dict[str, Any]:
    """One budget under one load."""
    inner = controller.executor.inner if isinstance(controller.executor, TimedExecutor) else controller.executor
    controller.scheduler.limit, controller.executor = limit, limit.wrap(inner)
    skip = min(args.skip, seconds / 2)
    seen, lasted = play(controller, arrive(args, rate, seconds), args.waiting, skip, seconds)
    median, p99 = half_and_99(seen.gaps)
    first, late = half_and_99(seen.firsts)
    return {
        "budget": budget, "requests_s": round(rate, 2), "itl_p50_ms": round(median, 2), "itl_p99_ms": round(p99, 2),
        "itl_max_ms": round(max(seen.gaps, default=0.0) * 1e3, 2),
        "p99_to_p50": round(p99 / median, 2) if median else 0,
        "ttft_p50_ms": round(first, 1), "ttft_p99_ms": round(late, 1),
        "computed_tokens_s": round(seen.computed / lasted), "steps": seen.steps, "finished": seen.finished,
        "refused": seen.refused, "most_waiting": seen.longest, "measured_s": round(lasted, 2),
    }  # fmt: skip


def runs(controller: Controller, args: argparse.Namespace, limits: Mapping[str, StepLimit]) -> Iterator[dict[str, Any]]:
    """All budgets under all loads; the first load finds the capacity. What a limit has learnt stays from run to run."""
    budgets, others = args.budgets.split(","), (args.at_loads or args.budgets).split(",")
    for budget in budgets if args.first else ():
        run(controller, limits[budget], args, budget, args.rate, args.first)
    full = []
    for budget in budgets:
        seconds = args.full_seconds or args.seconds
        full.append({"load": "full", **run(controller, limits[budget], args, budget, args.rate, seconds)})
        yield full[-1]
    fixed = [row for row in full if row["budget"].isdigit()] or full
    mean = sum(int(n) for each in (args.prompts, args.answers) for n in each.split(",")) / 2
    capacity = max(row["computed_tokens_s"] for row in fixed) / mean
    for index, load in enumerate(float(each) for each in args.loads.split(",") if each):
        for budget in others[:: -1 if index % 2 else 1]:
            yield {"load": load, **run(controller, limits[budget], args, budget, load * capacity, args.seconds)}


def table(rows: Sequence[dict[str, Any]]) -> str:
    """A Markdown table."""
    names = ("load", "requests_s", "budget", "itl_p50_ms", "itl_p99_ms", "p99_to_p50", "ttft_p50_ms", "ttft_p99_ms",
             "computed_tokens_s", "refused")  # fmt: skip
    lines = ["| " + " | ".join(names) + " |", "| --- " * len(names) + "|"]
    return "\n".join([*lines, *("| " + " | ".join(str(row[name]) for name in names) + " |" for row in rows)])


def main(argv: Sequence[str]) -> int:
    """Measure and print."""
    args = parser().parse_args(argv)
    longest = sum(int(each.split(",")[1]) for each in (args.prompts, args.answers))
    budgets = [each for each in f"{args.budgets},{args.at_loads or ''}".split(",") if each]
    with tempfile.TemporaryDirectory() as made:
        known = args.model in CONFIGS
        folder = write(args.model, Path(made) / args.model) if known else Path(args.model)
        keys: dict[str, Any] = {"load": "dummy"} if known else {}
        keys |= {"infer.max_seq_len": longest + 16, "infer.prefix_cache": False}
        keys |= dict(each.split("=", 1) for each in args.set)
        controller, ready = build_controller(from_overrides(str(folder), keys), streaming=True)
        try:
            controller.executor.attach()
            if any(each.isdigit() and int(each) > controller.scheduler.step_tokens for each in budgets):
                raise SystemExit(f"the engine's steps have at most {controller.scheduler.step_tokens} tokens")
            asked = {"model": Path(args.model).name, "dtype": ready.info.dtype, "device": ready.info.device,
                     "prompts": args.prompts, "answers": args.answers, "waiting": args.waiting}  # fmt: skip
            limits = {each: limit_of(str(folder), keys, ready.info.max_reqs, each) for each in budgets}
            rows = []
            for row in runs(controller, args, limits):
                rows.append(row)
                record({"what": "mixed load", **asked, **row, **facts()}, args.out)
        finally:
            controller.close()
    print("\n" + table(rows))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
