"""Finding the grammar library and the tokenizer that it needs."""

from __future__ import annotations

from evener.config.schema import Config
from evener.contracts.grammar.library import GrammarLibrary
from evener.errors import ConfigError
from evener.loading.checkpoint import open_files
from evener.plugins.discover import installed_catalog


def find_grammar_library(config: Config) -> type[GrammarLibrary]:
    """The library that ``generation.grammars`` names, imported; without it the installed one whose name sorts first.

    Raises:
        ConfigError: no library of that name, or none at all, is installed.
    """
    found = installed_catalog().lazy_imports("grammar engine")
    if not found:
        raise ConfigError("structured output needs a grammar library; type: pip install evener-generation")
    name = config.options.get("generation", {}).get("grammars") or min(found)
    if name not in found:
        raise ConfigError(f"generation.grammars is {name!r}; installed grammar libraries: {', '.join(sorted(found))}")
    library: type[GrammarLibrary] = found[name].load()
    return library


def open_grammar_library(config: Config, vocab_size: int) -> GrammarLibrary:
    """The library of ``find_grammar_library``, for the tokenizer of the model that ``config`` names.

    Raises:
        ConfigError: it is not installed, or the model has no ``tokenizer.json``.
    """
    library, folder = find_grammar_library(config), config.tokenizer or config.model
    if (text := open_files(folder).text("tokenizer.json")) is None:
        raise ConfigError(f"structured output needs the tokenizer.json of {folder}; put it there")
    return library(text, vocab_size)
