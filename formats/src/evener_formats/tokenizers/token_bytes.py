"""The bytes of each token, from the decoder in a ``tokenizer.json``."""

from __future__ import annotations

import json
import re
from typing import Any

from evener.contracts.tokenizer import ByteRule

_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")


def byte_rule(decoder: str) -> ByteRule | None:
    """The rule of a decoder, given as JSON; None if its tokens have no fixed bytes.

    There are two families: ``ByteLevel`` (a printable character for every byte), and ``Replace… ByteFallback? Fuse
    Strip?`` (a marker for the space, ``<0xE2>`` for a byte).
    """
    spec = json.loads(decoder)
    if spec.get("type") == "ByteLevel":
        table = byte_level_table()
        return ByteRule(lambda token: _from_byte_level(token, table))
    if spec.get("type") != "Sequence":
        return None
    steps = list(spec["decoders"])
    replacements = []
    while steps and steps[0]["type"] == "Replace" and set(steps[0]["pattern"]) == {"String"}:
        step = steps.pop(0)
        replacements.append((step["pattern"]["String"], step["content"]))
    fallback = bool(steps) and steps[0]["type"] == "ByteFallback"
    rest = steps[1:] if fallback else steps
    if not rest or rest[0]["type"] != "Fuse" or not all(_strips_one_space(step) for step in rest[1:]) or len(rest) > 2:
        return None
    return ByteRule(lambda token: _from_marked(token, replacements, fallback), strip_first_space=len(rest) == 2)


def byte_level_table() -> dict[str, int]:
    """GPT-2's table from printable characters to bytes: printable bytes are themselves, the others begin at U+0100."""
    printable = [*range(ord("!"), ord("~") + 1), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    table = {chr(byte): byte for byte in printable}
    others = [byte for byte in range(256) if byte not in table.values()]
    return table | {chr(256 + i): byte for i, byte in enumerate(others)}


def _from_byte_level(token: str, table: dict[str, int]) -> bytes:
    try:
        return bytes([table[char] for char in token])
    except KeyError:
        # An added token stands for its own text.
        return token.encode("utf-8")


def _from_marked(token: str, replacements: list[tuple[str, str]], fallback: bool) -> bytes:
    for old, new in replacements:
        token = token.replace(old, new)
    match = _BYTE_TOKEN.fullmatch(token) if fallback else None
    return token.encode("utf-8") if match is None else bytes([int(match[1], 16)])


def _strips_one_space(step: dict[str, Any]) -> bool:
    return step["type"] == "Strip" and (step["content"], step["start"], step["stop"]) == (" ", 1, 0)
