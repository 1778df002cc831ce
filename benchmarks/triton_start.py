"""First starts on a GPU: without compiled kernels, with a package of them, and with Triton's cache of a start before.

    python benchmarks/triton_start.py --package FOLDER [--models qwen3-0.6b qwen3-8b] [--repeats N] [--out FOLDER]

FOLDER is where the package was installed (``pip install --target``), and nothing else. Random weights, default keys.
Each start is a new process with empty caches of evener and, but for the last kind, of Triton. Times are from the start
of the process: until the engine is ready, and until 16 tokens behind a prompt of 200 are there. What was compiled is
counted in Triton's cache: kernels, and modules of the host's side. The tokens of all starts of a model must be equal.
``--out`` gets each start in ``starts.jsonl``, and medians as records of ``docs/results`` in ``first-start.jsonl``.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from datetime import date
from pathlib import Path
from typing import Any

from model_configs import CONFIGS, write

_NAMES = {"qwen3-0.6b": "Qwen3-0.6B", "qwen3-8b": "Qwen3-8B", "qwen3-30b-a3b": "Qwen3-30B-A3B",
          "deepseek-v2-lite": "DeepSeek-V2-Lite", "gemma-3-4b": "Gemma 3 4B"}  # fmt: skip
_CHILD = """
import sys, json
from evener import LLM, SamplingParams
llm = LLM(sys.argv[1], load="dummy")
print("READY", flush=True)
done = llm.generate([[100 + i for i in range(200)]],
                    SamplingParams(temperature=0.0, max_tokens=16, ignore_eos=True, detokenize=False))
print(json.dumps({"device": llm.info.device, "tokens": list(done[0].outputs[0].token_ids)}), flush=True)
llm.close()
"""


def main(argv: Sequence[str]) -> int:
    """Measure, print one JSON object for each start, and append them to ``--out``; 1 if tokens differ."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--package", type=Path, required=True)
    parser.add_argument("--models", nargs="+", choices=list(CONFIGS), default=["qwen3-0.6b", "qwen3-8b"])
    parser.add_argument("--repeats", type=int, default=2)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args(argv)
    wrong, rows, records = False, list[dict[str, Any]](), list[dict[str, Any]]()
    with tempfile.TemporaryDirectory() as scratch:
        folders = {name: write(name, Path(scratch) / name) for name in args.models}
        start(next(iter(folders.values())), Path(scratch) / "imports", None)  # reads what is imported from the disk
        for name, folder in folders.items():
            seen: set[tuple[int, ...]] = set()
            own: list[dict[str, Any]] = []
            for repeat in range(args.repeats):
                for kind, package in (("nothing", None), ("package", args.package), ("cache", None)):
                    caches = Path(scratch) / f"{name}-{repeat}-{'nothing' if kind == 'cache' else kind}"
                    row, tokens = start(folder, caches, package)
                    seen.add(tokens)
                    own.append({"part": "triton-start", "model": name, "compiled_before": kind, **row})
                    print(json.dumps(own[-1]), flush=True)
            rows += own
            records += compared(name, own, args.repeats)
            if len(seen) > 1:
                wrong = True
                print(f"{name}: tokens differ: {seen}", flush=True)
    if args.out:
        args.out.mkdir(parents=True, exist_ok=True)
        for file, lines in (("starts.jsonl", rows), ("first-start.jsonl", records)):
            (args.out / file).write_text(
                "".join(json.dumps(line, ensure_ascii=False) + "\n" for line in lines), "utf-8"
            )
    return int(wrong)


def compared(model: str, rows: Sequence[dict[str, Any]], repeats: int) -> list[dict[str, Any]]:
    """Records of a model's starts with the package beside those without anything compiled."""

    def median(kind: str, what: str) -> float:
        return float(round(statistics.median(row[what] for row in rows if row["compiled_before"] == kind), 2))

    def compiled(when: str, kind: str) -> str:
        mine = [row for row in rows if row["compiled_before"] == kind]
        return " and ".join(f"{max(row[f'{when}_{what}'] for row in mine)} {what}" for what in ("kernels", "modules"))

    return [
        {
            "device": rows[0]["device"], "model": _NAMES.get(model, model), "case": "first start", "metric": metric,
            "unit": "s",
            "better": "lower", "ours": median("package", f"{what}_s"), "version": "evener 0.1.0",
            "peer": "evener, nothing compiled", "theirs": median("nothing", f"{what}_s"), "date": f"{date.today()}",
            "command": f"python benchmarks/triton_start.py --package FOLDER --models {model}", "software": _software(),
            "note": f"random weights; medians of {repeats}; compiled on the way with the package: "
                    f"{compiled(what, 'package')}, without: {compiled(what, 'nothing')}; with Triton's cache of a "
                    f"start before: {median('cache', f'{what}_s')} s",
        }
        for metric, what in (("ready", "ready"), ("16 tokens behind a prompt of 200", "answered"))
    ]  # fmt: skip


def _software() -> str:
    from importlib.metadata import version

    return f"torch {version('torch')}, Triton {version('triton')}"


def start(model: Path, caches: Path, package: Path | None) -> tuple[dict[str, object], tuple[int, ...]]:
    """One start: times and counts, and the tokens."""
    path = os.pathsep.join(filter(None, [str(package or ""), os.environ.get("PYTHONPATH")]))
    triton = caches / "triton"
    before = _compiled(triton)
    environ = {
        **os.environ,
        "PYTHONPATH": path,
        "TRITON_CACHE_DIR": str(triton),
        "XDG_CACHE_HOME": str(caches / "evener"),
    }
    began = time.perf_counter()
    child = subprocess.Popen([sys.executable, "-c", _CHILD, str(model)], env=environ, stdout=subprocess.PIPE, text=True)
    assert child.stdout is not None
    ready, first, said, then = 0.0, 0.0, dict[str, Any](), before
    for line in child.stdout:
        if line.startswith("READY"):
            ready, then = time.perf_counter() - began, _compiled(triton)
        elif line.startswith("{"):
            first, said = time.perf_counter() - began, json.loads(line)
    if child.wait() or not said:
        raise SystemExit(f"{model.name}: the process ended with status {child.returncode}")
    after = _compiled(triton)
    row: dict[str, Any] = {"device": said["device"], "ready_s": round(ready, 2), "answered_s": round(first, 2)}
    for when, files in (("ready", then - before), ("answered", after - before)):
        row[f"{when}_kernels"] = sum(path.suffix == ".cubin" for path in files)
        row[f"{when}_modules"] = sum(path.suffix == ".so" for path in files)
    if package is not None:
        row["missing"] = sorted(path.name for path in after)
    return row, tuple(said["tokens"])


def _compiled(folder: Path) -> set[Path]:
    return {path for path in folder.rglob("*") if path.suffix in (".cubin", ".so")}


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
