"""Reading ``config.json``. A missing or unknown value is an error that names its key."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from evener.errors import ArchitectureError

#: From transformers' names of ``hidden_act`` to the names of the ops' activations.
ACTIVATIONS: Mapping[str, str] = {
    "silu": "silu", "swish": "silu", "gelu": "gelu", "gelu_new": "gelu_tanh", "gelu_pytorch_tanh": "gelu_tanh",
    "gelu_fast": "gelu_tanh", "relu": "relu", "relu2": "relu_squared",
}  # fmt: skip


def require(config: Mapping[str, Any], key: str) -> Any:
    """The value of ``key``.

    Raises:
        ArchitectureError: it is missing or null.
    """
    if config.get(key) is None:
        raise ArchitectureError(f"config.json of this {kind(config)} model has no {key!r}; add the model's value")
    return config[key]


def read_int(config: Mapping[str, Any], key: str, most: int = 1 << 24, least: int = 1) -> int:
    """The value of ``key``, a whole number from ``least`` to ``most``.

    Raises:
        ArchitectureError: it is missing or something else.
    """
    value = require(config, key)
    if type(value) is not int or not least <= value <= most:
        raise unsupported(config, key, f"it must be a whole number from {least} to {most:,}")
    return value


def first_present(config: Mapping[str, Any], *keys: str) -> str:
    """The first of ``keys`` that has a value, for a setting whose name changed over time; without any, the first."""
    return next((key for key in keys if config.get(key) is not None), keys[0])


def read_float(config: Mapping[str, Any], key: str) -> float:
    """The value of ``key``, a positive number.

    Raises:
        ArchitectureError: it is missing or something else.
    """
    value = require(config, key)
    if type(value) not in (int, float) or not 0 < value < float("inf"):
        raise unsupported(config, key, "it must be a positive number")
    return float(value)


def layer_count(config: Mapping[str, Any]) -> int:
    """``num_hidden_layers``.

    Raises:
        ArchitectureError: it is missing, or not a whole number from 1 to 4,096.
    """
    return read_int(config, "num_hidden_layers", 1 << 12)


def unsupported(config: Mapping[str, Any], key: str, allowed: str) -> ArchitectureError:
    """The error for a value that a class does not implement; ``allowed``: a phrase that says what it does implement."""
    return ArchitectureError(
        f"config.json of this {kind(config)} model has {key} = {config.get(key)!r}, which is not implemented; {allowed}"
    )


def kind(config: Mapping[str, Any]) -> str:
    """The model's name in messages."""
    return str(config.get("model_type", "nameless"))


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


def activation(config: Mapping[str, Any], key: str = "hidden_act") -> str:
    """The activation of the MLP.

    Raises:
        ArchitectureError: it is missing or unknown.
    """
    if str(require(config, key)) not in ACTIVATIONS:
        raise unsupported(config, key, f"implemented are: {', '.join(ACTIVATIONS)}")
    return ACTIVATIONS[config[key]]


def known_activation(name: str, *more: str) -> str:
    """Return ``name`` if it is an activation of the ops, or one of ``more``.

    Raises:
        ArchitectureError: it is unknown.
    """
    known = (*dict.fromkeys(ACTIVATIONS.values()), *more)
    if name not in known:
        raise ArchitectureError(f"activation={name!r} is unknown; implemented are: {', '.join(known)}. For another, "
                                "write an op of your own (docs/model-author.md, A layer of your own)")  # fmt: skip
    return name


def layer_windows(config: Mapping[str, Any], default: str) -> list[int | None]:
    """The sliding window of each layer (None: full attention), from ``layer_types`` and ``sliding_window``.

    Args:
        config: the parsed ``config.json``.
        default: the type of every layer if there is no ``layer_types``; "": ``layer_types`` is required.

    Raises:
        ArchitectureError: a type is unknown, the list has the wrong length, or ``sliding_window`` is missing.
    """
    layers = layer_count(config)
    types = config.get("layer_types") or ([default] * layers if default else require(config, "layer_types"))
    if len(types) != layers:
        raise unsupported(config, "layer_types", f"it must have num_hidden_layers = {layers} entries")
    windows: list[int | None] = []
    for name in types:
        if name not in ("full_attention", "sliding_attention"):
            raise unsupported(config, "layer_types", "implemented are: full_attention, sliding_attention")
        windows.append(None if name == "full_attention" else read_int(config, "sliding_window"))
    return windows
