"""Where tuning files lie: one that was named, the user's cache folder, packages. Torch-free."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from importlib.util import find_spec
from pathlib import Path

from evener.cache_folder import cache_folder
from evener.errors import ConfigError
from evener.resolution.tuning import Bench, Tuned, decode

log = logging.getLogger("evener.tuning")


def default_folder() -> Path:
    """Where ``evener tune`` writes."""
    return cache_folder("tuning")


def tuning_files(packages: Sequence[str]) -> Iterator[tuple[str, Path]]:
    """Every file with its name in messages: the user's first, then those of ``packages``, dotted paths of folders."""
    yield from ((file.name, file) for file in sorted(default_folder().glob("*.json")))
    for package in packages:
        spec = find_spec(package)
        for folder in (spec and spec.submodule_search_locations) or ():
            yield from ((f"{package}/{file.name}", file) for file in sorted(Path(folder).glob("*.json")))


def tuning_lines(packages: Sequence[str]) -> Iterator[str]:
    """For a person: every file and where it holds; a start says whether that is here."""
    for name, file in tuning_files(packages):
        try:
            content = decode(file.read_bytes())
            yield f"tuning file {name}: {len(content.entries)} measurements, for {content.bench}"
        except (OSError, ValueError) as error:
            yield f"tuning file {name} cannot be used: {error}"


def read_tuned(asked: str, here: Bench, packages: Sequence[str]) -> Tuned:
    """The measurements that hold ``here``.

    Args:
        asked: ``infer.tuning``: "off", "auto" or a path.
        packages: folders in the chosen packages.

    Raises:
        ConfigError: the file that was asked for cannot be read. Another that cannot is a warning.
    """
    tuned = Tuned(here)
    named = asked not in ("auto", "off")
    found = [(asked, Path(asked))] if named else list(tuning_files(packages)) if asked == "auto" else []
    for name, file in found:
        try:
            content = decode(file.read_bytes())
        except (OSError, ValueError) as error:
            said = f"tuning file {name} cannot be used: {error}; make it anew: evener tune MODEL --out FILE"
            if named:
                raise ConfigError(said) from error
            log.warning("%s", said)
            tuned.notes.append(said)
            continue
        reason = content.bench.differs(here)
        if reason is None:
            tuned.add(name, content.entries)
        log.info("tuning file %s: %s", name, reason or "used")
        tuned.notes.append(f"tuning file {name} is " + (f"not used: {reason}" if reason else "used"))
    return tuned
