"""Whole processes that start, compute one token and end: ``evener run`` and llama.cpp, alternating.

    python benchmarks/cpu_start.py MODEL... [--gguf FILE] [--llamacpp PYTHON] [--repeats 5] [--out FILE.jsonl]

Of each process: seconds from its begin to its end, processor time (user and system), and the most memory that was
resident, mapped files included. Medians. One start of each, which is not counted, brings files into memory and fills
caches, Python's byte code among them, as an installed package has it. ``--gguf`` is the file that llama.cpp reads in
place of a folder; ``make llamacpp`` builds it, in an environment of its own. Other processes disturb the seconds;
processor time less.
"""

from __future__ import annotations

import argparse
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from datetime import date
from pathlib import Path
from typing import Any, NamedTuple

from machine import OtherProcesses, cpu_name, record, versions

PROMPT = "The capital of France is"
_LLAMACPP = """
import sys
import llama_cpp as lib
silent = lib.llama_log_callback(lambda *_: None)
lib.llama_log_set(silent, None)
lib.llama_backend_init()
net = lib.llama_model_load_from_file(sys.argv[1].encode(), lib.llama_model_default_params())
params = lib.llama_context_default_params()
params.n_ctx, params.n_threads, params.n_threads_batch = 2048, int(sys.argv[3]), int(sys.argv[3])
context = lib.llama_init_from_model(net, params)
text, ids = sys.argv[2].encode(), (lib.llama_token * 64)()
vocabulary = lib.llama_model_get_vocab(net)
count = lib.llama_tokenize(vocabulary, text, len(text), ids, 64, True, True)
assert net and context and count > 0 and lib.llama_decode(context, lib.llama_batch_get_one(ids, count)) == 0
logits = lib.llama_get_logits_ith(context, -1)
best = max(range(lib.llama_vocab_n_tokens(vocabulary)), key=lambda token: logits[token])
piece = (lib.ctypes.c_char * 64)()
print(piece[: lib.llama_token_to_piece(vocabulary, best, piece, 64, 0, True)].decode())
"""


class Cost(NamedTuple):
    """What one process took."""

    seconds: float
    processor_seconds: float
    memory_mib: float


#: Name and unit of each part of a ``Cost`` in a record.
METRICS = (("whole process", "s"), ("processor time", "s"), ("peak memory", "MiB"))


def once(command: Sequence[str]) -> Cost:
    """Run a command to its end.

    Raises:
        SystemExit: it failed.
    """
    # Where Python keeps no byte code (a container's setting), modules of a source tree would be compiled each time.
    environ = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    with tempfile.TemporaryFile("w+") as said:
        began = time.perf_counter()
        child = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=said, env=environ)
        _, status, used = os.wait4(child.pid, 0)
        seconds = time.perf_counter() - began
        child.returncode = os.waitstatus_to_exitcode(status)
        if child.returncode:
            said.seek(0)
            raise SystemExit(f"{' '.join(command[:3])} failed:\n{said.read()[-3000:]}")
    return Cost(seconds, used.ru_utime + used.ru_stime, used.ru_maxrss / 1024)


def measure(commands: dict[str, list[str]], repeats: int) -> dict[str, Cost]:
    """Medians by name; the commands take turns."""
    for command in commands.values():
        once(command)
    found: dict[str, list[Cost]] = {name: [] for name in commands}
    for _ in range(repeats):
        for name, command in commands.items():
            found[name].append(once(command))
    return {name: Cost(*map(statistics.median, zip(*costs, strict=True))) for name, costs in found.items()}


def llamacpp_version(python: str) -> str:
    """Name and version of the peer."""
    code = "import llama_cpp; print(llama_cpp.__version__)"
    return f"llama.cpp (llama-cpp-python {subprocess.check_output([python, '-c', code], text=True).strip()})"


def main() -> int:
    """Print three records a model: one for each part of a ``Cost``."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("models", nargs="+", help="folders or GGUF files")
    parser.add_argument("--gguf", help="what llama.cpp reads in place of a folder")
    parser.add_argument("--llamacpp", default=str(Path.home() / ".cache/evener/llamacpp/bin/python"), metavar="PYTHON")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--out", type=Path, help="file to which the lines are appended")
    asked = parser.parse_args()
    threads, peer = len(os.sched_getaffinity(0)), llamacpp_version(asked.llamacpp)
    for model in asked.models:
        theirs = model if Path(model).is_file() else asked.gguf
        if theirs is None:
            parser.error(f"llama.cpp reads no folder: give the same model as a file with --gguf FILE, for {model}")
        ours = [sys.executable, "-m", "evener", "run", model, "--raw", "--max-tokens", "1", "--prompt", PROMPT]
        with OtherProcesses() as others:
            found = measure(
                {"ours": ours, "theirs": [asked.llamacpp, "-c", _LLAMACPP, theirs, PROMPT, str(threads)]}, asked.repeats
            )
        words = f"--repeats {asked.repeats}" + (f" --gguf {Path(theirs).name}" if theirs != model else "")
        about: dict[str, Any] = {
            "device": f"{cpu_name()}, {threads} cores", "model": Path(model).name, "case": "start, 5 tokens in, 1 out",
        }  # fmt: skip
        for place, (metric, unit) in enumerate(METRICS):
            numbers = {name: round(cost[place], 0 if unit == "MiB" else 2) for name, cost in found.items()}
            row = {**about, "metric": metric, "unit": unit, "better": "lower", **numbers, "peer": peer}
            row |= {"version": f"evener {versions().get('evener', 'of the source tree')}", "others_cores": others.cores}
            software = f"Python {platform.python_version()}, torch {versions()['torch']}"
            row |= {"date": date.today().isoformat(), "software": software}
            record({**row, "command": f"python benchmarks/cpu_start.py {Path(model).name} {words}"}, asked.out)
    return 0


if __name__ == "__main__":
    sys.exit(main())
