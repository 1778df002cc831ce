"""Log-probabilities in OpenAI's two formats."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypeVar

import msgspec
from evener_pooling.rows import check_size

from evener.frontend.tokenizer import Tokenizer
from evener.sampling_params import SamplingParams

T = TypeVar("T")
#: Log-probabilities of one position that are written at once and kept as objects; more are, in a thread, as JSON.
_FEW = 1000
#: OpenAI's value for minus infinity, which JSON does not have.
_LOWEST = -9999.0


class TokenNames:
    """How tokens are written in responses. ``tokenizer`` None, or ``as_ids``: as their ids."""

    def __init__(self, tokenizer: Tokenizer | None, as_ids: bool = False) -> None:
        self._tokenizer, self._as_ids = tokenizer, as_ids

    def bytes(self, token_id: int) -> bytes | None:
        """The token's bytes; None without a tokenizer."""
        return None if self._tokenizer is None else self._tokenizer.token_bytes(token_id)

    def name(self, token_id: int, prefix: str = "") -> str:
        """The token's text; part of a character is written ``<prefix>\\xe2\\x80``, so that different parts differ."""
        raw = self.bytes(token_id)
        if raw is None or self._as_ids:
            return f"token_id:{token_id}"
        try:
            return raw.decode("utf-8")
        except UnicodeDecodeError:
            return prefix + "".join(f"\\x{byte:02x}" for byte in raw)


def ranked(entry: dict[int, float], count: int) -> list[tuple[int, float]]:
    """The ``count`` likeliest tokens at one position, likeliest first; of equal ones the lower id first. -1: all."""
    found = sorted(((i, max(value, _LOWEST)) for i, value in entry.items()), key=lambda item: (-item[1], item[0]))
    return found if count == -1 else found[:count]


async def beside(count: int | None, work: Callable[[], T]) -> T:
    """What ``work`` returns, which writes the log-probabilities of ``count`` tokens at each position; in a thread if
    that takes long: a whole vocabulary takes a part of a second."""
    return work() if count is None or 0 <= count <= _FEW else await asyncio.to_thread(work)


def check_together(params: SamplingParams, vocabulary: int, streams: Sequence[Any], new_tokens: int) -> None:
    """The engine limits the log-probabilities of one prompt; this limits those of a request with several, and those of
    a prompt that are returned with each of its choices.

    Args:
        streams: of the request's prompts so far.
        new_tokens: the most that a choice may have.

    Raises:
        RequestError: as ``check_size``.
    """
    shown = params.n * sum(len(stream.prompt_token_ids) for stream in streams)
    for name, asked, tokens, where in (
        ("prompt_logprobs", params.prompt_logprobs, shown, "the prompt"),
        ("logprobs", params.logprobs, len(streams) * params.n * new_tokens, "max_tokens"),
    ):
        check_size(name, vocabulary if asked == -1 else min(asked or 0, vocabulary), tokens, where)


def compact(value: Any, write: Callable[[Any], bytes] = msgspec.json.encode) -> Any:
    """A list or an object as ``write`` writes it, as JSON, if it is long: that takes a tenth of the memory."""
    return value if len(value) <= _FEW + 1 else msgspec.Raw(write(value))


def chat_logprobs(
    names: TokenNames, ids: Iterable[int], entries: Iterable[dict[int, float]], count: int
) -> list[dict[str, Any]]:
    """The ``content`` of a chat choice's ``logprobs``: one object per token, with the ``count`` likeliest."""

    def one(token_id: int, value: float) -> dict[str, Any]:
        raw = names.bytes(token_id)
        return {"token": names.name(token_id), "logprob": value, "bytes": None if raw is None else list(raw)}

    return [
        {
            **one(token_id, max(entry[token_id], _LOWEST)),
            "top_logprobs": compact([one(i, v) for i, v in ranked(entry, count)]),
        }
        for token_id, entry in zip(ids, entries, strict=True)
    ]


def prompt_logprobs(
    names: TokenNames, ids: Iterable[int], entries: Iterable[dict[int, float] | None], count: int
) -> list[dict[int, dict[str, Any]] | msgspec.Raw | None]:
    """vLLM's ``prompt_logprobs``: for each token of a prompt an object by token id, with its own and the ``count``
    likeliest; None for the first. ``rank`` counts from 1; None: behind those that are known."""
    return [
        None if entry is None else compact(_prompt_entry(names, token_id, entry, count))
        for token_id, entry in zip(ids, entries, strict=True)
    ]


def _prompt_entry(names: TokenNames, token_id: int, entry: dict[int, float], count: int) -> dict[int, dict[str, Any]]:
    # With the token itself there are up to count + 1 entries, of which the last has an unknown place.
    places = {other: place for place, (other, _) in enumerate(ranked(entry, count), 1)}
    shown = dict.fromkeys([token_id, *places])
    return {
        i: {"logprob": max(entry[i], _LOWEST), "rank": places.get(i), "decoded_token": names.name(i)} for i in shown
    }


class CompletionLogprobs:
    """The ``logprobs`` of one choice of a completion, which grow as tokens come.

    Args:
        names: how tokens are written.
        tokenizer: gives the offset of a token in the text; None: all offsets are 0.
        count: number of likeliest tokens; the sampled one is always added, as in OpenAI's API.
    """

    def __init__(self, names: TokenNames, tokenizer: Tokenizer | None, count: int) -> None:
        self._names, self._count = names, count
        self._detokenizer = None if tokenizer is None else tokenizer.detokenizer()
        self._offset = 0

    def add(self, ids: Iterable[int], entries: Iterable[dict[int, float]]) -> dict[str, list[Any]]:
        """The lists for the next tokens only. ``entries`` is empty for the prompt's first token."""
        out: dict[str, list[Any]] = {"tokens": [], "token_logprobs": [], "top_logprobs": [], "text_offset": []}
        for token_id, entry in zip(ids, entries, strict=True):
            # The token itself comes first, as in vLLM's answers.
            top = {token_id: max(entry[token_id], _LOWEST)} | dict(ranked(entry, self._count)) if entry else {}
            out["tokens"].append(self._name(token_id))
            out["token_logprobs"].append(top.get(token_id))
            named = {self._name(i): value for i, value in top.items()}
            out["top_logprobs"].append(compact(named) if named else None)
            out["text_offset"].append(self._offset)
            if self._detokenizer is not None:
                self._offset += len(self._detokenizer.push(token_id))
        return out

    def _name(self, token_id: int) -> str:
        return self._names.name(token_id, "bytes:")


def extend(whole: dict[str, list[Any]], part: dict[str, list[Any]]) -> None:
    """Append the lists of ``part`` to those of ``whole``."""
    for key, values in part.items():
        whole.setdefault(key, []).extend(values)
