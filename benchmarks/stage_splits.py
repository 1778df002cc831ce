"""Decode steps and prompts of a model whose pipeline stages are on unlike devices, for several divisions of its layers:
the one that the engine chooses by measurement, and others.

    python benchmarks/stage_splits.py MODEL --stages cuda:0,cpu --free 12 --splits auto,20:16,16:20
    python benchmarks/stage_splits.py MODEL --alone cpu --splits auto     # also on one device alone

MODEL is a folder, or a name of ``model_configs.py`` with random weights. With ``--free``, this process holds so much of
the first accelerator's memory that only that is left, as if the card were smaller. A decode step is the difference
between a long and a short answer, divided by the tokens. Prints a JSON line for each division, with the layers of each
stage, and with ``--out`` appends it to a file.
"""

from __future__ import annotations

import argparse
import random
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import after_stdlib  # noqa: F401
from machine import facts, record
from model_configs import CONFIGS, write

from evener import LLM, SamplingParams

SHORT, LONG = 4, 36


def parser() -> argparse.ArgumentParser:
    """The options."""
    made = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    made.add_argument("model", help="model folder, or a name of model_configs.py")
    made.add_argument("--stages", default="auto", help="infer.stages")
    made.add_argument("--splits", default="auto", help="divisions, as in auto,20:16: layers of the first stage, second")
    made.add_argument("--alone", action="append", default=[], metavar="BACKEND", help="also on this backend alone")
    made.add_argument("--free", type=float, help="GiB of the first accelerator that the engine may use")
    made.add_argument("--cases", default="1x128,16x128", help="requests x prompt tokens")
    made.add_argument("--vocab", type=int, default=1000, help="token ids are drawn below this")
    made.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="a setting of all engines")
    made.add_argument("--out", type=Path, help="append the JSON lines to this file")
    return made


def main(argv: Sequence[str]) -> int:
    """Measure and print."""
    args = parser().parse_args(argv)
    cases = [(int(a), int(b)) for a, b in (each.split("x") for each in args.cases.split(","))]
    with tempfile.TemporaryDirectory() as made:
        known = args.model in CONFIGS
        folder = write(args.model, Path(made) / args.model) if known else Path(args.model)
        held = hold(args.free) if args.free else None
        keys: dict[str, Any] = {"load": "dummy"} if known else {}
        keys |= {"infer.max_reqs": max(batch for batch, _ in cases), "executor": "process"}
        keys |= {"infer.max_seq_len": max(prompt for _, prompt in cases) + LONG + 8}
        keys |= dict(each.split("=", 1) for each in args.set)
        runs: list[tuple[str, dict[str, Any]]] = []
        for split in args.splits.split(","):
            chosen = {} if split == "auto" else {"infer.pp_layer_partition": split.replace(":", ",")}
            runs.append((split, {"infer.stages": args.stages, "infer.pp_size": 2, **chosen}))
        runs += [(f"{backend} alone", {"backend": backend}) for backend in args.alone]
        for split, more in runs:
            for row in measure(folder, {**keys, **more}, cases, args.vocab):
                asked = {"model": Path(args.model).name, "stages": args.stages, "split": split, "free_gib": args.free}
                record({**asked, **row, **facts()}, args.out)
        del held
    return 0


def hold(free: float) -> Any:
    """A tensor that leaves the first accelerator so many GiB."""
    import torch

    device = torch.accelerator.current_accelerator()
    if device is None:
        raise SystemExit("--free: there is no accelerator here; leave it out")
    left, _ = torch.accelerator.get_memory_info(0)
    more = left - int(free * 2**30)
    if more <= 0:
        raise SystemExit(f"--free {free}: only {left / 2**30:.1f} GiB are free")
    return torch.empty(more, dtype=torch.uint8, device=device)


def measure(folder: Path, keys: dict[str, Any], cases: Sequence[tuple[int, int]], vocab: int) -> list[dict[str, Any]]:
    """A row for each case; one row with the reason if the model does not start."""

    def seconds(batch: int, prompt: int, new: int, seed: int) -> float:
        rng = random.Random(f"{seed} {batch} {prompt} {new}")
        ids = [[rng.randrange(10, vocab) for _ in range(prompt)] for _ in range(batch)]
        asked = SamplingParams(temperature=0.0, max_tokens=new, ignore_eos=True, detokenize=False)
        began = time.perf_counter()
        llm.generate(ids, asked)
        return time.perf_counter() - began

    began = time.perf_counter()
    try:
        llm = LLM(folder, **keys)
    except Exception as error:
        return [{"problem": f"{type(error).__name__}: {error}"[:300]}]
    with llm:
        ready, rows = time.perf_counter() - began, []
        seconds(1, 16, SHORT, 0)
        division = next((note for note in llm.info.manifest.notes if note.startswith("layers are divided")), None)
        for batch, prompt in cases:
            seconds(batch, prompt, SHORT, 1)
            first = min(seconds(batch, prompt, 1, seed) for seed in (2, 3))
            short, long = (min(seconds(batch, prompt, new, seed) for seed in (4, 5)) for new in (SHORT, LONG))
            step = (long - short) / (LONG - SHORT)
            rows.append({"requests": batch, "prompt": prompt, "step_ms": round(step * 1e3, 3),
                         "prompt_s": round(first, 4), "ready_s": round(ready, 1), "division": division})  # fmt: skip
    return rows


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
