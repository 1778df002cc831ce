"""Rows of numbers for tokens of a request that generates text: hidden states and logits, and log-probabilities of the
whole vocabulary, which the front end finds in rows of logits. Torch-free."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from evener.errors import RequestError
from evener.sampling_params import MAX_LOGPROBS, SamplingParams

if TYPE_CHECKING:
    from evener.engine.wire.messages import TokenLogprobs, Tokens

#: Log-probabilities of one request that has more of a position: each takes some 100 bytes, and as JSON more.
MAX_LOGPROB_ENTRIES = 2**23


class TokenRows:
    """The rows that one request wants, checked.

    Args:
        params: of the request.
        most: how many of the likeliest tokens are wanted, of each sampled token and of each of the prompt.
        tokens: the most tokens of each sample, and those of the prompt.
        vocabulary: ids of the model.
        final_norm: whether the model gives hidden states after its final norm.

    Raises:
        RequestError: the model has no such rows, they are not of the prompt, or log-probabilities take too much memory.
    """

    def __init__(
        self, params: SamplingParams, most: tuple[int, int], tokens: tuple[int, int], vocabulary: int, final_norm: bool
    ) -> None:
        self._most, self._vocabulary = most, vocabulary
        check_size("prompt_logprobs", most[1], tokens[1], "the prompt")
        check_size("logprobs", most[0], params.n * tokens[0], "max_tokens")
        wanted = params.prompt_outputs
        if wanted is None:
            return
        if wanted.kind == "normed" and not final_norm:
            raise RequestError("this model gives no hidden states after its final norm; ask for kind 'hidden'",
                               "prompt_outputs")  # fmt: skip
        bounds = [position for each in wanted.ranges for position in each]
        if bounds != sorted(bounds) or (bounds and (bounds[0] < 0 or bounds[-1] > tokens[1])):
            message = f"the ranges of prompt_outputs must be ascending, within the prompt's {tokens[1]} tokens"
            raise RequestError(message, "prompt_outputs")

    def read(self, event: Tokens) -> tuple[list[dict[int, float]], list[dict[int, float]], bytes]:
        """What came with an event: the log-probabilities of samples and of the prompt, id to value, the token at the
        position first, then the likeliest; and the rows of ``prompt_outputs``."""
        entries = (event.logprobs or [], event.prompt_logprobs or [])
        counts = [len(each) if most > MAX_LOGPROBS else 0 for each, most in zip(entries, self._most, strict=True)]
        end = len(event.pooled) - sum(counts) * self._vocabulary * 4
        whole = np.frombuffer(event.pooled, np.float32, sum(counts) * self._vocabulary, end)
        of_prompt, of_samples = np.split(whole.reshape(-1, self._vocabulary), [counts[1]])
        samples, prompt = (
            [_distribution(entry, row, most) for entry, row in zip(each, rows, strict=True)] if most > MAX_LOGPROBS
            else [dict(zip(entry.ids, entry.values, strict=True)) for entry in each]
            for each, rows, most in zip(entries, (of_samples, of_prompt), self._most, strict=True)
        )  # fmt: skip
        return samples, prompt, event.pooled[:end]


def check_size(name: str, count: int, tokens: int, where: str) -> None:
    """Raises:
    RequestError: ``count`` log-probabilities of each of ``tokens`` tokens take too much memory.
    """
    if count > MAX_LOGPROBS and count * tokens > MAX_LOGPROB_ENTRIES:
        raise RequestError(
            f"{name} asks for {count} log-probabilities of each of {tokens} tokens, in all {count * tokens}; a request "
            f"may have {MAX_LOGPROB_ENTRIES}: lower {name}, or have at most {MAX_LOGPROB_ENTRIES // count} tokens in "
            f"{where}", name,
        )  # fmt: skip


def _distribution(entry: TokenLogprobs, logits: np.ndarray[Any, Any], count: int) -> dict[int, float]:
    """The ``count`` likeliest tokens of a row of logits, float32 [vocabulary]; ``entry``: what the engine names."""
    # Those that the engine names are exact: the token at the position, and behind it the likeliest.
    values = logits - logits[entry.ids[1]] + np.float32(entry.values[1])
    order = np.argsort(-logits, kind="stable")[:count]
    first = {entry.ids[0]: entry.values[0]}
    return first | dict(zip(order.tolist(), values[order].tolist(), strict=True)) | first
