"""A package's options, checked against its descriptor before anything of it is imported."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from evener.errors import UnknownNameError
from evener.key_spec import KeySpec, read
from evener.plugins.catalog import Package


def options_by_package(
    packages: Iterable[Package], options: Mapping[str, Mapping[str, Any]]
) -> dict[str, dict[str, Any]]:
    """Every option of every package, by ``Package.key``: the checked value where one is given, else the default.

    Args:
        packages: those that were chosen.
        options: by package name; text is converted to the option's type. Packages of different groups may share a name;
            each then takes the keys that it has.

    Raises:
        UnknownNameError: a name that is not among ``packages``, or a key that no package of that name has.
        ConfigError: a wrong value.
    """
    named: dict[str, list[Package]] = {}
    for package in packages:
        named.setdefault(package.name, []).append(package)
    for name in options:
        if name not in named:
            raise UnknownNameError("package to set options of", name, named, "(only chosen packages take options)")
    checked: dict[str, dict[str, Any]] = {}
    for name, namesakes in named.items():
        given = options.get(name, {})
        known = {key for package in namesakes for key in package.descriptor.options}
        for key in given:
            if key not in known:
                raise UnknownNameError(f"option of {name!r}", key, known)
        for package in namesakes:
            checked[package.key] = {
                key: read(f"{name}.{key}", KeySpec.of_option(option), given[key]) if key in given else option.default
                for key, option in package.descriptor.options.items()
            }
    return checked
