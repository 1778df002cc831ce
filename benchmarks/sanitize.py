"""Run the kernels that index by block table under the vendor's memory checker, with small shapes.

    python benchmarks/sanitize.py [--tool memcheck] [--dtype bfloat16]

``memcheck`` finds accesses outside of allocations; torch's caching allocator is off for it, so that every tensor has
its own allocation. ``racecheck`` finds races in shared memory. Each runs in a child process under
``compute-sanitizer``, after a run without it that compiles the kernels. Exit status: 0 clean, 1 with findings, 2 with a
message if the tool is missing or the machine's runtime refuses it (gVisor does).
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from evener.contracts.state import StateSpec

TOOLS = ("memcheck", "racecheck")
#: Folders of the tool if it is not on the PATH.
PLACES = ("/usr/local/cuda/bin", "/usr/local/cuda/compute-sanitizer")
FINDINGS = 9
OPS = ("embedding", "take_rows", "penalize", "add_bias", "logprobs", "apply_mask")
COMPOSITES = {
    "attention_block": ("windowed",),
    "decoder_layer": ("windowed",),
    "latent_attention_block": ("latent queries",),
}


def main(argv: Sequence[str]) -> int:
    """Run every requested tool; returns the worst exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tool", choices=TOOLS, action="append", help="one of them (default: both)")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--limit", type=int, default=300, help="seconds for one tool")
    parser.add_argument("--here", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args(argv)
    if args.here:
        return here(args.dtype)
    tool = find_tool()
    if tool is None:
        print(f"no compute-sanitizer on the PATH or in {', '.join(PLACES)}; it comes with the CUDA toolkit")
        return 2
    command = [sys.executable, str(Path(__file__).resolve()), "--here", "--dtype", args.dtype]
    warm = subprocess.run(command, capture_output=True, text=True, timeout=args.limit, check=False)
    if warm.returncode:
        print(f"the kernels fail even without a checker:\n{warm.stdout[-3000:]}{warm.stderr[-3000:]}")
        return 1
    return max(check(tool, name, command, args.limit) for name in args.tool or TOOLS)


def find_tool() -> str | None:
    """The path of the checker."""
    return shutil.which("compute-sanitizer") or shutil.which("compute-sanitizer", path=os.pathsep.join(PLACES))


def check(tool: str, name: str, command: Sequence[str], limit: int) -> int:
    """Run one tool; prints its summary and the first findings."""
    environ = dict(os.environ)
    if name == "memcheck":
        environ["PYTORCH_NO_CUDA_MEMORY_CACHING"] = "1"
    began = time.perf_counter()
    full = [tool, "--tool", name, "--error-exitcode", str(FINDINGS), "--print-limit", "20", *command]
    try:
        done = subprocess.run(full, capture_output=True, text=True, timeout=limit, env=environ, check=False)
    except subprocess.TimeoutExpired:
        print(f"== {name}: not done after {limit} s")
        return 1
    text = done.stdout + done.stderr
    code, verdict = parse_verdict(done.returncode, text)
    print(f"== {name}: {verdict}, {time.perf_counter() - began:.0f} s", flush=True)
    if code:
        print("\n".join(text.splitlines()[:60]))
    return code


def parse_verdict(status: int, text: str) -> tuple[int, str]:
    """Our exit status and verdict, from the tool's. A run that the tool could not follow proves nothing."""
    if re.search(r"Device not supported|Unable to (find|launch)|did not track the launch", text):
        return 2, "the machine's runtime refuses it"
    summaries = re.findall(r"(?:ERROR SUMMARY|RACECHECK SUMMARY): (\d+)", text)
    if not summaries:
        return 1, f"ended with status {status} and without a summary"
    found = sum(int(count) for count in summaries)
    if found or status:
        return 1, f"{found} findings, status {status}"
    return 0, "clean"


def here(dtype: str) -> int:
    """Run the kernels in this process: 1 if one is wrong or refuses everything."""
    bad = 0
    for name, passed, problems in results(dtype):
        print(f"{name}: {passed} passed{''.join(f'; {p}' for p in problems)}", flush=True)
        bad += bool(problems) or not passed
    return 1 if bad else 0


def results(dtype: str) -> Iterator[tuple[str, int, list[str]]]:
    """(name, number of passed cases, problems) of each state provider and kernel."""
    from evener.backend_search import BackendSearch
    from evener_conformance.kit.composites import check_composite
    from evener_conformance.kit.ops import check_kernel
    from evener_conformance.kit.shapes import SHAPES
    from evener_conformance.kit.state import check_provider

    loaded = BackendSearch(None).load({})
    device = loaded.open_device()
    device.select()
    kernels = [p.value for p in loaded.kernels(device)]
    states: list[Any] = [p.value for p in loaded.state_providers(device)]
    schemas = {p.value.name: p.value for p in loaded.op_schemas()}
    few = [s for s in SHAPES if (s.heads, s.head_dim) in {(9, 64), (6, 10), (4, 32), (5, 42)}]
    for provider in states:
        sizes = provider.block_sizes
        provider.block_sizes = partial(_first, sizes)
        report = check_provider(provider, device, dtype, few)
        provider.block_sizes = sizes
        if report.checked or report.problems:
            yield provider.name, len(report.checked), report.problems
    linears = [k for k in kernels if k.op == "linear"]
    for kernel in kernels:
        schema = schemas[kernel.op]
        if kernel.op in OPS:
            found = check_kernel(kernel, schema, device, (dtype,))
        elif kernel.op in COMPOSITES:
            kinds = COMPOSITES[kernel.op]
            found = check_composite(kernel, list(schemas.values()), device, states, linears, (dtype,), kinds=kinds)
        else:
            continue
        wrong = [str(r)[:300] for r in found if r.outcome == "failed"]
        yield kernel.name, sum(r.outcome == "passed" for r in found), wrong


def _first(sizes: Callable[[StateSpec], Sequence[int]], spec: StateSpec) -> Sequence[int]:
    """The block size that a provider prefers."""
    return sizes(spec)[:1]


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
