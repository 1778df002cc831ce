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
from evener.layers.config_json import read_float, read_int, read_object
from evener.layers.rotary import scaling_kind

#: Factors beyond these would give angles that are not finite.
_LEAST, _MOST = 1e-4, 1e9


def rotary(
    config: Mapping[str, Any], dim: int, limit: int, default_base: float | None = None, layer_type: str | None = None
) -> RotaryConfig:
    """``RotaryConfig.from_config``, with dynamic NTK and LongRoPE for an engine whose longest sequence has ``limit``
    tokens.

    Raises:
        ArchitectureError: a setting is missing or has the wrong type, or the scaling is not implemented.
    """
    settings = {**read_object(config, "rope_scaling"), **read_object(config, "rope_parameters")}
    kind = scaling_kind(settings)
    if kind not in ("dynamic", "longrope", "su"):  # the last is LongRoPE's first name
        return RotaryConfig.from_config(config, dim, layer_type, default_base)
    unscaled = {key: settings[key] for key in ("rope_theta", "partial_rotary_factor") if key in settings}
    bare = {**config, "rope_scaling": None, "rope_parameters": {"rope_type": "default", **unscaled}}
    if config.get("rope_theta", default_base) is not None:
        bare["rope_parameters"].setdefault("rope_theta", config.get("rope_theta", default_base))
    plain = RotaryConfig.from_config(bare, dim)
    trained_length = read_int(config, "max_position_embeddings")
    # For messages, which name the model by its type.
    spelled = "dynamic" if kind == "dynamic" else "longrope"
    named = {**config, **settings, "model_type": f"{config.get('model_type')} (rope_type {spelled})"}
    if kind == "dynamic":
        stretch = ntk_stretch(_ntk(named, trained_length, limit), plain.dim)
        return replace(plain, base=plain.base * stretch)
    return _longrope(plain, named, trained_length, limit)


def ntk_stretch(alpha: float, dim: int) -> float:
    """The factor on theta that stretches the longest wavelength of ``dim`` rotated dimensions by ``alpha`` (bloc97
    2023).

    Raises:
        ArchitectureError: ``dim`` is 2, which has one wavelength only.
    """
    if dim <= 2:
        raise ArchitectureError(
            f"config.json asks for dynamic NTK scaling, which needs more than {dim} rotated dimensions in each head; "
            "correct head_dim or partial_rotary_factor, or remove the scaling"
        )
    return float(alpha ** (dim / (dim - 2)))


def _ntk(settings: Mapping[str, Any], trained_length: int, limit: int) -> float:
    """The factor by which NTK scaling stretches the longest wavelength: ``alpha`` if it is given, otherwise one that
    grows with the context."""
    if settings.get("alpha") is not None:
        return read_float(settings, "alpha", above=_LEAST, most=_MOST)
    factor = read_float(settings, "factor", above=_LEAST, most=_MOST)
    return factor * max(limit, trained_length) / trained_length - (factor - 1)


def _longrope(plain: RotaryConfig, settings: Mapping[str, Any], trained_length: int, limit: int) -> RotaryConfig:
    """LongRoPE (Ding et al. 2024): each frequency has a divisor, one for short contexts and one for long ones."""
    lists = [settings.get(key) for key in ("short_factor", "long_factor")]
    for key, values in zip(("short_factor", "long_factor"), lists, strict=True):
        numbers = isinstance(values, list) and all(type(v) in (int, float) and _LEAST < v <= _MOST for v in values)
        if not numbers or len(values or ()) != plain.dim // 2:
            raise ArchitectureError(
                f"config.json asks for rope_type 'longrope', whose {key} must be a list of {plain.dim // 2} numbers "
                f"above {_LEAST:g}, one for each pair of rotated dimensions; it is {repr(values)[:200]}"
            )
    original = read_float(settings, "original_max_position_embeddings", above=1.0)
    factor = read_float(settings, "factor", above=_LEAST, default=trained_length / original)
    amplitude = math.sqrt(1 + math.log(factor) / math.log(original)) if factor > 1 else 1.0
    return replace(
        plain, divisors=tuple(lists[limit > original] or ()),
        amplitude=read_float(settings, "attention_factor", default=amplitude),
    )  # fmt: skip
