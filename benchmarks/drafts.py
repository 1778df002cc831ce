"""What speculative decoding gains: one answer at a time with `infer.drafter=ngram`, beside the same without drafts.

    python benchmarks/drafts.py MODEL [--draft-model FOLDER] [--tokens 200] [--drafts 8] [--set KEY=VALUE ...]

MODEL is a folder with real weights. Two texts are continued greedily: one that begins to repeat what it has said twice
(``repeats``), and one with nothing to repeat (``new``). Two engines answer in turns; the best turn of each counts. The
answers must be equal. With ``--draft-model``, that model proposes tokens. Writes one line of JSON for each text to
standard output and, with ``--out``, to that file.
"""

from __future__ import annotations

import argparse
import datetime
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import after_stdlib  # noqa: F401
from machine import record

ROOT = Path(__file__).resolve().parent.parent


def main(argv: Sequence[str]) -> int:
    """Time both texts with drafts and without."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("--tokens", type=int, default=200, help="tokens of an answer")
    parser.add_argument("--drafts", type=int, default=8, help="infer.draft_tokens")
    parser.add_argument("--draft-model", type=Path, help="infer.draft_model, in place of infer.drafter=ngram")
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="configuration of evener")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args(argv)
    for row in measure(args):
        record(row, args.out)
    return 0


def texts() -> dict[str, str]:
    """The two texts."""
    code = (ROOT / "core/src/evener/engine/batching/step_limit.py").read_text()[:1500]
    return {"repeats": f"{code}\n\n{code}\n\n{code[:60]}", "new": "Once upon a time, in a small town by the sea,"}


def measure(args: argparse.Namespace) -> list[dict[str, Any]]:
    """One row a text: tokens a second, their ratio, and how many tokens a step made with drafts."""
    from evener import LLM

    shared: dict[str, Any] = {"infer.max_seq_len": 2048, "infer.max_reqs": 4}
    shared |= dict(pair.split("=", 1) for pair in args.set)
    drafter = {"infer.draft_model": args.draft_model} if args.draft_model else {"infer.drafter": "ngram"}
    rows = []
    with LLM(args.model, **shared) as plain, LLM(args.model, **shared, **{
        **drafter, "infer.draft_tokens": args.drafts
    }) as drafted:  # fmt: skip
        for name, text in texts().items():
            best = {"plain": float("inf"), "drafts": float("inf")}
            for _ in range(args.turns + 1):  # the first fills the prefix cache and builds kernels
                answers = []
                for kind, llm in (("plain", plain), ("drafts", drafted)):
                    taken, answer = seconds(llm, text, args.tokens)
                    best[kind] = min(best[kind], taken)
                    answers.append(answer)
                if answers[0] != answers[1]:
                    raise SystemExit(f"the answers to {name!r} differ")
            rate = {f"{kind}_tokens_per_second": round(args.tokens / taken, 1) for kind, taken in best.items()}
            settings = "".join(f" --set {pair}" for pair in args.set)
            settings += " --draft-model FOLDER" if args.draft_model else ""
            command = f"python benchmarks/drafts.py MODEL --tokens {args.tokens} --drafts {args.drafts}{settings}"
            rows.append({
                "device": plain.info.device, "model": args.model.name, "text": name, "draft_tokens": args.drafts,
                **rate, "ratio": round(best["plain"] / best["drafts"], 2), "date": datetime.date.today().isoformat(),
                "command": command,
            })  # fmt: skip
    return rows


def seconds(llm: Any, text: str, tokens: int) -> tuple[float, Sequence[int]]:
    """How long an answer takes, and its ids."""
    from evener import SamplingParams

    began = time.perf_counter()
    params = SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True, detokenize=False)
    output = llm.generate([text], params)[0].outputs[0]
    return time.perf_counter() - began, output.token_ids


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
