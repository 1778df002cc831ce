"""Values of ``config.json`` that several families read."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from evener.layers.config_json import read_float, read_int, require, unsupported


def layer_count(config: Mapping[str, Any]) -> int:
    """``num_hidden_layers``.

    Raises:
        ArchitectureError: it is missing, or not a whole number from 1 to 1,024.
    """
    return read_int(config, "num_hidden_layers", 1 << 10)


def first_present(config: Mapping[str, Any], *keys: str) -> str:
    """The first of ``keys`` that has a value, for a setting whose name changed over time; without any, the first."""
    return next((key for key in keys if config.get(key) is not None), keys[0])


#: Of one layer, and of all layers: planning a model takes seconds for each million of them.
_MAX_EXPERTS, _MAX_EXPERTS_IN_ALL = 1 << 16, 1 << 18


def expert_count(config: Mapping[str, Any], *keys: str) -> int:
    """Experts of a layer, the value of the first of ``keys`` that has one.

    Raises:
        ArchitectureError: it is missing, or too large for a model of that many layers.
    """
    most = min(_MAX_EXPERTS, _MAX_EXPERTS_IN_ALL // layer_count(config))
    return read_int(config, first_present(config, *keys), most=most)


def layer_types(config: Mapping[str, Any], allowed: Sequence[str]) -> Sequence[str]:
    """``layer_types``, which names one of ``allowed`` for each layer; empty if there is none.

    Raises:
        ArchitectureError: it is no such list, or has the wrong length.
    """
    types, layers = read_list(config, "layer_types", str), layer_count(config)
    if types and len(types) != layers:
        raise unsupported(config, "layer_types", f"it must have num_hidden_layers = {layers} entries")
    if not set(types) <= set(allowed):
        raise unsupported(config, "layer_types", f"implemented are: {', '.join(allowed)}")
    return types


def layer_windows(config: Mapping[str, Any], default: str) -> list[int | None]:
    """The sliding window of each layer (None: full attention), from ``layer_types`` and ``sliding_window``.

    Args:
        config: the parsed ``config.json``.
        default: the type of every layer if there is no ``layer_types``; "": ``layer_types`` is required.

    Raises:
        ArchitectureError: a type is unknown, the list has the wrong length, or ``sliding_window`` is missing.
    """
    types = layer_types(config, ("full_attention", "sliding_attention"))
    if not types:
        types = [default] * layer_count(config) if default else require(config, "layer_types")
    return [None if name == "full_attention" else read_int(config, "sliding_window") for name in types]


def alternating_layer_types(config: Mapping[str, Any]) -> list[str]:
    """The ``layer_types`` of a model with sliding windows on layers 0, 2, 4 and so on."""
    return [("sliding_attention", "full_attention")[i % 2] for i in range(layer_count(config))]


def optional_float(config: Mapping[str, Any], key: str) -> float | None:
    """The value of ``key``, a positive number, or None if it is missing or null.

    Raises:
        ArchitectureError: it is something else.
    """
    return None if config.get(key) is None else read_float(config, key)


def read_list(config: Mapping[str, Any], key: str, kind: type) -> Sequence[Any]:
    """The value of ``key``, a list of values of the type ``kind``; empty if it is missing or null.

    Raises:
        ArchitectureError: it is something else.
    """
    value = [] if config.get(key) is None else config[key]
    if not isinstance(value, list) or any(type(each) is not kind for each in value):
        raise unsupported(config, key, f"it must be a list in which each value is a {kind.__name__}")
    return value


def head_dim(config: Mapping[str, Any]) -> int:
    """``head_dim``, or ``hidden_size`` / ``num_attention_heads``.

    Raises:
        ArchitectureError: there is no ``head_dim``, and the heads do not divide the hidden size.
    """
    if config.get("head_dim") is not None:
        return read_int(config, "head_dim")
    hidden, heads = read_int(config, "hidden_size"), read_int(config, "num_attention_heads")
    if hidden % heads:
        raise unsupported(config, "num_attention_heads", f"without head_dim it must divide hidden_size = {hidden}")
    return hidden // heads
