"""What an op is made of: its static parameters, its reference, and the ops inside a composite. Torch-free."""

from __future__ import annotations

import importlib
from collections.abc import Iterator, Mapping
from typing import Any

from evener.contracts.communicator import Communicator
from evener.contracts.declared import LinearWeight, StateSlot
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


def static_content(value: Any) -> Any:
    """A hashable value that is equal for static parameters that differ in no more than the names of weights and state.
    Equal numbers of unlike types differ, and so does what cannot be compared."""
    if isinstance(value, (int, str, float)) or value is None:
        return type(value), value
    if isinstance(value, LinearWeight):
        parts = tuple((part.rows, part.columns, part.format) for part in value.parts)
        inside = (value.op, value.rows, value.columns, value.dtype, value.out, value.layout, value.experts)
        return type(value), parts, inside, value.slices, value.normalize_rows, id(value.adapters), id(value.placement)
    if isinstance(value, StateSlot):
        return value.spec, value.attention, id(value.provider), value.scales
    if isinstance(value, Mapping):
        return tuple((name, static_content(inner)) for name, inner in value.items())
    if isinstance(value, tuple):
        return tuple(map(static_content, value))
    return value if value.__hash__ else object()


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
