"""A package's options, checked against its descriptor before anything of it is imported."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from evener.contracts.descriptor import Descriptor, Option
from evener.errors import ConfigError, UnknownNameError
from evener.plugins.catalog import Package

_BOOLEANS = {"true": True, "yes": True, "on": True, "1": True, "false": False, "no": False, "off": False, "0": False}


def check_options(descriptor: Descriptor, values: Mapping[str, Any]) -> dict[str, Any]:
    """Every option of ``descriptor``: the checked value where one is given, else the default.

    Args:
        values: by option key; text is converted to the option's type.

    Raises:
        UnknownNameError: a key that the descriptor does not have.
        ConfigError: a value of the wrong type, or not among the choices.
    """
    for key in values:
        if key not in descriptor.options:
            raise UnknownNameError(f"option of {descriptor.name!r}", key, descriptor.options)
    return {
        key: _value(f"{descriptor.name}.{key}", option, values[key]) if key in values else option.default
        for key, option in descriptor.options.items()
    }


def options_by_package(
    packages: Iterable[Package], options: Mapping[str, Mapping[str, Any]]
) -> dict[str, dict[str, Any]]:
    """Checked options of every package, by ``Package.key``.

    Args:
        packages: those that were chosen.
        options: by package name. Packages of different groups may share a name; each then takes the keys that it has.

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
            own = {key: value for key, value in given.items() if key in package.descriptor.options}
            checked[package.key] = check_options(package.descriptor, own)
    return checked


def _value(key: str, option: Option, value: Any) -> Any:
    if value is None and option.default is None:
        return None
    converted = _converted(option.type, value)
    if converted is None:
        raise ConfigError(f"{key}={value!r}: it takes {_NOUNS[option.type]} ({option.help})")
    if option.choices and converted not in option.choices:
        shown = ", ".join(str(choice) for choice in option.choices)
        raise ConfigError(f"{key}={value!r}: it takes one of {shown} ({option.help})")
    return converted


_NOUNS: Mapping[type, str] = {int: "a whole number", float: "a number", str: "text", bool: "true or false"}


def _converted(kind: type, value: Any) -> Any:
    """``value`` as ``kind``; None if it is not one."""
    if type(value) is kind:
        return value
    if kind is float and type(value) is int:
        return float(value)
    if not isinstance(value, str):
        return None
    if kind is bool:
        return _BOOLEANS.get(value.strip().lower())
    try:
        return kind(value)
    except ValueError:
        return None
