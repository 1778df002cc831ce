"""Finding the installed grammar library and the tokenizer that it needs."""

from __future__ import annotations

from evener.config.schema import Config
from evener.contracts.grammar.library import GrammarLibrary
from evener.errors import ConfigError
from evener.loading.checkpoint import open_files
from evener.plugins.discover import installed_catalog


def open_grammar_library(config: Config, vocab_size: int) -> GrammarLibrary:
    """The installed library whose name sorts first, for the tokenizer of the model that ``config`` names.

    Raises:
        ConfigError: no library is installed, or the model has no ``tokenizer.json``.
    """
    found = sorted(installed_catalog().lazy_imports("grammar engine").items())
    if not found:
        raise ConfigError("structured output needs a grammar library; type: pip install evener-generation")
    folder = config.tokenizer or config.model
    if (text := open_files(folder).text("tokenizer.json")) is None:
        raise ConfigError(f"structured output needs the tokenizer.json of {folder}; put it there")
    library: GrammarLibrary = found[0][1].load()(text, vocab_size)
    return library
