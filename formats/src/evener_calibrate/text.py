"""The text that a model is run over."""

from __future__ import annotations

from pathlib import Path

from evener.errors import ConfigError


def read_text(path: Path, most: int, option: str) -> str:
    """The first ``most`` characters of a file; ``option`` named it.

    Raises:
        ConfigError: it is no file of text.
    """
    try:
        if path.exists() and not path.is_file():
            raise ConfigError(f"{option} {path} is not a regular file; give a file of text")
        with path.open(encoding="utf-8") as file:
            return file.read(most)
    except (OSError, ValueError) as error:
        raise ConfigError(f"cannot read {option} {path}: {error}; give a file of text in UTF-8") from error
