"""Perplexity of GGUF files beside llama.cpp's, on the same text.

    python benchmarks/perplexity.py FILE.gguf... --text FILE [--context 512] [--windows 16] [--out FILE.jsonl]

As llama.cpp's own program counts it: the text is cut into windows of so many tokens, one after another, each begins
with the model's first token if it has one, and the tokens of the second half of each window are scored. Both engines
get the same ids; llama.cpp is that of ``make llamacpp``. The page's figures are of the news texts in the wheel of
gensim 4.4.0::

    pip download --no-deps gensim==4.4.0 && unzip -p gensim-*.whl gensim/test/test_data/lee_background.cor > news.txt
"""

from __future__ import annotations

import argparse
import hashlib
import json
import math
import os
import subprocess
import sys
from collections.abc import Sequence
from datetime import date
from pathlib import Path
from typing import Any

from machine import cpu_name, record, versions

ROOT = Path(__file__).resolve().parent.parent
#: Characters for one token at most, in a text for so many tokens.
_CHARACTERS = 12


def windows_of(model: Path, text: str, context: int, count: int) -> list[list[int]]:
    """The first ``count`` windows of the text, in ids."""
    from evener.frontend.tokenizer import Tokenizer
    from evener.loading.checkpoint import open_checkpoint

    tokenizer = Tokenizer.of(open_checkpoint(model))
    if tokenizer is None:
        raise SystemExit(f"{model} has no tokenizer")
    beside = tokenizer.encode("a"), tokenizer.encode("a", add_special_tokens=False)
    first = beside[0][0] if len(beside[0]) > len(beside[1]) else None
    ids = tokenizer.encode(text[: context * count * _CHARACTERS], add_special_tokens=False)
    if len(ids) < context * count:
        raise SystemExit(f"the text has {len(ids):,} tokens, and {context * count:,} are asked for; lower --windows")
    found = [list(ids[at : at + context]) for at in range(0, context * count, context)]
    return found if first is None else [[first, *window[1:]] for window in found]


def ours(model: Path, windows: Sequence[Sequence[int]], keys: dict[str, str]) -> list[list[float]]:
    """The log-probability of each token but the first, of each window."""
    from evener import LLM, SamplingParams

    asked = SamplingParams(max_tokens=1, temperature=0.0, prompt_logprobs=0)
    with LLM(str(model), **{"infer.max_seq_len": len(windows[0]) + 1, **keys}) as llm:
        answers = llm.generate([list(window) for window in windows], asked)
    found = []
    for window, answer in zip(windows, answers, strict=True):
        rows = answer.prompt_logprobs or []
        found.append([row[token] for token, row in zip(window[1:], rows[1:], strict=True) if row is not None])
    return found


def theirs(model: Path, windows: Sequence[Sequence[int]], threads: int) -> list[list[float]]:
    """The same by llama.cpp."""
    built = Path.home() / ".cache/evener/llamacpp/bin/python"
    python = os.environ.get("EVENER_BENCH_PYTHON_LLAMACPP", str(built))
    asked = json.dumps({"model": str(model), "windows": windows, "threads": threads})
    done = subprocess.run(
        [python, str(ROOT / "scripts/llamacpp_logprobs.py")], input=asked, capture_output=True, text=True, check=False
    )
    if done.returncode:
        raise SystemExit(f"llama.cpp failed (it is built by 'make llamacpp'):\n{done.stderr[-2000:]}")
    found: list[list[float]] = json.loads(done.stdout)
    return found


def perplexity(scored: Sequence[Sequence[float]]) -> float:
    """Of the tokens in the second half of each window; a row has one number less than its window has tokens."""
    kept = [number for row in scored for number in row[(len(row) + 1) // 2 :]]
    return math.exp(-sum(kept) / len(kept))


def compare(model: Path, text: str, context: int, count: int, keys: dict[str, str]) -> dict[str, Any]:
    """Both perplexities of one file."""
    windows = windows_of(model, text, context, count)
    mine, other = perplexity(ours(model, windows, keys)), perplexity(theirs(model, windows, os.cpu_count() or 1))
    return {
        "device": cpu_name(), "model": model.stem, "keys": keys, "case": f"{count} windows of {context} tokens",
        "metric": "perplexity", "unit": "", "better": "lower", "ours": round(mine, 4), "theirs": round(other, 4),
        "difference": round(mine / other - 1, 5), "version": f"evener {versions()['evener']}",
        "peer": "llama.cpp (llama-cpp-python 0.3.36)", "text_sha256": hashlib.sha256(text.encode()).hexdigest(),
        "date": date.today().isoformat(),
        "command": f"python benchmarks/perplexity.py {model.name} --text FILE --context {context} --windows {count}",
        "software": versions(),
    }  # fmt: skip


def main() -> int:
    """Print one JSON line a file; 1 if one differs by more than a hundredth."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("models", nargs="+", type=Path, help="GGUF files")
    parser.add_argument("--text", type=Path, required=True)
    parser.add_argument("--context", type=int, default=512)
    parser.add_argument("--windows", type=int, default=16)
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE")
    parser.add_argument("--out", type=Path, help="file to which the lines are appended")
    asked = parser.parse_args()
    text, far = asked.text.read_text("utf-8"), False
    for model in asked.models:
        keys = dict(each.split("=", 1) for each in asked.set)
        found = compare(model.resolve(), text, asked.context, asked.windows, keys)
        far |= abs(found["difference"]) > 0.01
        record(found, asked.out)
    return int(far)


if __name__ == "__main__":
    sys.exit(main())
