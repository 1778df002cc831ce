"""From overrides to a ``Config``: first old spellings, aliases and unknown keys, then values."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from evener.config.checkpoint import read_model_facts
from evener.config.keys import Override, find_key_spec, flatten
from evener.config.old_spellings import installed_spellings
from evener.config.packages import Packages
from evener.config.schema import SECTIONS, Config, key_specs
from evener.config.stages import stage_part
from evener.errors import ConfigError
from evener.key_spec import format_value, parse, read


@dataclass(frozen=True)
class Normalized:
    """Overrides in which every key exists; ``notes``: warnings for the user; ``claimed``: names given with
    ``models=``."""

    overrides: tuple[Override, ...]
    notes: tuple[str, ...] = ()
    claimed: tuple[str, ...] = ()


@dataclass(frozen=True)
class Built:
    """A ``Config`` and warnings for the user."""

    config: Config
    notes: tuple[str, ...] = ()


def overrides_from_mapping(tree: Mapping[str, Any]) -> tuple[Override, ...]:
    """Overrides from a mapping: dotted keys, nested mappings, or both."""
    return tuple(Override(key, value, f"{key}={value}") for key, value in flatten(tree))


def normalize(overrides: Iterable[Override], packages: Packages) -> Normalized:
    """Rewrite old spellings and those that a package claims, and check that every key exists.

    Raises:
        ConfigError: an unknown key, or an old spelling without an equivalent.
    """
    rewritten = installed_spellings().rewrite(overrides)
    done: list[Override] = []
    notes = list(rewritten.notes)
    for override in rewritten.overrides:
        claim = packages.alias(override.key, format_value(override.value)) if _is_claimable(override) else None
        if claim is not None:
            new_key, new_value, package = claim
            notes.append(f"{override.original} is read as {new_key}={new_value}, as package {package!r} defines it")
            override = override.to(new_key, new_value)
        key, _ = find_key_spec(override, packages)
        done.append(override.to(key, override.value))
    return Normalized(tuple(done), tuple(notes), rewritten.claimed)


def _is_claimable(override: Override) -> bool:
    """A key or value that the core does not have, and a package may define."""
    spec = key_specs().get(override.key)
    return spec is None or (spec.claimable and override.value not in spec.choices)


def construct(flat: Mapping[str, Any], packages: Packages, claimed: Iterable[str] = ()) -> Config:
    """Build a ``Config`` from dotted keys that exist (see ``normalize``).

    Args:
        claimed: names from ``models=``; the checkpoint must be of their family.

    Raises:
        ConfigError: no model, an invalid value, or a claimed name of another family.
    """
    top: dict[str, Any] = {}
    sections: dict[str, dict[str, Any]] = {name: {} for name in SECTIONS}
    ops: dict[str, str] = {}
    options: dict[str, dict[str, Any]] = {}
    for given, raw in flat.items():
        key, spec = find_key_spec(Override(given, raw, f"{given}={raw}"), packages)
        section, _, name = key.rpartition(".")
        if not section:
            top[name] = parse(key, spec, raw)
        elif section in sections:
            sections[section][name] = parse(key, spec, raw)
        elif section == "ops":
            ops[name] = read(key, spec, raw)
        else:
            options.setdefault(section, {})[name] = read(key, spec, raw)
    if not top.get("model"):
        raise ConfigError(
            "no model is given: write its folder first, as in `evener serve /path/to/model`, or model=/path/to/model"
        )
    if sections["infer"].get("stages"):
        top, sections["infer"] = stage_part("settle")(top, sections["infer"])
    built: dict[str, Any] = {name: SECTIONS[name](**values) for name, values in sections.items()}
    config = Config(**top, **built, ops=ops, options=options)
    _check_claimed(config, tuple(claimed))
    return config


def _check_claimed(config: Config, names: Sequence[str]) -> None:
    # The loader reports a missing folder, with a better message.
    if not names or not os.path.isdir(config.model):
        return
    facts, spellings = read_model_facts(config.model), installed_spellings()
    for name in names:
        spellings.check_claim(name, config.model, facts.model_type)


def with_model(overrides: Iterable[Override], model: str | os.PathLike[str] | None) -> tuple[Override, ...]:
    """Put the positional model in front.

    Raises:
        ConfigError: a key gives another model.
    """
    given = tuple(overrides)
    if model is None:
        return given
    path = os.fspath(model)
    for override in given:
        if override.key in ("model", "models.ckpt_dir") and os.fspath(override.value) != path:
            raise ConfigError(f"the model is given twice: {path!r} and {override.original!r}; keep one")
    return (Override("model", path, path), *given)


def from_overrides(
    model: str | os.PathLike[str] | None, overrides: Mapping[str, Any], packages: Packages | None = None
) -> Built:
    """A ``Config`` from Python values: dotted keys (``{"infer.max_reqs": 8}``), nested mappings, or both.

    Raises:
        ConfigError: an unknown key, an invalid value, or no model.
    """
    packages = packages or Packages()
    normal = normalize(with_model(overrides_from_mapping(overrides), model), packages)
    flat = {override.key: override.value for override in normal.overrides}
    return Built(construct(flat, packages, normal.claimed), normal.notes)
