"""Fields of a request that this API does not have.

Clients send fields for other servers, so unknown ones are left out and named in the response header
``x-ignored-fields``. A field that looks like a misspelt sampling parameter is an error: the client meant something else
than it gets.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from typing import Any

from evener.errors import RequestError

#: The header has at most this many names, each of at most this many characters.
_MOST_NAMES, _LONGEST_NAME = 16, 40
#: A name that differs by this many characters, added, left out or changed, is a misspelling.
_DISTANCE = 2
#: Parameters that decide what is sampled. Names of one or two letters are near too many others.
SAMPLING = (
    "temperature", "top_p", "top_k", "min_p", "seed", "stop", "max_tokens", "max_completion_tokens", "min_tokens",
    "frequency_penalty", "presence_penalty", "repetition_penalty", "logit_bias", "stop_token_ids", "ignore_eos",
    "stop_with_eos", "logprobs", "top_logprobs", "best_of", "max_time", "stream",
)  # fmt: skip

#: Fields that clients send and that change no token here.
IGNORED = (
    "metadata", "store", "prompt_cache_key", "prompt_cache_retention", "safety_identifier", "verbosity",
    "service_tier", "prediction", "speed",
)  # fmt: skip


def drop_unknown(
    body: Mapping[str, Any], known: Collection[str], parts: Mapping[str, Collection[str]], samples: bool = True
) -> tuple[dict[str, Any], list[str]]:
    """The body without fields that the API does not have, and the paths of these.

    Args:
        known: fields of the body.
        parts: fields of what ``messages`` holds: ``message`` for each of them, ``part`` for each part of its content.

        samples: whether the API has sampling parameters, which may be misspelt.

    Raises:
        RequestError: a field is nearly a sampling parameter.
    """
    for name in body.keys() - {*known, *IGNORED} if samples else ():
        if near := nearest(name):
            raise RequestError(
                f"{name[:_LONGEST_NAME]} is not a field of this API; did you mean {near!r}?", name[:_LONGEST_NAME],
                "unknown_parameter",
            )  # fmt: skip
    kept = {name: value for name, value in body.items() if name in known}
    ignored = [name for name in body if name not in known]
    messages = kept.get("messages")
    if parts and isinstance(messages, list):
        kept["messages"] = [_message(each, parts, ignored) for each in messages]
    return kept, list(dict.fromkeys(ignored))


def _message(message: Any, parts: Mapping[str, Collection[str]], ignored: list[str]) -> Any:
    if not isinstance(message, dict):
        return message  # its error comes with the other checks
    plain = _only(message, parts["message"], "messages[].", ignored)
    content = plain.get("content")
    if isinstance(content, list):
        plain["content"] = [
            _only(each, parts["part"], "messages[].content[].", ignored) if isinstance(each, dict) else each
            for each in content
        ]
    return plain


def _only(value: dict[str, Any], known: Collection[str], where: str, ignored: list[str]) -> dict[str, Any]:
    strange = value.keys() - set(known)
    if not strange:
        return value
    ignored += [where + name for name in value if name in strange]
    return {name: item for name, item in value.items() if name not in strange}


def header(names: Iterable[str]) -> str:
    """The names as the header's value: ASCII, without what could end a header."""
    texts = list(names)
    shown = ["".join(c if c.isascii() and (c.isalnum() or c in "_-.[]") else "?" for c in n[:_LONGEST_NAME])
             for n in texts[:_MOST_NAMES]]  # fmt: skip
    more = [f"and {len(texts) - _MOST_NAMES} more"] if len(texts) > _MOST_NAMES else []
    return ", ".join([*shown, *more])


def nearest(name: str) -> str | None:
    """The sampling parameter that ``name`` probably means; None if it is near none."""
    near = [(distance(name, each), each) for each in SAMPLING if abs(len(name) - len(each)) <= _DISTANCE]
    best = min(near, default=(_DISTANCE + 1, ""))
    return best[1] if best[0] <= _DISTANCE else None


def distance(one: str, other: str) -> int:
    """Levenshtein's edit distance, in characters."""
    row = list(range(len(other) + 1))
    for i, left in enumerate(one, 1):
        before, row[0] = row[0], i
        for j, right in enumerate(other, 1):
            before, row[j] = row[j], min(row[j] + 1, row[j - 1] + 1, before + (left != right))
    return row[-1]
