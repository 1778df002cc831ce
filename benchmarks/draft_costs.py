"""What drafts cost on an accelerator, with random weights: requests with drafts, beside the same ones without.

    python benchmarks/draft_costs.py MODEL [--draft-models same,qwen3-0.6b] [--drafts 1,2,4,7] [--requests 1]
        [--set KEY=VALUE ...]

MODEL is a name of ``model_configs.py``. A draft model with the same weights (``same``) is right each time, so each step
makes as many tokens as it can, and the rows show what proposing and checking cost. Another model's random weights are
wrong nearly each time. An engine that has learned that drafts do not pay makes none, so such rows show what is lost
then; with ``--always`` it does not judge, and each request has drafts where its last ones were right. ``token_ms`` is
the time of a step divided by the tokens of one request in it. ``equal`` says how many of the greedy tokens are those of
the answer without drafts before the first other one, of the request with the fewest. In bfloat16 a step of
several tokens is rounded in other ways than one of one token, and random weights have many near ties; with
``--set dtype=float32`` all must be equal, else it ends with 1. Writes a line of JSON for each draft model and each
number of drafts to standard output and, with ``--out``, to that file.
"""

from __future__ import annotations

import argparse
import datetime
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import after_stdlib  # noqa: F401
from gpu_check import answers, start
from machine import record
from model_configs import CONFIGS, write

from evener.errors import EvenerError

PROMPT = 128


def main(argv: Sequence[str]) -> int:
    """Time all of them; 1 if a run fails, or an answer in float32 differs."""
    args = parser().parse_args(argv)
    failed = 0
    with tempfile.TemporaryDirectory() as folder:
        for row in measure(args, Path(folder)):
            record(row, args.out)
            exact = "dtype=float32" not in args.set or row.get("equal", args.tokens) == args.tokens
            failed |= "error" in row or not exact
    return failed


def parser() -> argparse.ArgumentParser:
    """The options."""
    made = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    made.add_argument("model", choices=sorted(CONFIGS))
    made.add_argument("--draft-models", default="same", help="same, and names of model_configs.py, with commas")
    made.add_argument("--drafts", default="1,2,4,7", help="values of infer.draft_tokens, with commas between them")
    made.add_argument("--tokens", type=int, default=256, help="tokens of the answer")
    made.add_argument("--requests", type=int, default=1, help="answers at once")
    made.add_argument("--always", action="store_true", help="drafts whether they pay or not")
    made.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="configuration of evener")
    made.add_argument("--out", type=Path)
    return made


def measure(args: argparse.Namespace, folder: Path) -> Iterator[dict[str, Any]]:
    """One row without drafts for each model, then one for each draft model and number of drafts."""
    command = f"python benchmarks/draft_costs.py {' '.join(sys.argv[1:])}"
    pairs = ["executor=inline", f"infer.max_reqs={max(4, args.requests)}", "infer.max_seq_len=1024", *args.set]
    target = write(args.model, folder / args.model)
    right: list[list[int]] = []
    names = args.draft_models.split(",")
    for name in dict.fromkeys([args.model, *(name for name in names if name != "same")]):
        row, tokens = run(write(name, folder / name), pairs, args.tokens, args.requests)
        right = right or tokens
        yield {"model": name, "drafts": 0, "requests": args.requests, **row, "command": command}
    for name in names:
        draft = target if name == "same" else folder / name
        for count in (int(part) for part in args.drafts.split(",")):
            more = [f"infer.draft_model={draft}", f"infer.draft_tokens={count}"]
            shared = {"model": args.model, "draft_model": name, "drafts": count, "requests": args.requests,
                      "always": args.always}  # fmt: skip
            try:
                row, tokens = run(target, [*pairs, *more], args.tokens, args.requests, args.always)
            except EvenerError as error:  # the other rows are still useful
                yield {**shared, "error": str(error), "command": command}
                continue
            equal = min(common(own, other) for own, other in zip(tokens, right, strict=True))
            yield {**shared, **row, "equal": equal, "command": command}


def common(first: Sequence[int], second: Sequence[int]) -> int:
    """How many leading items are equal."""
    return next((at for at, (one, other) in enumerate(zip(first, second, strict=True)) if one != other), len(first))


def run(
    folder: Path, pairs: Sequence[str], new: int, requests: int, always: bool = False
) -> tuple[dict[str, Any], list[list[int]]]:  # fmt: skip
    """Milliseconds of a step and of a token, what was proposed, and the tokens. The prompt's step is taken off.

    Args:
        folder: the model.
        pairs: the configuration.
        new: tokens of an answer.
        requests: answers at once.
        always: nobody judges whether drafts pay.
    """
    llm = start(folder, True, pairs)
    try:
        scheduler = llm._client.controller.scheduler
        stats = scheduler.stats
        if always:
            scheduler.drafts._payoff = None
        best, counted = float("inf"), (0, 0, 0)
        answers(llm, requests, PROMPT, new, 1)  # makes the captures
        for _ in range(3):
            short = answers(llm, requests, PROMPT, 1, 1)[0]
            steps, drafted, accepted = stats.steps, stats.drafted_tokens, stats.accepted_tokens
            seconds, tokens = answers(llm, requests, PROMPT, new, 1)
            if seconds - short < best:
                best = seconds - short
                counted = stats.steps - steps - 1, stats.drafted_tokens - drafted, stats.accepted_tokens - accepted
        row = {
            "device": llm.info.device, "date": datetime.date.today().isoformat(), "steps": counted[0],
            "drafted": counted[1], "accepted": counted[2], "step_ms": round(1e3 * best / max(1, counted[0]), 3),
            "token_ms": round(1e3 * best / (new - 1), 3),
        }  # fmt: skip
        return row, tokens
    finally:
        llm.close()


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
