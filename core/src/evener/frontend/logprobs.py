"""Log-probabilities from the engine's messages: of the likeliest tokens, or of the whole vocabulary."""

from __future__ import annotations

import numpy as np

from evener.engine.wire.messages import TokenLogprobs
from evener.errors import RequestError
from evener.sampling_params import MAX_LOGPROB_ENTRIES, MAX_LOGPROBS


def likeliest(count: int | None, vocabulary: int) -> int | None:
    """How many of the likeliest tokens are wanted where a request says ``count``; -1: all."""
    return count if count is None else vocabulary if count == -1 else min(count, vocabulary)


def check_size(name: str, count: int | None, tokens: int) -> None:
    """Raises:
    RequestError: ``count`` log-probabilities of each of ``tokens`` tokens take too much memory.
    """
    if (count or 0) > MAX_LOGPROBS and (count or 0) * tokens > MAX_LOGPROB_ENTRIES:
        where = "max_tokens" if name == "logprobs" else "the prompt"
        raise RequestError(
            f"{name} asks for {count} log-probabilities of each of {tokens} tokens, in all {(count or 0) * tokens}; "
            f"a request may have {MAX_LOGPROB_ENTRIES}: lower {name}, or have at most "
            f"{MAX_LOGPROB_ENTRIES // (count or 1)} tokens in {where}", name,
        )  # fmt: skip


def logprobs_dict(entry: TokenLogprobs, count: int) -> dict[int, float]:
    """Id to log-probability, the token at the position first, then the likeliest: those that the engine names, or of a
    whole vocabulary ``count``."""
    found = dict(zip(entry.ids, entry.values, strict=True))
    if not entry.logits:
        return found
    logits = np.frombuffer(entry.logits, np.float32)
    # Those that the engine names are exact: the token at the position, and behind it the likeliest.
    values = logits - logits[entry.ids[1]] + np.float32(entry.values[1])
    order = np.argsort(-logits, kind="stable")[:count]
    first = {entry.ids[0]: entry.values[0]}
    return first | dict(zip(order.tolist(), values[order].tolist(), strict=True)) | first
