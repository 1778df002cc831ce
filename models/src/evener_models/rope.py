"""Rotary scalings that depend on the length of the context: dynamic NTK and LongRoPE.

transformers chooses the angles by the length of each sequence: when it grows beyond the trained length, new tokens get
other angles, and cached keys keep theirs. Here the angles follow from the engine's limit, ``infer.max_seq_len``, for
all sequences, short ones too. So a key never depends on other tokens, and a cached prefix stays valid. The angles are
those that transformers gives to a sequence as long as the limit. A limit within the trained length gives the unscaled
angles (LongRoPE: those of ``short_factor``).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from evener.errors import ArchitectureError
from evener.layers import RotaryConfig


def rotary(
    config: Mapping[str, Any], dim: int, limit: int, default_base: float | None = None, layer_type: str | None = None
) -> RotaryConfig:
    """``RotaryConfig.from_config``, with dynamic NTK and LongRoPE for an engine whose longest sequence has ``limit``
    tokens.

    Raises:
        ArchitectureError: a setting is missing or has the wrong type, or the scaling is not implemented.
    """
    settings = {**(config.get("rope_scaling") or {}), **(config.get("rope_parameters") or {})}
    kind = settings.get("rope_type", settings.get("type", "default"))
    if kind not in ("dynamic", "longrope", "su"):  # the last is LongRoPE's first name
        return RotaryConfig.from_config(config, dim, layer_type, default_base)
    unscaled = {key: settings[key] for key in ("rope_theta", "partial_rotary_factor") if key in settings}
    bare = {**config, "rope_scaling": None, "rope_parameters": {"rope_type": "default", **unscaled}}
    if config.get("rope_theta", default_base) is not None:
        bare["rope_parameters"].setdefault("rope_theta", config.get("rope_theta", default_base))
    plain = RotaryConfig.from_config(bare, dim)
    trained_length = _read_float(config, "max_position_embeddings", kind)
    if kind == "dynamic":
        return replace(plain, base=plain.base * _ntk(settings, trained_length, limit) ** (plain.dim / (plain.dim - 2)))
    return _longrope(plain, {**config, **settings}, trained_length, limit)


def _ntk(settings: Mapping[str, Any], trained_length: float, limit: int) -> float:
    """The factor by which NTK scaling (bloc97 2023) stretches the longest wavelength: ``alpha`` if it is given,
    otherwise one that grows with the context."""
    if settings.get("alpha") is not None:
        return _read_float(settings, "alpha", "dynamic")
    factor = _read_float(settings, "factor", "dynamic")
    return factor * max(limit, trained_length) / trained_length - (factor - 1)


def _longrope(plain: RotaryConfig, settings: Mapping[str, Any], trained_length: float, limit: int) -> RotaryConfig:
    """LongRoPE (Ding et al. 2024): each frequency has a divisor, one for short contexts and one for long ones."""
    lists = [settings.get(key) for key in ("short_factor", "long_factor")]
    for key, values in zip(("short_factor", "long_factor"), lists, strict=True):
        numbers = isinstance(values, list) and all(type(value) in (int, float) for value in values)
        if not numbers or len(values or ()) != plain.dim // 2:
            raise ArchitectureError(
                f"config.json asks for rope_type 'longrope', whose {key} must be a list of {plain.dim // 2} numbers, "
                f"one for each pair of rotated dimensions; it is {values!r}"
            )
    original = _read_float(settings, "original_max_position_embeddings", "longrope")
    factor, amplitude = float(settings.get("factor") or trained_length / original), settings.get("attention_factor")
    if amplitude is None:
        amplitude = math.sqrt(1 + math.log(factor) / math.log(original)) if factor > 1 else 1.0
    return replace(plain, divisors=tuple(lists[limit > original] or ()), amplitude=float(amplitude))


def _read_float(settings: Mapping[str, Any], key: str, kind: str) -> float:
    if type(settings.get(key)) not in (int, float):
        raise ArchitectureError(
            f"config.json asks for rope_type {kind!r} with {key} = {settings.get(key)!r}; it must be a number"
        )
    return float(settings[key])
