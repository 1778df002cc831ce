"""Which grammar library is used, and what is said where it cannot be."""

from __future__ import annotations

import sys
from typing import Any

import pytest
from evener_constraints.library import find_grammar_library
from evener_constraints.masks import GrammarMasks

from evener.config.schema import Config
from evener.errors import ConfigError
from evener_generation.llguidance_grammars import LlguidanceLibrary
from evener_generation.xgrammar_grammars import XgrammarLibrary


def config(name: str | None = None) -> Config:
    options: dict[str, Any] = {} if name is None else {"generation": {"grammars": name}}
    return Config(model="none", options=options)


@pytest.mark.parametrize(
    ("name", "library"), [(None, LlguidanceLibrary), ("llguidance", LlguidanceLibrary), ("xgrammar", XgrammarLibrary)]
)
def test_the_key_names_the_library(name: str | None, library: type) -> None:
    assert find_grammar_library(config(name)) is library


def test_a_library_that_nobody_has_is_refused_at_start_with_those_that_are_there() -> None:
    with pytest.raises(ConfigError, match=r"is .outlines.; installed grammar libraries: llguidance, "):
        GrammarMasks.of(config("outlines"), 100)


def test_without_xgrammar_the_message_says_how_to_install_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "evener_generation.xgrammar_grammars")
    monkeypatch.setitem(sys.modules, "xgrammar", None)
    with pytest.raises(ConfigError, match=r"needs a package .*\(xgrammar\); type: pip install .evener-generation.xgr"):
        GrammarMasks.of(config("xgrammar"), 100)
