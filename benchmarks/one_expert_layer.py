"""Estimate a model of experts that this machine does not hold, from its memory plan and the time of one layer.

    python benchmarks/one_expert_layer.py FOLDER [--cap 80GB] [--host 1TB] [--cases 1x128,16x128] [--set KEY=VALUE ...]

FOLDER has the model's ``config.json``. First the memory plan of the whole model is made, for a device with ``--cap``
bytes and a host with ``--host``, with ``infer.cpu_layer_num=auto``. Then two parts of the model run with random
weights, by ``hybrid.py``: the layers up to the first one with experts, and the same with one layer more. The host
computes the experts of both. The difference of their times is one layer. A step of the whole model takes the time of
the first part, and one layer's for each layer with experts that is left. Layers whose experts the plan keeps on the
device are faster, so this is the most that it takes. A row for each case goes to standard output and to
one_expert_layer.jsonl in ``--out`` or $OUT.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import after_stdlib  # noqa: F401
import hybrid
from machine import record

from evener.config import from_overrides
from evener_backend_cpu import memory as host_memory

#: Fields of a row of hybrid.py that are the same in both parts.
_SAME = ("engine", "model", "device", "host_threads", "cap_gb", "bs", "inp", "host_reads_gb_s")


def main(argv: Sequence[str]) -> int:
    """Plan, measure, and add up; 0 if both parts ran."""
    args = parser().parse_args(argv)
    config = hybrid.config_of(str(args.folder))
    planned = plan(args)
    first = int(config.get("first_k_dense_replace", 0))
    with tempfile.TemporaryDirectory() as folder:
        parts = [measured(args, Path(folder) / str(count), first, count) for count in (1, 2)]
    layers = int(config["num_hidden_layers"]) - first
    for one, two in zip(*parts, strict=True):
        record(added_up(args, planned, layers, one, two), args.out / "one_expert_layer.jsonl")
    return 0


def parser() -> argparse.ArgumentParser:
    """The options."""
    made = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    made.add_argument("folder", type=Path)
    made.add_argument("--cap", type=hybrid.size, help="memory of the device, as 80GB; default: all")
    made.add_argument("--host", type=hybrid.size, help="memory of the host in the plan, as 1TB; default: this one's")
    made.add_argument("--cases", default="1x128,16x128", help="requests x tokens of each prompt")
    made.add_argument("--steps", type=int, default=48, help="decode steps that are timed")
    made.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="configuration of evener")
    made.add_argument(
        "--apart", type=hybrid.size, default=hybrid.APART, help="bytes with which memory's speed is measured"
    )
    made.add_argument("--out", type=Path, default=Path(os.environ.get("OUT", ".")))
    return made


def plan(args: argparse.Namespace) -> dict[str, Any]:
    """The memory plan of the whole model, in bytes. Reads no weights.

    Raises:
        SystemExit: the model does not fit.
    """
    from evener_inspection.explanation import explain

    hybrid.cap_memory(args.cap)
    if args.host is not None:
        # ``root`` is the machine's, and this is another machine's memory.
        def free_and_total(root: Path = Path("/")) -> tuple[int, int]:
            return args.host, args.host

        host_memory.free_and_total = free_and_total
    keys = {"load": "dummy", "infer.cpu_layer_num": "auto", **dict(pair.split("=", 1) for pair in args.set)}
    found: dict[str, Any] = explain(from_overrides(args.folder, keys))["memory"]
    print(json.dumps(found, default=str), flush=True)
    if found["problem"] is not None:
        raise SystemExit(found["problem"])
    return found


def measured(args: argparse.Namespace, out: Path, first: int, count: int) -> list[dict[str, Any]]:
    """Rows of ``hybrid.py`` with the layers before the first one with experts, and ``count`` with them."""
    out.mkdir()
    words = ["--forms", "own", "--ways", "host", "--layers", str(count), "--cases", args.cases, "--out", str(out),
             "--steps", str(args.steps), "--apart", str(args.apart)]  # fmt: skip
    words += [] if args.cap is None else ["--cap", str(args.cap)]
    for pair in (*args.set, f"infer.layers=0-{first + count - 1}"):
        words += ["--set", pair]
    subprocess.run([sys.executable, hybrid.__file__, str(args.folder), *words], check=True)
    return [json.loads(line) for line in (out / "hybrid.jsonl").read_text().splitlines()]


def added_up(
    args: argparse.Namespace, planned: dict[str, Any], layers: int, one: dict[str, Any], two: dict[str, Any]
) -> dict[str, Any]:
    """The row of one case."""
    layer, prompt = two["step_ms"] - one["step_ms"], two["prompt_ms"] - one["prompt_ms"]
    step = one["step_ms"] + (layers - 1) * layer
    return {
        **{key: one[key] for key in _SAME}, "date": datetime.date.today().isoformat(),
        "plan_gb": {key: hybrid.gb(n) for key, n in planned.items() if isinstance(n, int) and n > 1 << 20},
        "expert_layers": layers, "first_part_ms": one["step_ms"], "layer_ms": round(layer, 3),
        "layer_host_gb": round(two["host_gb"] - one["host_gb"], 3), "host_share": two.get("step_host_share"),
        "model_step_ms": round(step, 1), "model_out_tok_s": round(one["bs"] / step * 1e3, 2),
        "first_part_prompt_ms": one["prompt_ms"], "layer_prompt_ms": round(prompt, 2),
        "model_prompt_ms": round(one["prompt_ms"] + (layers - 1) * prompt, 1),
        "command": f"python benchmarks/one_expert_layer.py {' '.join(sys.argv[1:])}",
    }  # fmt: skip


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
