"""What a grammar costs: decode steps of 16 requests that have to follow a JSON schema, beside 16 that are free.

    python benchmarks/structured.py --tokenizer FOLDER [--model qwen3-8b] [--requests 16] [--set KEY=VALUE ...]

Random weights of a model of ``model_configs.py``, and the ``tokenizer.json`` of FOLDER, whose vocabulary the model
must have room for. Both kinds are timed in turns in one engine, as the difference between a long and a short answer.
A turn has both kinds, one right after the other, and every other turn in the other order; the ratio is the median of
the turns' ratios, so that other work on the machine falls on both. Processor time of the process is compared too. The
schema is an array of objects that is longer than the answer, so that no request ends early. Writes one line of JSON to
standard output and, with ``--out``, to that file.
"""

from __future__ import annotations

import argparse
import datetime
import json
import random
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import after_stdlib  # noqa: F401
from machine import record
from model_configs import CONFIGS, write

SHORT, LONG = 16, 144
PROMPT = 64
SCHEMA = {
    "type": "array",
    "minItems": 1000,
    "items": {
        "type": "object",
        "properties": {"name": {"type": "string"}, "count": {"type": "integer"}, "kind": {"enum": ["a", "b"]}},
        "required": ["name", "count", "kind"],
        "additionalProperties": False,
    },
}


def main(argv: Sequence[str]) -> int:
    """Time both kinds of request."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokenizer", type=Path, required=True, help="folder with a tokenizer.json")
    parser.add_argument("--model", choices=sorted(CONFIGS), default="qwen3-0.6b")
    parser.add_argument("--requests", type=int, default=16)
    parser.add_argument("--turns", type=int, default=8)
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="configuration of evener")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args(argv)
    with tempfile.TemporaryDirectory() as folder:
        model = write(args.model, Path(folder) / args.model)
        for name in ("tokenizer.json", "tokenizer_config.json"):
            shutil.copy(args.tokenizer / name, model / name)
        row = measure(model, args)
    record(row, args.out)
    return 0


def measure(model: Path, args: argparse.Namespace) -> dict[str, Any]:
    """One row: milliseconds of a decode step of each kind, on the clock and of the processor, and their ratios."""
    from evener import LLM
    from evener.contracts.grammar.library import GrammarSpec

    pairs = dict(pair.split("=", 1) for pair in args.set)
    overrides: dict[str, Any] = {"load": "dummy", "infer.max_seq_len": 1024, "infer.prefix_cache": False, **pairs}
    with LLM(model, **overrides) as llm:
        grammar = GrammarSpec(kind="json_schema", text=json.dumps(SCHEMA))
        kinds = {"free": None, "schema": grammar}
        for spec in kinds.values():  # warms every size and compiles the grammar
            seconds(llm, args.requests, SHORT, spec, 0)
        turns: list[dict[str, tuple[float, ...]]] = []
        for turn in range(1, args.turns + 1):
            found = {}
            for kind in list(kinds)[:: 1 if turn % 2 else -1]:
                short = seconds(llm, args.requests, SHORT, kinds[kind], turn)
                long = seconds(llm, args.requests, LONG, kinds[kind], turn)
                found[kind] = tuple((b - a) / (LONG - SHORT) * 1000 for a, b in zip(short, long, strict=True))
            turns.append(found)
        device = llm.info.device
    what: dict[str, Any] = {"device": device, "model": args.model, "requests": args.requests, "turns": args.turns}
    for at, clock in enumerate(("step", "processor")):
        for kind in kinds:
            what[f"{kind}_{clock}_ms"] = round(statistics.median(turn[kind][at] for turn in turns), 3)
        ratio = statistics.median(turn["schema"][at] / turn["free"][at] for turn in turns)
        what["ratio" if clock == "step" else f"{clock}_ratio"] = round(ratio, 3)
    settings = [f"--set {pair}" for pair in args.set]
    words = ["python benchmarks/structured.py --tokenizer FOLDER --model", args.model, *settings]
    return {**what, "date": datetime.date.today().isoformat(), "command": " ".join(words)}


def seconds(llm: Any, requests: int, tokens: int, grammar: Any, seed: int) -> tuple[float, float]:
    """How long random prompts take with ``tokens`` tokens each: on the clock, and of the processor."""
    from evener import SamplingParams

    rng = random.Random(seed)
    prompts = [[rng.randrange(100, 40000) for _ in range(PROMPT)] for _ in range(requests)]
    # Drawn, not greedy: every row of a masked step goes its own way.
    params = SamplingParams(temperature=1.0, max_tokens=tokens, ignore_eos=True, detokenize=False, grammar=grammar)
    began, worked = time.perf_counter(), time.process_time()
    outputs = llm.generate(prompts, params)
    taken = time.perf_counter() - began, time.process_time() - worked
    lengths = {len(output.outputs[0].token_ids) for output in outputs}
    if lengths != {tokens}:
        raise SystemExit(f"answers of {sorted(lengths)} tokens instead of {tokens}")
    return taken


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
