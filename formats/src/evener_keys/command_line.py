"""The configuration of a command line. Hydra reads files, and values in its grammar; it is imported only for them,
because that takes as long as the rest of reading a command line."""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence

from evener.config.build import Built, construct, normalize, overrides_from_mapping, with_model
from evener.config.keys import Override
from evener.config.packages import Packages


def from_command_line(
    model: str | os.PathLike[str] | None,
    overrides: Sequence[Override],
    file: str | None = None,
    packages: Packages | None = None,
) -> Built:
    """A ``Config`` from what was typed: ``file`` first, then ``overrides`` over it.

    Args:
        model: the positional model, if any.
        file: a YAML file: an absolute or relative path, or a name (see ``find_file``).

    Raises:
        ConfigError: an unknown key, an invalid value, an unreadable file, or no model.
    """
    packages = packages or Packages()
    typed = normalize(with_model(overrides, model), packages)
    if not file and (plain := plain_values(typed.overrides)) is not None:
        return Built(construct(plain, packages, typed.claimed), typed.notes)
    from evener_keys.hydra_boundary import compose_flat, find_file, read_file

    base = normalize(overrides_from_mapping(read_file(find_file(file))) if file else (), packages)
    flat = compose_flat(base.overrides, typed.overrides, packages)
    # A typed name replaces the file's, as with every other key.
    return Built(construct(flat, packages, typed.claimed or base.claimed), base.notes + typed.notes)


def plain_values(typed: Iterable[Override]) -> dict[str, str] | None:
    """Dotted keys to values, if every value is a text that Hydra would read as it is; else None."""
    found: dict[str, str] = {}
    for override in typed:
        value = override.value
        if not isinstance(value, str) or value[:1] in ("[", "{", "'", '"') or "${" in value or value == "???":
            return None
        found[override.key] = value
    return found
