"""Formats for single matrices: the option ``formats.quant_rules``. Torch-free.

A JSON object, or the path of a file with one, of ``"name": "format"``. A name is a tensor's or its module's (without
``.weight``); with ``re:`` before it, it is a regular expression that must match one of the two whole. The first that
matches counts. The format ``none`` leaves a matrix as it is stored.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Sequence
from pathlib import Path

from evener.contracts.conversion.quantizer import Matrix
from evener.errors import ConfigError, did_you_mean

#: Bytes of the longest file of rules that is read.
_MAX_FILE = 1_000_000
NONE = "none"


class Rules:
    """The rules of one option.

    Args:
        text: of the option; empty: no rules.
        formats: the formats that a rule may name, beside ``none``.

    Raises:
        ConfigError: the text is no JSON object of names and formats, or an expression is wrong.
    """

    def __init__(self, text: str, formats: Collection[str]) -> None:
        self._rules = [(name, _pattern(name), form) for name, form in _read(text).items()]
        for name, _, form in self._rules:
            if form not in (NONE, *formats):
                raise ConfigError(
                    f"formats.quant_rules: {name!r} has the format {form!r}{did_you_mean(form, formats)} With this "
                    f"quant= it is one of: {', '.join(sorted(formats))}, {NONE}"
                )

    def of(self, name: str) -> str | None:
        """The format for the tensor ``name``; None if no rule matches."""
        module = name.removesuffix(".weight")
        return next((f for _, p, f in self._rules if p.fullmatch(module) or p.fullmatch(name)), None)

    def check_used(self, matrices: Sequence[Matrix]) -> None:
        """Raises:
        ConfigError: a rule matches no matrix.
        """
        names = [each for matrix in matrices for each in (matrix.name, matrix.name.removesuffix(".weight"))]
        for shown, pattern, _ in self._rules:
            if not any(map(pattern.fullmatch, names)):
                near = did_you_mean(shown, names[1::2]) or f" Matrices are called {', '.join(names[1:6:2])}, …"
                raise ConfigError(f"formats.quant_rules: {shown!r} matches no matrix of the model.{near}")


def _read(text: str) -> dict[str, str]:
    source = text.strip()
    if source and not source.startswith("{"):
        path = Path(source).expanduser()
        try:
            if path.stat().st_size > _MAX_FILE or not path.is_file():
                raise ConfigError(f"formats.quant_rules: {path} is no small file; give a JSON file of rules")
            source = path.read_text(encoding="utf-8")
        except (OSError, ValueError) as error:
            raise ConfigError(f"formats.quant_rules: cannot read {path}: {error}") from error
    try:
        rules = json.loads(source or "{}")
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"formats.quant_rules is not valid JSON: {error}") from error
    if not isinstance(rules, dict) or not all(isinstance(form, str) for form in rules.values()):
        raise ConfigError('formats.quant_rules must be a JSON object, as {"re:.*down_proj": "q6_k"}')
    return rules


def _pattern(name: str) -> re.Pattern[str]:
    if not name.startswith("re:"):
        return re.compile(re.escape(name))
    try:
        return re.compile(name[3:])
    except (re.error, RecursionError, OverflowError) as error:
        raise ConfigError(f"formats.quant_rules: {name!r} is no regular expression: {error}") from error
