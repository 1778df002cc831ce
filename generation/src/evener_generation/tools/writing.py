"""Calls as structural tags: what the formats share."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

Format = Mapping[str, Any]
Schema = Mapping[str, Any]
#: Parameters without a fixed place; with more of them, those that a call has come in the order of the schema.
_DEFINITIONS = ("$defs", "definitions")


def tag(begin: str, content: Format, end: str) -> Format:
    """A structural tag."""
    return {"type": "tag", "begin": begin, "content": content, "end": end}


def constant(text: str) -> Format:
    """A text that does not change."""
    return {"type": "const_string", "value": text}


def sequence(elements: list[Format]) -> Format:
    """One format behind another."""
    return {"type": "sequence", "elements": elements or [constant("")]}


def arguments(schema: Schema) -> Format:
    """Arguments as a JSON object. Those that the schema does not name are left out, unless it allows them."""
    named = "properties" in schema and "patternProperties" not in schema
    return {"type": "json_schema", "json_schema": {**({"additionalProperties": False} if named else {}), **schema}}


def json_tags(functions: Mapping[str, Schema], begin: Callable[[str], str], end: str) -> list[Format]:
    """For each function a tag whose content is its arguments as JSON; ``begin``: of the function's name."""
    return [tag(begin(name), arguments(schema), end) for name, schema in functions.items()]


def parameters(schema: Schema) -> Iterator[tuple[str, Schema, bool]]:
    """Names, schemas, and whether they are required, of the parameters of a function."""
    properties, required = schema.get("properties"), schema.get("required")
    shared = {name: schema[name] for name in _DEFINITIONS if name in schema}
    for name, inner in properties.items() if isinstance(properties, Mapping) else ():
        found = dict(inner) if isinstance(inner, Mapping) else {}
        yield name, {**shared, **found}, isinstance(required, list) and name in required


def raw_value(begin: str, schema: Schema, end: str, marks: Sequence[str]) -> Format:
    """A parameter whose value stands between two marks: texts without quotes, anything else as JSON.

    Args:
        marks: at each of them a parser ends the text, which therefore has none.
    """
    if schema.get("type") != "string":
        return tag(begin, {"type": "json_schema", "json_schema": schema}, end)
    options = [schema["const"]] if "const" in schema else schema.get("enum")
    if isinstance(options, list) and options and all(isinstance(each, str) for each in options):
        return tag(begin, {"type": "or", "elements": [constant(each) for each in options]}, end)
    text: dict[str, Any] = {"type": "any_text", "excludes": list(marks)}
    if isinstance(schema.get("pattern"), str):
        text = {**text, "type": "regex", "pattern": whole_pattern(schema["pattern"])}
    bounds = {"min_chars": schema.get("minLength"), "max_chars": schema.get("maxLength")}
    return tag(begin, {**text, **{name: bound for name, bound in bounds.items() if bound is not None}}, end)


#: An escape, a class of characters, or one character of a regular expression.
_PIECE = re.compile(r"\\.|\[\^?\]?(?:\\.|[^\]\\])*\]|.", re.DOTALL)


def whole_pattern(pattern: str) -> str:
    """A regular expression for the whole text, from a schema's ``pattern``, which need only fit somewhere in it."""
    ways, depth = [list[str]()], 0
    for piece in _PIECE.findall(pattern):
        depth += (piece == "(") - (piece == ")")
        if piece == "|" and not depth:
            ways.append([])
        else:
            ways[-1].append(piece)
    return "|".join(map(_whole, ways))


def _whole(pieces: list[str]) -> str:
    """One alternative, without its anchors."""
    begins, ends = pieces[:1] == ["^"], pieces[-1:] == ["$"]
    inner = "".join(pieces[begins : len(pieces) - ends])
    around = [r"(.|\n)*" if loose else "" for loose in (not begins, not ends)]
    return f"{around[0]}({inner}){around[1]}"


def open_object(schema: Schema) -> bool:
    """Whether a function without a list of parameters takes any."""
    return "properties" not in schema and schema.get("additionalProperties", True) is not False


def optional(content: Format) -> Format:
    """A format that may be left out."""
    return {"type": "optional", "content": content}


def keywords(schema: Schema, separator: str) -> Format:
    """Arguments ``name=value`` with values in JSON: first the required ones, then any of the others in order."""
    if open_object(schema):
        one = sequence([{"type": "regex", "pattern": "[a-zA-Z_][a-zA-Z0-9_]{0,63}="}, _value({})])
        return optional(sequence([one, {"type": "star", "content": sequence([constant(separator), one])}]))
    found = sorted(parameters(schema), key=lambda each: not each[2])
    pieces = [sequence([constant(f"{name}="), _value(inner)]) for name, inner, _ in found]
    needed = sum(required for _, _, required in found)

    def behind(place: int) -> list[Format]:
        return [optional(sequence([constant(separator), piece])) for piece in pieces[place:]]

    if needed:
        first = [part for piece in pieces[:needed] for part in (constant(separator), piece)][1:]
        return sequence([*first, *behind(needed)])
    # Any of them may be the first, which has no separator.
    starts = [sequence([piece, *behind(place + 1)]) for place, piece in enumerate(pieces)]
    return optional({"type": "or", "elements": starts}) if starts else sequence([])


def _value(schema: Schema) -> Format:
    return {"type": "json_schema", "json_schema": schema}


def quoted(name: str) -> str:
    """A name inside of JSON text."""
    return json.dumps(name, ensure_ascii=False)
