"""Which ops have test cases, and where the kit finds them."""

from __future__ import annotations

import inspect
import pkgutil
from dataclasses import replace
from importlib import import_module

import pytest

from evener.errors import DescriptorError
from evener.ops.schemas import BUILTIN
from evener_conformance.kit import cases
from evener_conformance.kit.cases import has_cases, load_cases

OPS = {schema.name: schema for schema in BUILTIN}
STRANGER = replace(OPS["softcap"], name="mychip_op", cases="")


def test_every_built_in_primitive_op_has_cases() -> None:
    assert [schema.name for schema in BUILTIN if not schema.composite and not has_cases(schema)] == []


def test_every_case_generator_is_the_one_of_a_built_in_op() -> None:
    modules = [import_module(f"{cases.__name__}.{found.name}") for found in pkgutil.iter_modules(cases.__path__)]
    generators = {
        function
        for module in modules
        for _, function in inspect.getmembers(module, inspect.isgeneratorfunction)
        if list(inspect.signature(function).parameters) == ["dtype", "generator"]
    }
    assert generators == {load_cases(schema) for schema in OPS.values() if has_cases(schema)}


def test_an_op_of_another_package_brings_its_own_cases() -> None:
    schema = replace(STRANGER, cases=f"{cases.__name__}.basic:softcap")
    assert has_cases(schema)
    assert load_cases(schema) is load_cases(OPS["softcap"])


def test_an_op_without_cases_is_an_error_that_says_what_to_add() -> None:
    assert not has_cases(STRANGER)
    with pytest.raises(DescriptorError, match="'mychip_op' has no test cases; add cases='module:function'"):
        load_cases(STRANGER)
