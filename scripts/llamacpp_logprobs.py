"""Token ids of a text, log-probabilities of ids, or ids that follow, by llama.cpp, which the GGUF tests compare with.

Run by the Python of an environment with llama-cpp-python (``make llamacpp``), never by the project's own. Standard
input is a JSON object with ``model`` (a GGUF file) and ``text`` or ``ids``; standard output a JSON list of ids,
or one of numbers, for each id but the first; with ``count``, the greedy ids that follow, so many. ``windows`` in place
of ``ids`` are several lists of ids, with a list of numbers for each.
"""

from __future__ import annotations

import json
import math
import sys

import llama_cpp
import numpy as np


def main() -> None:
    """Answer one request."""
    asked = json.load(sys.stdin)
    if "text" in asked:
        model = llama_cpp.Llama(asked["model"], vocab_only=True, verbose=False)
        json.dump(model.tokenize(asked["text"].encode(), add_bos=True, special=True), sys.stdout)
        return
    if "count" in asked:
        ids = asked["ids"]
        model = llama_cpp.Llama(asked["model"], n_ctx=len(ids) + asked["count"], verbose=False)
        follow = model.generate(ids, temp=0.0, top_k=1, repeat_penalty=1.0)
        json.dump([next(follow) for _ in range(asked["count"])], sys.stdout)
        return
    windows = asked.get("windows") or [asked["ids"]]
    size = max(map(len, windows))
    model = llama_cpp.Llama(
        asked["model"], n_ctx=size, n_batch=size, logits_all=True, verbose=False, n_threads=asked.get("threads")
    )
    found = [logprobs(model, ids) for ids in windows]
    json.dump(found if "windows" in asked else found[0], sys.stdout)


def logprobs(model: llama_cpp.Llama, ids: list[int]) -> list[float]:
    """Of each id but the first, after those before it."""
    model.reset()
    model.eval(ids)
    found = []
    for number, token in enumerate(ids[1:]):  # one row at a time: all of a large vocabulary take gigabytes
        row = model.scores[number]
        top = row.max()
        found.append(float(row[token] - top - np.log(np.exp(row - top).sum(dtype=np.float64))))
    if not all(map(math.isfinite, found)):
        raise SystemExit("llama.cpp gave numbers that are not finite")
    return found


if __name__ == "__main__":
    main()
