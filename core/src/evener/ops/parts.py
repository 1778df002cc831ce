"""What an op is made of: its static parameters, its reference, and the ops inside a composite. Torch-free."""

from __future__ import annotations

import importlib
from collections.abc import Iterator, Mapping
from typing import Any

from evener.contracts.communicator import Communicator
from evener.contracts.declared import LinearWeight
from evener.contracts.ops import OpFunction, OpSchema


def walk_static(static: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """Names and values, those inside nested mappings too."""
    for name, value in static.items():
        # Most are numbers and words; an abstract class answers slowly.
        if not isinstance(value, (int, str)) and isinstance(value, Mapping):
            yield from walk_static(value)
        else:
            yield name, value


def communicators(static: Mapping[str, Any]) -> list[Communicator]:
    """The communicators that a call site uses; none if it runs on one rank."""
    return [v for _, v in walk_static(static) if not isinstance(v, (int, str)) and isinstance(v, Communicator)]


def adapted(static: Mapping[str, Any]) -> bool:
    """Whether a call site computes with a weight that has adapters."""
    return any(isinstance(value, LinearWeight) and value.adapters is not None for _, value in walk_static(static))


def load_reference(schema: OpSchema) -> Any:
    """The function that ``schema.reference`` names."""
    module, _, name = schema.reference.partition(":")
    return getattr(importlib.import_module(module), name)


def inner_ops(schema: OpSchema, static: Mapping[str, Any], schemas: Mapping[str, OpSchema]) -> set[str]:
    """Every op that a composite is made of, at any depth."""
    found: set[str] = set()

    def use(op: str, /, **inner: Any) -> OpFunction:
        if op in schemas:
            found.add(op)
            found.update(inner_ops(schemas[op], inner, schemas) if schemas[op].composite else ())
        return lambda *_: None

    load_reference(schema)(static, use)
    return found
