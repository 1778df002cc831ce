"""What one key of the core or of a package takes: its kind, limits and help; parsing and checking of values.

``parse`` turns what the user gave (text from a command line, typed values from YAML or Python) into a typed value;
``check`` checks a typed value. The dataclasses of ``config.schema`` call ``check`` when they are built, so every value
is checked.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from evener.contracts.descriptor import Option
from evener.errors import ConfigError, did_you_mean

Kind = Literal["str", "path", "int", "float", "bool", "size", "names"]

_YES = frozenset({"true", "yes", "on", "1"})
_NO = frozenset({"false", "no", "off", "0"})
_UNITS = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12, "ki": 2**10, "mi": 2**20, "gi": 2**30, "ti": 2**40}
_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*([kmgt]i?)?b?", re.IGNORECASE)
_KIND_DESCRIPTIONS = {
    "str": "text",
    "path": "a path",
    "int": "an integer",
    "float": "a number",
    "bool": "true or false",
    "size": "bytes ('4GiB'), or a fraction of the free memory ('0.4' or '40%')",
    "names": "a list of names",
}
#: A smaller size in bytes is surely a mistake (``kv_memory=4`` instead of 4 GiB).
_SMALLEST_SIZE = 2**20


@dataclass(frozen=True, kw_only=True)
class KeySpec:
    """What one key takes.

    Attributes:
        help: one sentence.
        kind: the type of its values, besides ``auto`` and ``none``.
        default: the value if the key is not set; ``dataclasses.MISSING`` if it must be set.
        auto: ``"auto"`` is allowed.
        none: ``None`` (typed ``none`` or ``null``) is allowed.
        choices: the only values allowed; empty means any of ``kind``.
        claimable: an installed package may define further values with its ``aliases``.
        minimum: the smallest number allowed.
        maximum: the largest number allowed.
        supported: the values that this version supports; empty means all.
        missing: what is not built yet, as in "data parallelism is"; for the error about an unsupported value.
        words: other spellings of values, ``{"bf16": "bfloat16"}``.
        secret: its value is never shown, logged or written to a file.
    """

    help: str
    kind: Kind
    default: Any = None
    auto: bool = False
    none: bool = False
    choices: tuple[Any, ...] = ()
    claimable: bool = False
    minimum: int | None = None
    maximum: int | None = None
    supported: tuple[Any, ...] = ()
    missing: str = ""
    words: Mapping[str, str] = field(default_factory=dict)
    secret: bool = False

    @classmethod
    def of_option(cls, option: Option) -> KeySpec:
        """What a package's option takes."""
        kinds: dict[type, Kind] = {int: "int", float: "float", str: "str", bool: "bool"}
        kind, default = kinds[option.type], option.default
        return cls(help=option.help, kind=kind, default=default, none=default is None, choices=option.choices)

    def takes(self) -> str:
        """The allowed values in words: ``"an integer of at least 1 or auto"``."""
        words = [] if self.choices else [_KIND_DESCRIPTIONS[self.kind] + self._limits()]
        words += [format_value(choice) for choice in self.choices]
        if self.auto and "auto" not in self.choices:
            words.append("auto")
        if self.none:
            words.append("none")
        return words[0] if len(words) == 1 else ", ".join(words[:-1]) + " or " + words[-1]

    def _limits(self) -> str:
        if self.minimum is None:
            return ""
        return f" of at least {self.minimum}" if self.maximum is None else f" from {self.minimum} to {self.maximum}"


def parse(key: str, spec: KeySpec, raw: object) -> Any:
    """The typed value of ``raw``; text is read as ``spec.kind`` says, other values stay as they are.

    Raises:
        ConfigError: the text cannot be read as a value of this key.
    """
    if isinstance(raw, (list, tuple)) and spec.kind == "names":
        return tuple(raw)
    if isinstance(raw, os.PathLike) and spec.kind == "path":
        raw = os.fspath(raw)
    if not isinstance(raw, str):
        return _int_to_float(raw) if spec.kind == "float" else raw
    text = raw.strip() if spec.kind not in ("str", "path") else raw
    word = spec.words.get(text.lower(), text)
    if spec.none and word.lower() in ("none", "null", "~"):
        return None
    if spec.auto and word.lower() == "auto":
        return "auto"
    if spec.kind in ("str", "path"):
        return os.path.expanduser(word) if spec.kind == "path" else word
    if spec.kind == "names":
        return tuple(name.strip() for name in word.split(",") if name.strip())
    value = _read(spec, word)
    if value is None:
        raise ConfigError(f"{key}={raw!r} cannot be read; it takes {spec.takes()}" + _nearest(spec, word))
    return value


def _read(spec: KeySpec, text: str) -> Any:
    """Text as a bool, number or size; None if it is not one."""
    if spec.kind == "bool":
        return True if text.lower() in _YES else False if text.lower() in _NO else None
    if spec.kind == "size":
        return _size(text)
    try:
        return int(text) if spec.kind == "int" else float(text)
    except ValueError:
        return None


def _size(text: str) -> int | float | None:
    if re.fullmatch(r"0?\.\d+", text):
        return float(text)
    if share := re.fullmatch(r"(\d+(?:\.\d+)?)\s*%", text):
        return float(share[1]) / 100
    match = _SIZE.fullmatch(text)
    return int(float(match[1]) * _UNITS[(match[2] or "").lower()]) if match else None


def _int_to_float(raw: object) -> object:
    return float(raw) if isinstance(raw, int) and not isinstance(raw, bool) else raw


def read(key: str, spec: KeySpec, raw: object) -> Any:
    """``parse``, then ``check``: the checked value.

    Raises:
        ConfigError: as ``parse`` and ``check``.
    """
    value = parse(key, spec, raw)
    check(key, spec, value)
    return value


def check(key: str, spec: KeySpec, value: object) -> None:
    """Check that ``value`` may be used for ``key``.

    Raises:
        ConfigError: it has the wrong type, is out of range, is not among the choices, or is not supported yet.
    """
    if spec.supported and not _is_among(value, spec.supported) and _is_kind(spec, value):
        may = " or ".join(format_value(choice) for choice in spec.supported)
        raise ConfigError(
            f"{key}={format_value(value)} is not in this version: {spec.missing} not built yet; leave {key} out"
            f", or set {key}={may}"
        )
    if (spec.none and value is None) or (spec.auto and value == "auto"):
        return
    if spec.choices:
        _check_choice(key, spec, value)
    elif not _is_kind(spec, value):
        asked = key if spec.secret else f"{key}={value!r}"
        raise ConfigError(f"{asked} is not {_KIND_DESCRIPTIONS[spec.kind]}; it takes {spec.takes()}")
    _check_limits(key, spec, value)


def _check_choice(key: str, spec: KeySpec, value: object) -> None:
    if _is_among(value, spec.choices):
        return
    if spec.claimable:
        choices = [format_value(choice) for choice in spec.choices]
        near = did_you_mean(str(value), choices) if _nearest(spec, str(value)) else ""
        raise ConfigError(
            f"no installed package defines {key}={value}{near}; it takes {spec.takes()}, or a value that an installed "
            f"package defines (`evener plugins` lists packages). Leave {key} out to use the fastest that fits"
        )
    raise ConfigError(
        f"{key}={format_value(value)} is not a value of {key}; it takes {spec.takes()}" + _nearest(spec, str(value))
    )


def _check_limits(key: str, spec: KeySpec, value: object) -> None:
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return
    if spec.kind == "size":
        if isinstance(value, int) and value < _SMALLEST_SIZE:
            raise ConfigError(f"{key}={value} is {value} bytes, which is too small; for GiB write {key}={value}GiB")
        if isinstance(value, float) and not 0 < value < 1:
            raise ConfigError(f"{key}={value} is not between 0 and 1; it takes {spec.takes()}")
    below = spec.minimum is not None and value < spec.minimum
    if below or (spec.maximum is not None and value > spec.maximum):
        raise ConfigError(f"{key}={value} is out of range; it takes {spec.takes()}")


def _is_kind(spec: KeySpec, value: object) -> bool:
    if spec.kind == "names":
        return isinstance(value, tuple) and all(isinstance(name, str) for name in value)
    if spec.kind == "bool":
        return isinstance(value, bool)
    if isinstance(value, bool):
        return False
    if spec.kind in ("str", "path"):
        return isinstance(value, str) and value != ""
    return isinstance(value, int if spec.kind == "int" else float if spec.kind == "float" else (int, float))


def _is_among(value: object, choices: tuple[Any, ...]) -> bool:
    """Membership that does not treat 1 and True as equal."""
    return any(type(value) is type(choice) and value == choice for choice in choices)


def _nearest(spec: KeySpec, text: str) -> str:
    words = [format_value(choice) for choice in spec.choices] + (["auto"] if spec.auto else [])
    hint = did_you_mean(text, words) if words else ""
    return hint if "did you mean" in hint else ""


def format_value(value: object) -> str:
    """A value as the user would type it."""
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, (tuple, list)):
        return ",".join(map(str, value)) or "none"
    return "none" if value is None else str(value)
