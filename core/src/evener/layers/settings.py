"""Reading ``config.json``: a missing or unknown value is an error that names its key."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from evener.errors import ArchitectureError

#: ``hidden_act`` as transformers spells it: our activation.
ACTIVATIONS: Mapping[str, str] = {
    "silu": "silu", "swish": "silu", "gelu": "gelu", "gelu_new": "gelu_tanh", "gelu_pytorch_tanh": "gelu_tanh",
    "gelu_fast": "gelu_tanh", "relu": "relu", "relu2": "relu_squared",
}  # fmt: skip


def need(config: Mapping[str, Any], key: str) -> Any:
    """The value of ``key``.

    Raises:
        ArchitectureError: there is none, or it is null.
    """
    if config.get(key) is None:
        raise ArchitectureError(f"config.json of this {kind(config)} model has no {key!r}; add the model's value")
    return config[key]


def count(config: Mapping[str, Any], key: str, most: int = 1 << 24, least: int = 1) -> int:
    """The value of ``key``, a whole number from ``least`` to ``most``.

    Raises:
        ArchitectureError: there is none, or it is something else.
    """
    value = need(config, key)
    if type(value) is not int or not least <= value <= most:
        raise refuse(config, key, f"it must be a whole number from {least} to {most:,}")
    return value


def either(config: Mapping[str, Any], *keys: str) -> str:
    """The first of ``keys`` that the config has a value for, or the first: spellings that changed over time."""
    return next((key for key in keys if config.get(key) is not None), keys[0])


def number(config: Mapping[str, Any], key: str) -> float:
    """The value of ``key``, a positive number.

    Raises:
        ArchitectureError: there is none, or it is something else.
    """
    value = need(config, key)
    if type(value) not in (int, float) or not 0 < value < float("inf"):
        raise refuse(config, key, "it must be a positive number")
    return float(value)


def layer_count(config: Mapping[str, Any]) -> int:
    """``num_hidden_layers``.

    Raises:
        ArchitectureError: there is none, or it is no sensible number of layers.
    """
    return count(config, "num_hidden_layers", 1 << 12)


def refuse(config: Mapping[str, Any], key: str, allowed: str) -> ArchitectureError:
    """The error for a value that a class does not implement; ``allowed`` says what it does, as a phrase."""
    return ArchitectureError(
        f"config.json of this {kind(config)} model has {key} = {config.get(key)!r}, which is not implemented; {allowed}"
    )


def kind(config: Mapping[str, Any]) -> str:
    """What to call the model in messages."""
    return str(config.get("model_type", "nameless"))


def head_dim(config: Mapping[str, Any]) -> int:
    """``head_dim``, or the hidden size over the heads.

    Raises:
        ArchitectureError: there is no ``head_dim`` and the division leaves a rest.
    """
    if config.get("head_dim") is not None:
        return count(config, "head_dim")
    hidden, heads = count(config, "hidden_size"), count(config, "num_attention_heads")
    if hidden % heads:
        raise refuse(config, "num_attention_heads", f"without head_dim it must divide hidden_size = {hidden}")
    return hidden // heads


def activation(config: Mapping[str, Any], key: str = "hidden_act") -> str:
    """The activation of the MLP.

    Raises:
        ArchitectureError: it is missing or unknown.
    """
    if str(need(config, key)) not in ACTIVATIONS:
        raise refuse(config, key, f"implemented are: {', '.join(ACTIVATIONS)}")
    return ACTIVATIONS[config[key]]


def known_activation(name: str, *more: str) -> str:
    """``name``, if it is an activation that the ops compute, or one of ``more``.

    Raises:
        ArchitectureError: it is not.
    """
    known = (*dict.fromkeys(ACTIVATIONS.values()), *more)
    if name not in known:
        raise ArchitectureError(f"activation={name!r} is none of those that there are: {', '.join(known)}; another one "
                                "takes an op of your own (docs/model-author.md, A layer of your own)")  # fmt: skip
    return name


def layer_windows(config: Mapping[str, Any], default: str) -> list[int | None]:
    """The sliding window of each layer (None: full attention), from ``layer_types`` and ``sliding_window``.

    Args:
        config: the model's.
        default: the type of every layer when there is no ``layer_types``, or "" to require it.

    Raises:
        ArchitectureError: a type is unknown, the list has the wrong length, or a sliding layer has no window.
    """
    layers = layer_count(config)
    types = config.get("layer_types") or ([default] * layers if default else need(config, "layer_types"))
    if len(types) != layers:
        raise refuse(config, "layer_types", f"it must have num_hidden_layers = {layers} entries")
    windows: list[int | None] = []
    for name in types:
        if name not in ("full_attention", "sliding_attention"):
            raise refuse(config, "layer_types", "implemented are: full_attention, sliding_attention")
        windows.append(None if name == "full_attention" else count(config, "sliding_window"))
    return windows
