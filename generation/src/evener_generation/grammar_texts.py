"""The texts of grammars, as every grammar library reads them."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from evener.contracts.grammar.library import GrammarSpec

#: Of one grammar, in characters. Compiling takes time in proportion to it.
MAX_CHARACTERS = 1 << 18
#: Between the parts of a JSON text, in characters. Without a bound, a model may write nothing else.
MAX_BLANKS = 64


def check_length(spec: GrammarSpec) -> None:
    """Raises:
    ValueError: it is too long.
    """
    if len(spec.text) > MAX_CHARACTERS:
        raise ValueError(f"it has {len(spec.text)} characters, and at most {MAX_CHARACTERS} are allowed")


def parts_of(spec: GrammarSpec) -> tuple[Mapping[str, Any] | None, GrammarSpec | None]:
    """What stands before the answer, and the answer's own grammar, if it has one.

    Raises:
        ValueError: the structural tag is no JSON object.
    """
    if spec.kind != "structural_tag":
        return None, spec
    found = object_of(spec.text)
    before = found.get("reasoning")
    if before is not None and not (isinstance(before, dict) and isinstance(before.get("end"), str) and before["end"]):
        raise ValueError("the reasoning of a structural tag needs a text as 'end'")
    return before, spec if found.get("format") is not None or before is None else None


def object_of(text: str) -> Mapping[str, Any]:
    """A structural tag.

    Raises:
        ValueError: it is no JSON object.
    """
    try:
        found = json.loads(text)
    except RecursionError as error:
        raise ValueError("the structural tag is nested too deeply") from error
    if not isinstance(found, dict):
        raise ValueError("a structural tag is a JSON object")
    return found


def choices_of(text: str) -> list[str]:
    """The texts of which one is chosen.

    Raises:
        ValueError: they are no list of texts.
    """
    found: Any = json.loads(text)
    if not isinstance(found, list) or not found or not all(isinstance(each, str) and each for each in found):
        raise ValueError("choices are a list of texts that are not empty")
    return found


def quoted(text: str) -> str:
    """A constant text as grammars write it."""
    return json.dumps(text, ensure_ascii=False)
