"""Start-up with and without ``model_cache=``: each start in a new process, alternating; medians are printed.

    python benchmarks/model_cache.py MODEL... [--repeats 5] [--set cpu.huge_pages=off] [--out FILE.jsonl]

``weights`` are the seconds in which weights are loaded, ``start`` those from the process's begin to an engine that is
ready. A first start, which is not counted, brings the model's files into memory, another one writes the cache
(``writing``). The ids that a model generates must be the same with and without.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from datetime import date
from pathlib import Path
from typing import Any

from machine import cpu_name, record, versions

_START = """
import json, sys, time
from evener import LLM
import evener.engine.worker.worker as worker
load, seconds = worker.load_stage, []
def timed(assembly):
    start = time.perf_counter()
    found = load(assembly)
    seconds.append(time.perf_counter() - start)
    return found
worker.load_stage = timed
with LLM(sys.argv[1], executor="inline", **json.loads(sys.argv[2])) as llm:
    ready = time.time()
    (output,) = llm.generate(["The capital of France is"])
print(json.dumps([seconds[0], ready, list(output.outputs[0].token_ids)]))
"""


def once(model: str, keys: dict[str, str]) -> tuple[float, float, list[int]]:
    """Seconds for the weights, seconds of the whole start, and the ids that the model generates."""
    began = time.time()
    command = [sys.executable, "-c", _START, model, json.dumps(keys)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"{model} did not start:\n{done.stderr[-3000:]}")
    weights, ready, ids = json.loads(done.stdout.splitlines()[-1])
    return weights, ready - began, ids


def measure(model: str, keys: dict[str, str], repeats: int) -> dict[str, Any]:
    """Medians of one model, and the bytes of its cache."""
    times: dict[str, list[tuple[float, float]]] = {"without": [], "with": []}
    with tempfile.TemporaryDirectory() as folder:
        cached = {**keys, "model_cache": f"{folder}/cache"}
        *_, wanted = once(model, keys)
        writing, _, ids = once(model, cached)
        nbytes = sum(path.stat().st_size for path in Path(cached["model_cache"]).iterdir())
        assert ids == wanted, "the start that writes the cache gives other tokens"
        for _ in range(repeats):
            for name, more in (("without", keys), ("with", cached)):
                *seconds, ids = once(model, more)
                assert ids == wanted, f"a start {name} the cache gives other tokens"
                times[name].append((seconds[0], seconds[1]))
    middle = {n: [statistics.median(each) for each in zip(*found, strict=True)] for n, found in times.items()}
    return {
        "model": Path(model).name, "keys": keys, "cache_mb": round(nbytes / 1e6, 1), "repeats": repeats,
        "weights_s": {name: round(found[0], 2) for name, found in middle.items()},
        "start_s": {name: round(found[1], 2) for name, found in middle.items()},
        "writing_s": round(writing, 2), "weights_ratio": round(middle["with"][0] / middle["without"][0], 2),
        "start_ratio": round(middle["with"][1] / middle["without"][1], 2),
    }  # fmt: skip


def record_models(
    program: str, about: str, measure: Callable[[str, dict[str, str], int], dict[str, Any]], repeats: int
) -> int:
    """Read the command line of a benchmark of starts, and print one JSON line a model.

    Args:
        program: its file's name.
        about: what it does, for the help text.
        measure: takes a model, keys of the configuration and the repeats; returns the figures.
        repeats: the default.
    """
    parser = argparse.ArgumentParser(description=about)
    parser.add_argument("models", nargs="+", help="folders or files")
    parser.add_argument("--repeats", type=int, default=repeats)
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE")
    parser.add_argument("--out", type=Path, help="file to which the lines are appended")
    asked = parser.parse_args()
    keys = dict(each.split("=", 1) for each in asked.set)
    for model in asked.models:
        found = measure(model, keys, asked.repeats)
        words = "".join(f" --set {each}" for each in asked.set)
        command = f"python benchmarks/{program} {Path(model).name}{words} --repeats {asked.repeats}"
        facts = {"device": cpu_name(), "date": date.today().isoformat(), "software": versions(), "command": command}
        record({**found, **facts}, asked.out)
    return 0


if __name__ == "__main__":
    sys.exit(record_models("model_cache.py", __doc__.splitlines()[0], measure, 5))
