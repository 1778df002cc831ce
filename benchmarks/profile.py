"""Profile steps of the engine: a table by range, and a trace for chrome://tracing or Perfetto.

    python benchmarks/profile.py MODEL --fixed 16,128,64 --steps 8:24 --trace trace.json

Ranges: ``step`` (one plan, with its requests and tokens), ``forward``, ``logits``, and one for each op that the model
calls, by its name in the manifest. Steps before the first one are the warm-up. If steps are replayed as graphs there is
one range for each step; ``infer.use_cuda_graph=false`` shows what is inside.
"""

from __future__ import annotations

import argparse
import functools
import json
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import after_stdlib  # noqa: F401
from machine import facts
from workload import Job, fixed


class StepProfiler:
    """Runs torch's profiler over a range of an engine's steps.

    Args:
        worker: the engine's worker, in this process.
        first, last: steps to profile, from 0; ``last`` is not part of it.

    Attributes:
        profile: torch's, once the range has begun.
        steps: (requests, tokens, seconds) of each step that was profiled.
    """

    def __init__(self, worker: Any, first: int, last: int) -> None:
        import torch

        self._torch, self._worker = torch, worker
        self.first, self.last = first, last
        self.profile: Any = None
        self.steps: list[tuple[int, int, float]] = []
        self._count, self._on = 0, False
        self._mark()

    def _mark(self) -> None:
        """Put a named range around the step, the forward pass and each op."""
        runner = self._worker.runner
        for owner, name in ((runner, "forward"), (runner, "logits")):
            setattr(owner, name, self._ranged(name, getattr(owner, name)))
        for site in self._worker.assembly.build.sites:
            site.table = tuple(self._ranged(f"op {site.op}", function) for function in site.table)
        self._worker.execute = self._step(self._worker.execute)

    def _ranged(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        record = self._torch.profiler.record_function

        @functools.wraps(function, updated=())
        def ranged(*args: Any, **named: Any) -> Any:
            if not self._on:
                return function(*args, **named)
            with record(name):
                return function(*args, **named)

        return ranged

    def _step(self, execute: Callable[[Any], Any]) -> Callable[[Any], Any]:
        def step(plan: Any) -> Any:
            if self._count == self.first:
                self._start()
            if self._count == self.last:
                self.stop()
            self._count += 1
            if not self._on:
                return execute(plan)
            requests, tokens = len(plan.slots), sum(plan.counts)
            began = time.perf_counter()
            with self._torch.profiler.record_function(f"step {plan.id}: {requests} requests, {tokens} tokens"):
                pending = execute(plan)
                self._worker.assembly.device.synchronize()
            self.steps.append((requests, tokens, time.perf_counter() - began))
            return pending

        return step

    def _start(self) -> None:
        self.profile = self._torch.profiler.profile(record_shapes=True)
        self.profile.start()
        self._on = True

    def stop(self) -> None:
        """Stop the profiler, if it is running."""
        if self._on:
            self._on = False
            self.profile.stop()


@contextmanager
def profiled(model: str, settings: dict[str, Any], first: int, last: int) -> Iterator[tuple[Any, StepProfiler]]:
    """An engine in this process and the profiler of its steps."""
    from evener import LLM

    with LLM(model, **settings) as llm:
        controller = llm._client.controller  # type: ignore[attr-defined]  # inline: an LLM's own
        profiler = StepProfiler(controller.executor.worker, first, last)
        try:
            yield llm, profiler
        finally:
            profiler.stop()


def by_range(profile: Any) -> list[dict[str, Any]]:
    """Calls and host time of each of our ranges; all steps are one line."""
    totals: dict[str, list[float]] = defaultdict(lambda: [0, 0.0])
    for event in profile.key_averages():
        name = "step" if event.key.startswith("step ") else event.key
        if name in ("step", "forward", "logits") or name.startswith("op "):
            totals[name][0] += event.count
            totals[name][1] += event.cpu_time_total
    return [
        {"range": name, "calls": int(calls), "total_ms": round(us / 1000, 3), "mean_us": round(us / calls, 1)}
        for name, (calls, us) in sorted(totals.items(), key=lambda item: -item[1][1])
    ]


def run(args: argparse.Namespace) -> dict[str, Any]:
    """Profile one job; the result as data."""
    from evener import SamplingParams

    first, last = args.steps
    batch, prompt, new = (int(x) for x in args.fixed.split(","))
    job: Job = fixed(batch, prompt, new, args.vocab, 0)
    settings = {"infer.prefix_cache": False, **dict(pair.split("=", 1) for pair in args.set)}
    with profiled(args.model, settings, first, last) as (llm, profiler):
        params = SamplingParams(temperature=0.0, max_tokens=new, ignore_eos=True, detokenize=False)
        llm.generate(job.prompts, params)
    if not profiler.steps:
        raise SystemExit(f"the job has no step {first}; ask for more new tokens, or for earlier steps")
    if args.trace:
        profiler.profile.export_chrome_trace(str(args.trace))
    return {
        **facts(), "what": "profile", "model": Path(args.model).name, "job": job.name,
        "steps": [{"requests": r, "tokens": t, "ms": round(1000 * s, 3)} for r, t, s in profiler.steps],
        "ranges": by_range(profiler.profile),
    }  # fmt: skip


def _steps(text: str) -> tuple[int, int]:
    first, colon, last = text.partition(":")
    try:
        found = int(first), int(last)
    except ValueError:
        found = (0, 0)
    if not colon or not 0 <= found[0] < found[1]:
        raise argparse.ArgumentTypeError(f"{text} is not FIRST:LAST, as in 8:24")
    return found


def parser() -> argparse.ArgumentParser:
    """The options."""
    made = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    made.add_argument("model")
    made.add_argument("--fixed", default="16,128,64", metavar="BATCH,PROMPT,NEW")
    made.add_argument("--steps", type=_steps, default=(8, 24), metavar="FIRST:LAST", help="steps to profile, from 0; "
                      "step 0 holds the first prompts")  # fmt: skip
    made.add_argument("--trace", type=Path, metavar="FILE", help="chrome trace (JSON; .json.gz packs it)")
    made.add_argument("--vocab", type=int, default=40000, help="token ids are drawn below this")
    made.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="configuration of evener")
    made.add_argument("--out", type=Path, help="append the result to this file, as a JSON line")
    return made


def main(argv: list[str]) -> int:
    """Run it."""
    args = parser().parse_args(argv)
    result = run(args)
    if args.out:
        with args.out.open("a") as file:
            file.write(json.dumps(result) + "\n")
    print("| range | calls | total ms | mean µs |\n| --- | --- | --- | --- |")
    for row in result["ranges"]:
        print(f"| {row['range']} | {row['calls']} | {row['total_ms']:.2f} | {row['mean_us']:.1f} |")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
