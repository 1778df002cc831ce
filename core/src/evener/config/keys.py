"""Keys on the command line: ``key=value``, ``--flag value`` and ``--flag=value`` mean the same; the error for an
unknown key suggests known ones."""

from __future__ import annotations

import difflib
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from evener.config.packages import Packages
from evener.config.schema import key_specs
from evener.errors import ConfigError, UnknownNameError
from evener.key_spec import KeySpec

# No "/" in a key, so a path that contains "=" does not match.
_ASSIGNMENT = re.compile(r"(\+{0,2})(\w[\w.-]*)=(.*)", re.DOTALL)
_BOOL_WORDS = frozenset({"true", "false", "yes", "no", "on", "off", "1", "0", "auto"})


@dataclass(frozen=True)
class Override:
    """One key that the user set.

    Attributes:
        key: dotted, as typed (flags have their dashes turned into underscores).
        value: text as typed, or a typed value from YAML or Python.
        original: the text as typed, for messages.
    """

    key: str
    value: Any
    original: str

    def to(self, key: str, value: Any) -> Override:
        """The same override with another key and value."""
        return Override(key, value, self.original)


class UnknownKeyError(UnknownNameError):
    """An unknown key; the message suggests similar keys and says where the list is."""

    def __init__(self, shown: str, key: str, known: Collection[str]) -> None:
        self.what, self.name, self.known = "option", key, sorted(known)
        leaf = key.rpartition(".")[2]
        same_leaf = [name for name in self.known if name.rpartition(".")[2] == leaf]
        near = same_leaf or difflib.get_close_matches(key, self.known, n=1, cutoff=0.6)
        near = near or [
            name for name in self.known if difflib.get_close_matches(leaf, [name.rpartition(".")[2]], cutoff=0.75)
        ]
        meant = f"; did you mean {' or '.join(repr(name) for name in near[:3])}?" if near else "."
        where = f" (in {shown!r})" if shown != key else ""
        ConfigError.__init__(self, f"unknown option {key!r}{where}{meant} `evener config --keys` lists every option")


@dataclass(frozen=True)
class ParsedCommandLine:
    """A command line split into positional words and keys."""

    positionals: tuple[str, ...]
    overrides: tuple[Override, ...]


def split_command_line(argv: Sequence[str]) -> ParsedCommandLine:
    """Split ``argv`` into positionals and overrides.

    A bare ``--flag`` means true if the key is a boolean of the core; otherwise the next word is its value (a boolean
    option of a package needs ``--package.switch=true``).

    Raises:
        ConfigError: a flag without its value, or an unknown short option.
    """
    switches = {key for key, spec in key_specs().items() if spec.kind == "bool"}
    positionals: list[str] = []
    overrides: list[Override] = []
    rest = list(argv)
    while rest:
        word = rest.pop(0)
        if word == "--":
            positionals += rest
            break
        if word.startswith("--"):
            name, equals, value = word[2:].partition("=")
            key = name.replace("-", "_")
            if not equals:
                value = _flag_value(word, key in switches, rest)
            overrides.append(Override(key, value, word if equals else f"{word} {value}"))
        elif match := _ASSIGNMENT.fullmatch(word):
            overrides.append(Override(match[2], match[3], word))
        elif word.startswith("-") and len(word) > 1:
            raise ConfigError(f"unknown option {word!r}; options are written --name value or name=value "
                              "(`evener config --keys` lists them)")  # fmt: skip
        else:
            positionals.append(word)
    return ParsedCommandLine(tuple(positionals), tuple(overrides))


def _flag_value(word: str, switch: bool, rest: list[str]) -> str:
    if switch:
        return rest.pop(0) if rest and rest[0].lower() in _BOOL_WORDS else "true"
    if not rest or rest[0].startswith("--"):
        raise ConfigError(f"{word} needs a value: {word} VALUE, or {word[2:].replace('-', '_')}=VALUE")
    return rest.pop(0)


def flatten(tree: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Leaves of nested mappings as dotted keys: ``{"infer": {"depth": 1}}`` gives ``("infer.depth", 1)``. Empty
    mappings give nothing."""
    for name, value in tree.items():
        if isinstance(value, Mapping):
            yield from flatten(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value


def find_key_spec(override: Override, packages: Packages) -> tuple[str, KeySpec]:
    """The key in its canonical spelling, and what it takes.

    Raises:
        UnknownKeyError: there is no such key.
    """
    fixed = key_specs()
    if override.key in fixed:
        return override.key, fixed[override.key]
    section, _, name = override.key.partition(".")
    if section == "ops":
        if name not in packages.ops:
            raise UnknownKeyError(override.original, override.key, [f"ops.{op}" for op in packages.ops])
        return override.key, KeySpec(help=f"The package whose kernel computes {name}.", kind="str", default=None)
    # Flags turn "-" into "_", and a package's name may contain either.
    spelt = {key.replace("-", "_"): key for key in packages.options}
    found = spelt.get(override.key.replace("-", "_"))
    if found is None:
        options = [d.options for d in packages.descriptors if d.name.replace("-", "_") == section.replace("-", "_")]
        if options and not any(options):
            raise ConfigError(f"{override.original} cannot be set: package {section} has no options; leave it out")
        raise UnknownKeyError(override.original, override.key, [*fixed, *packages.options])
    return found, packages.options[found]
