"""All tables and the plot of ``docs/performance.md``, in one run of about ten minutes on an idle machine.

    python benchmarks/tables.py MODEL --out outputs/bench

Engines alone (this one, transformers, and llama.cpp if ``make llamacpp`` installed it), servers under a sweep of rates,
and the cost of HTTP. Writes ``tables.md``, ``results.jsonl`` and ``sweep.png``; prints what was left out and why.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import after_stdlib  # noqa: F401
import http_ratio
import offline
import serving
from launch import HERE, interpreter
from machine import facts

JOBS = ("1,128,128", "16,128,64", "1,1024,1")
RATES = ("1", "2", "4")


def has(engine: str, module: str) -> bool:
    """Whether the Python of ``engine`` has a module."""
    code = f"import importlib.util as u, sys; sys.exit(u.find_spec({module!r}) is None)"
    done = subprocess.run([interpreter(engine), "-c", code], stderr=subprocess.DEVNULL)
    return done.returncode == 0


def requantized(source: Path, folder: Path, kind: str) -> Path:
    """``source`` converted to another type by llama.cpp: as fast as any file of that type."""
    target = folder / f"{source.name.split('.')[0]}.{kind}.gguf"
    if not target.exists():
        print(f"making {target.name}", flush=True)
        words = [interpreter("llamacpp"), str(HERE / "requantize.py"), str(source), str(target), kind]
        done = subprocess.run(words, capture_output=True, text=True)
        if done.returncode:
            raise SystemExit(f"llama.cpp could not make {target.name}:\n{done.stderr[-2000:]}")
    return target


class Tables:
    """The results so far.

    Args:
        args: the command line's options.
    """

    def __init__(self, args: argparse.Namespace) -> None:
        self._args, self._parts, self.left_out = args, list[str](), list[str]()
        self._results: Path = args.out / "results.jsonl"
        self._results.write_text("")

    def engines(self) -> None:
        """Engines alone."""
        words = [str(self._args.model), "--out", str(self._results), "--repeats", str(self._args.repeats), "--mixed"]
        words += [word for job in JOBS for word in ("--fixed", job)]
        words += ["--engine", "evener", "--engine", "transformers"]
        if self._args.gguf and has("llamacpp", "llama_cpp"):
            file = requantized(self._args.gguf, self._args.out, "BF16")
            words += ["--engine", "llamacpp", "--set", f"llamacpp:gguf={file}"]
        else:
            self.left_out.append("llama.cpp: make llamacpp, and --gguf FILE")
        with_batch = offline.parser().parse_args(words)
        rows = offline.measure(with_batch)
        self._keep(rows)
        self._parts.append("## Engines alone\n\n" + offline.table(rows))

    def servers(self) -> None:
        """Servers under a sweep of rates."""
        words = ["--model", str(self._args.model), "--engine", "evener", "--requests", str(self._args.requests)]
        # Made-up prompts as text: transformers' server takes no ids.
        words += ["--template", "%s", "--tokenizer-path", str(self._args.model), "--engine", "transformers"]
        words += ["--input-len", "128", "--output-len", "64", "--request-rate", *RATES]
        words += ["--plot", str(self._args.out / "sweep.png"), "--out-json", str(self._args.out / "serving.jsonl")]
        if self._args.gguf and has("llamacpp", "llama_cpp.server.app") and has("llamacpp", "sse_starlette"):
            file = requantized(self._args.gguf, self._args.out, "BF16")
            words += ["--engine", "llamacpp", "--gguf", str(file)]
        else:
            self.left_out.append("llama.cpp's server: pip install 'llama-cpp-python[server]' into its environment")
        status = serving.main(words)
        if status:
            raise SystemExit("requests failed; see above")
        rows = [json.loads(line) for line in (self._args.out / "serving.jsonl").read_text().splitlines()]
        self._keep(rows)
        self._parts.append("## Servers\n\n" + sweep_table(rows) + "\n\n![sweep](sweep.png)")

    def http(self) -> None:
        """The cost of HTTP."""
        result = http_ratio.measure(http_ratio.parser().parse_args([str(self._args.model)]))
        self._keep([result])
        self._parts.append(
            f"## The cost of HTTP\n\n{result['streams']} streams of {result['input_len']} + {result['output_len']} "
            f"tokens: engine alone {result['engine_tok_s']} tokens/s, through HTTP {result['http_tok_s']}, pair by "
            f"pair {100 * result['ratio']:.1f} % (median; all: {result['ratios']}). "
            f"CPU time per token, microseconds: {result['cpu_us_per_token']}."
        )

    def write(self) -> Path:
        """``tables.md``."""
        about = facts()
        machine = f"{about['cpu']}, {about['cores']} cores, {about['memory_gib']} GiB, {about['system']}"
        installed = ", ".join(f"{name} {number}" for name, number in about["versions"].items())
        head = f"# {Path(self._args.model).name}, {about['when']}\n\n{machine}; Python {about['python']}; {installed}."
        missing = ["Left out: " + "; ".join(self.left_out) + "."] if self.left_out else []
        path: Path = self._args.out / "tables.md"
        path.write_text("\n\n".join([head, *self._parts, *missing]) + "\n", "utf-8")
        return path

    def _keep(self, rows: list[dict[str, Any]]) -> None:
        with self._results.open("a") as file:
            file.writelines(json.dumps(row) + "\n" for row in rows)


def sweep_table(rows: list[dict[str, Any]]) -> str:
    """Markdown of a serving sweep."""
    lines = [
        "| requests/s | server | output tokens/s | TTFT ms: median, p99 | ITL ms: median, p99 | E2E ms: median, p99 |",
        "| --- | --- | --- | --- | --- | --- |",
    ]
    for row in rows:
        parts = [f"{row['request_rate'] or 'all at once'}", row["engine"], f"{row['output_throughput']:.0f}"]
        parts += [f"{row[f'p50_{m}_ms']:.0f}, {row[f'p99_{m}_ms']:.0f}" for m in ("ttft", "itl", "e2el")]
        lines.append("| " + " | ".join(parts) + " |")
    return "\n".join(lines)


def main(argv: list[str]) -> int:
    """Run it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("--out", type=Path, default=Path("outputs/bench"))
    parser.add_argument("--gguf", type=Path, help="a file of the same model, for llama.cpp")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--requests", type=int, default=16, help="of each rate of the sweep")
    parser.add_argument("--only", choices=("engines", "servers", "http"), action="append", help="some of the parts")
    args = parser.parse_args(argv)
    args.out.mkdir(parents=True, exist_ok=True)
    if args.gguf is not None and not args.gguf.exists():
        args.gguf = None
    tables, began = Tables(args), time.monotonic()
    for part in args.only or ("engines", "http", "servers"):
        getattr(tables, part)()
    path = tables.write()
    print(path.read_text())
    print(f"{path}, after {time.monotonic() - began:.0f} s")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
