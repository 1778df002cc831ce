"""Rules by layer name in a ``quantization_config``: which layers differ from the rest, by name, glob or expression."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from typing import Any

from evener.errors import CheckpointError

#: An expression of a hostile file must not take for ever: so many repeats, none of a group.
_LONGEST, _REPEATS = 400, 6


def expression(text: Any, where: str) -> re.Pattern[str]:
    """A regular expression of a config, compiled.

    Raises:
        CheckpointError: it is none, or one that could take very long.
    """
    problem = ""
    if not isinstance(text, str) or len(text) > _LONGEST:
        problem = f"no text of at most {_LONGEST} characters"
    elif re.search(r"\)[*+{]", text) or len(re.findall(r"(?<!\\)[*+{]", text)) > _REPEATS:
        problem = f"more than {_REPEATS} repeats in it, or a repeated group"
    else:
        try:
            return re.compile(text)
        except (re.error, RecursionError, OverflowError) as error:
            problem = f"an error in it: {error}"
    raise CheckpointError(
        f"config.json's {where} has the pattern {str(text)[:80]!r}, which has {problem}; correct the file"
    )


def number(settings: Mapping[str, Any], keys: tuple[str, ...], default: int | None = None) -> int | None:
    """The integer under the first of ``keys`` that is there; ``default`` if it is no integer or none is there."""
    for key in keys:
        if key in settings:
            found = settings[key]
            return found if isinstance(found, int) and not isinstance(found, bool) else None
    return default


def flag(settings: Mapping[str, Any], key: str, default: bool) -> bool:
    """A yes or no.

    Raises:
        CheckpointError: it is something else.
    """
    found = settings.get(key, default)
    if not isinstance(found, bool):
        raise malformed(settings, key, "true or false")
    return found


def mapping(settings: Mapping[str, Any], key: str) -> Mapping[str, Any]:
    """The map under ``key``; empty if it is null or not there.

    Raises:
        CheckpointError: it is something else.
    """
    found = settings.get(key)
    if found is None:
        return {}
    if not isinstance(found, Mapping):
        raise malformed(settings, key, "a map")
    return found


def word(settings: Mapping[str, Any], key: str, known: Collection[str]) -> str | None:
    """The word under ``key``, one of ``known``; None if it is null or not there.

    Raises:
        CheckpointError: it is something else.
    """
    found = settings.get(key)
    if found is not None and (not isinstance(found, str) or found not in known):
        raise malformed(settings, key, " or ".join(known))
    return found


def texts(settings: Mapping[str, Any], key: str) -> list[str]:
    """The list of texts under ``key``; empty if it is null or not there.

    Raises:
        CheckpointError: it is something else.
    """
    found = settings.get(key)
    if found is None:
        return []
    if not isinstance(found, list) or not all(isinstance(each, str) for each in found):
        raise malformed(settings, key, "a list of texts")
    return found


def malformed(settings: Mapping[str, Any], key: str, wanted: str) -> CheckpointError:
    """The error of a value that is none of its key."""
    return CheckpointError(
        f"config.json's quantization_config has {key}: {str(settings.get(key))[:40]}, and evener reads {wanted}; use "
        "the config.json that was published with these weights, or correct the file"
    )
