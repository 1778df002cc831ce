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


def read_int(
    config: Mapping[str, Any], key: str, most: int = 1 << 24, least: int = 1, default: int | None = None
) -> int:
    """The value of ``key``, a whole number from ``least`` to ``most``; if it is missing or null, ``default``.

    Raises:
        ArchitectureError: it is missing without a default, or something else.
    """
    value = require(config if default is None or config.get(key) is not None else {key: default}, key)
    if type(value) is not int or not least <= value <= most:
        raise unsupported(config, key, f"it must be a whole number from {least} to {most:,}")
    return value


def read_float(
    config: Mapping[str, Any], key: str, above: float = 0.0, most: float = 1e18, default: float | None = None
) -> float:
    """The value of ``key``, a number above ``above`` and at most ``most``; if it is missing or null, ``default``.

    Raises:
        ArchitectureError: it is missing without a default, or something else.
    """
    value = require(config if default is None or config.get(key) is not None else {key: default}, key)
    if type(value) not in (int, float) or not above < value <= most:
        raise unsupported(config, key, f"it must be a positive number, above {above:g} and at most {most:g}")
    return float(value)


def read_flag(config: Mapping[str, Any], key: str, default: bool = False) -> bool:
    """The value of ``key``, true or false; ``default`` if it is missing; null is false.

    Raises:
        ArchitectureError: it is something else.
    """
    value = config.get(key, default)
    if value not in (True, False, None):
        raise unsupported(config, key, "it must be true or false")
    return bool(value)


def read_object(config: Mapping[str, Any], key: str) -> Mapping[str, Any]:
    """The value of ``key``, an object; empty if it is missing or null.

    Raises:
        ArchitectureError: it is something else.
    """
    value = config.get(key)
    if not isinstance(value, Mapping | None):
        raise unsupported(config, key, "it must be an object")
    return value or {}


def unsupported(config: Mapping[str, Any], key: str, allowed: str) -> ArchitectureError:
    """The error for a value that a class does not implement; ``allowed``: a phrase that says what it does implement."""
    return ArchitectureError(
        f"config.json of this {kind(config)} model has {key} = {repr(config.get(key))[:200]}, which is not implemented"
        f"; {allowed}"
    )


def kind(config: Mapping[str, Any]) -> str:
    """The model's name in messages."""
    return str(config.get("model_type", "nameless"))[:100]


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
