"""A package's options: types, choices, defaults."""

from __future__ import annotations

from typing import Any

import pytest

from evener.contracts.descriptor import Descriptor, Option
from evener.errors import ConfigError, UnknownNameError
from evener.plugins.catalog import Package
from evener.plugins.load import options_by_package

DESCRIPTOR = Descriptor(
    name="chip",
    summary="A test.",
    contracts={},
    options={
        "depth": Option(type=int, default=2, help="How deep."),
        "share": Option(type=float, default=0.5, help="How much."),
        "fast": Option(type=bool, default=False, help="Hurry."),
        "mode": Option(type=str, default="a", help="Which.", choices=("a", "b")),
        "file": Option(type=str, default=None, help="Where."),
    },
)


def package(group: str, descriptor: Descriptor) -> Package:
    return Package(group=group, name=descriptor.name, distribution="d", version="1", descriptor=descriptor)


def checked(values: dict[str, Any]) -> dict[str, Any]:
    """The options of the one package above."""
    return options_by_package([package("evener.backends", DESCRIPTOR)], {"chip": values})["evener.backends:chip"]


def test_options_that_are_not_given_have_their_defaults() -> None:
    wanted = {"depth": 2, "share": 0.5, "fast": False, "mode": "a", "file": None}
    assert checked({}) == wanted
    assert checked({"mode": "b", "file": None}) == {**wanted, "mode": "b"}


@pytest.mark.parametrize(
    ("key", "given", "value"),
    [
        ("depth", 3, 3),
        ("depth", "3", 3),
        ("share", 1, 1.0),
        ("share", "0.25", 0.25),
        ("fast", "true", True),
        ("fast", "off", False),
        ("file", "/x", "/x"),
    ],
)
def test_text_is_converted_to_the_options_type(key: str, given: Any, value: Any) -> None:
    found = checked({key: given})[key]
    assert found == value and type(found) is type(value)


@pytest.mark.parametrize(
    ("key", "given"),
    [("depth", True), ("depth", 1.5), ("depth", "x"), ("depth", None), ("fast", 1), ("fast", "maybe"), ("mode", 3)],
)
def test_a_value_of_the_wrong_type_is_an_error_that_names_the_key(key: str, given: Any) -> None:
    with pytest.raises(ConfigError, match=rf"chip\.{key}="):
        checked({key: given})


def test_a_value_that_is_not_a_choice_is_an_error_that_lists_them() -> None:
    with pytest.raises(ConfigError, match=r"chip.mode=c is not a value of chip.mode; it takes a or b"):
        checked({"mode": "c"})


def test_packages_of_different_groups_that_share_a_name_each_take_their_own_keys() -> None:
    def one(group: str, key: str) -> Package:
        options = {key: Option(type=int, default=0, help="")}
        return package(group, Descriptor(name="x", summary="s", contracts={}, options=options))

    packages = [one("evener.backends", "a"), one("evener.graphs", "b")]
    found = options_by_package(packages, {"x": {"a": 1, "b": 2}})
    assert found == {"evener.backends:x": {"a": 1}, "evener.graphs:x": {"b": 2}}
    with pytest.raises(UnknownNameError, match="option of 'x'"):
        options_by_package(packages, {"x": {"c": 1}})
