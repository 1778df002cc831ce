"""Rows of docs/results that compare ``hybrid.py`` with ``llamacpp_hybrid.py``: prompts and decode steps of one file.

    python benchmarks/hybrid_peer.py FOLDER --device "NVIDIA H200, its memory capped at 16 GB; 16 host threads"
        --version "llama-cpp-python 0.3.36" --software "Python 3.12, torch 2.11.0" --date 2026-11-27 --out RESULTS.jsonl

FOLDER holds hybrid.jsonl and llamacpp_hybrid.jsonl of one call on one machine. Of llama.cpp's settings the fastest one
counts, for prompts and for steps each; ``theirs_by_options`` has all of them. Cases that one of both lacks are left
out, and said on standard error. Rows are appended to ``--out``.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import after_stdlib  # noqa: F401
from model_configs import CONFIGS

from evener import __version__

#: Names of models and forms in tables.
MODELS = {"qwen3-30b-a3b": "Qwen3-30B-A3B"}
FORMS = {"q4_k_m": "Q4_K_M", "bf16": "bfloat16"}
#: What is compared: the metric, and how the fields of both programs begin.
METRICS = (("prompt", "prompt"), ("decode step", "step"))
#: Fields of ours that rows keep.
KEPT = ("host_gb", "second_layout_gb", "weights_gb", "host_reads_gb_s", "copies_gb_s", "ready_s")
Key = tuple[str, str, int, int, int]


def main(argv: Sequence[str]) -> int:
    """Append the rows; 0 if there was one."""
    args = parser().parse_args(argv)
    ours = {key(row): row for row in read(args.folder / "hybrid.jsonl") if row["way"] == "host"}
    theirs: dict[Key, list[Mapping[str, Any]]] = {}
    for row in read(args.folder / "llamacpp_hybrid.jsonl"):
        theirs.setdefault(key(row), []).append(row)
    for lonely in sorted(ours.keys() ^ theirs.keys()):
        print(f"{lonely}: only one of both ran it", file=sys.stderr)
    both = sorted(ours.keys() & theirs.keys())
    for each in both:
        for row in rows(args, ours[each], theirs[each]):
            line = json.dumps(row, ensure_ascii=False)
            print(line)
            if args.out is not None:
                with args.out.open("a") as file:
                    file.write(line + "\n")
    return int(not both)


def parser() -> argparse.ArgumentParser:
    """The options."""
    made = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    made.add_argument("folder", type=Path)
    for name in ("device", "version", "software", "date"):
        made.add_argument(f"--{name}", required=True)
    made.add_argument("--note", action="append", default=[], help="what else to know of the rows")
    made.add_argument("--when", default="in the same call", help="when llama.cpp ran, beside ours")
    made.add_argument("--command", default="", help="how ours was run")
    made.add_argument("--out", type=Path)
    return made


def read(file: Path) -> Iterator[Mapping[str, Any]]:
    """The rows of a file."""
    return map(json.loads, file.read_text().splitlines())


def key(row: Mapping[str, Any]) -> Key:
    """What two rows must share to be compared."""
    return row["model"], row["form"], row["host_layers"], row["bs"], row["inp"]


def rows(
    args: argparse.Namespace, ours: Mapping[str, Any], theirs: Sequence[Mapping[str, Any]]
) -> Iterator[Mapping[str, Any]]:
    """Two rows for one case: its prompts, and its decode steps."""
    every, layers = CONFIGS[ours["model"]]["num_hidden_layers"], theirs[0]["layers"]
    shown = "" if layers == every else f", {layers} of {every} layers"
    for metric, name in METRICS:
        field, counted = f"{name}_ms", f"counted_a_{name}"
        best = min(theirs, key=lambda row: row[field])
        yield {
            "device": args.device, "version": f"evener {__version__}", "date": args.date, "software": args.software,
            "model": f"{MODELS[ours['model']]}, {FORMS[ours['form']]}{shown}",
            "case": f"{ours['bs']} × {ours['inp']:,}: experts of {ours['host_layers']} layers on the host",
            "metric": metric, "unit": "ms", "better": "lower", "ours": ours[field],
            "peer": f"llama.cpp ({args.version}), experts of the same layers on the CPU, {args.when}",
            "theirs": best[field], "command": args.command,
            "note": "; ".join(["random weights, of one file", *args.note]), "theirs_options": best["options"],
            "theirs_by_options": {row["options"]: row[field] for row in theirs},
            "theirs_device_mib": best["device_mib"], "counted": ours[counted],
            **{kept: ours[kept] for kept in KEPT},
            **{kept: value for kept, value in ours.items() if kept.startswith(f"{name}_host_")},
        }  # fmt: skip


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
