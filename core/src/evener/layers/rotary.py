"""Rotary position embedding: its settings in ``config.json``, in both spellings, and its table of cosines and sines."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from evener.contracts.declared import Table
from evener.errors import ArchitectureError
from evener.layers.config_json import kind, read_flag, read_float, read_int, read_object, unsupported

if TYPE_CHECKING:
    import torch

    from evener.layers.builder import Builder

_SCALINGS = ("default", "linear", "llama3", "yarn")


def scaling_kind(settings: Mapping[str, Any]) -> str:
    """The kind of scaling, from either spelling."""
    return str(settings.get("rope_type", settings.get("type", "default")))[:100]


def has_entries(rope_parameters: Mapping[str, Any]) -> bool:
    """Whether ``rope_parameters`` has one entry per layer type."""
    return any(isinstance(value, Mapping) for value in rope_parameters.values())


def _settings(config: Mapping[str, Any], layer_type: str | None, default_base: float | None) -> Mapping[str, Any]:
    """Theta and scaling as one mapping, from either spelling."""
    new = read_object(config, "rope_parameters")
    if has_entries(new):  # a theta outside the entries would belong to no layer type
        return read_object(new, layer_type or "")
    if new:
        return new if new.get("rope_theta") is not None else {**new, "rope_theta": config.get("rope_theta")}
    return {"rope_theta": config.get("rope_theta", default_base), **read_object(config, "rope_scaling")}


def yarn_factor(factor: float, weight: float = 1.0) -> float:
    """YaRN's "mscale" for a context ``factor`` times as long: its factor on queries and on keys (Peng et al. 2023)."""
    return 1.0 if factor <= 1 else 0.1 * weight * math.log(factor) + 1.0


def _amplitude(settings: Mapping[str, Any], factor: float) -> float:
    if settings.get("attention_factor") is not None:
        return read_float(settings, "attention_factor")
    if not (settings.get("mscale") and settings.get("mscale_all_dim")):
        return yarn_factor(factor)
    one, other = (yarn_factor(factor, read_float(settings, key)) for key in ("mscale", "mscale_all_dim"))
    return one / other


@dataclass(frozen=True)
class TemperatureConfig:
    """Scales queries so that attention stays sharp in long contexts (Nakanishi 2025, "Scalable-Softmax"): the query at
    position p is multiplied by ``1 + weight * log(1 + floor((p + 1) / every))``."""

    every: int
    weight: float

    def of(self, lengths: torch.Tensor) -> torch.Tensor:
        """The factors of the last positions of contexts of these lengths, float32."""
        import torch

        steps = torch.div(lengths, self.every, rounding_mode="floor").float()
        return 1 + self.weight * torch.log1p(steps)


@dataclass(frozen=True)
class LogNConfig:
    """Scales queries beyond the trained context of ``trained`` tokens (Su 2021, "log-n scaling"): the query at position
    p is multiplied by ``max(1, log(p + 1) / log(trained))``."""

    trained: int

    def of(self, lengths: torch.Tensor) -> torch.Tensor:
        """The factors of the last positions of contexts of these lengths, float32."""
        return (lengths.float().log() / math.log(self.trained)).clamp(min=1)


def query_factors(build: Builder, config: TemperatureConfig | LogNConfig) -> Table:
    """The factor of each position, float32 [max_positions]."""
    length = build.max_positions

    def make(device: torch.device) -> torch.Tensor:
        import torch

        return config.of(torch.arange(1, length + 1)).to(device)

    return build.table(("factors on queries", config, length), length * 4, make)


@dataclass(frozen=True)
class RotaryConfig:
    """Rotary position embedding of one kind of layer (Su et al. 2021).

    Attributes:
        dim: leading part of each head that is rotated; 0: none.
        base: theta.
        scaling: how angles are scaled for longer contexts: "default" (not at all), "linear", "llama3" or "yarn".
        factor: how many times longer the context is than in pre-training.
        low: (llama3) ``low_freq_factor``; (yarn) ``beta_slow``.
        high: (llama3) ``high_freq_factor``; (yarn) ``beta_fast``.
        original: (llama3, yarn) tokens of the context in pre-training.
        truncate: (yarn) whether the bounds are rounded to whole dimensions.
        amplitude: factor on cosines and sines.
        interleaved: whether pairs (2i, 2i+1) are rotated, instead of pairs (i, i + dim / 2).
        divisors: of the frequencies, one for each pair of dimensions; empty: no division.
    """

    dim: int
    base: float = 10000.0
    scaling: str = "default"
    factor: float = 1.0
    low: float = 1.0
    high: float = 4.0
    original: int = 8192
    interleaved: bool = False
    truncate: bool = True
    amplitude: float = 1.0
    divisors: tuple[float, ...] = ()

    @classmethod
    def from_config(
        cls, config: Mapping[str, Any], dim: int, layer_type: str | None = None, default_base: float | None = None
    ) -> RotaryConfig:
        """Read ``rope_parameters`` (transformers 5; flat or by layer type) or ``rope_theta`` + ``rope_scaling`` (4).

        Args:
            config: the parsed ``config.json``.
            dim: size of a whole head. ``partial_rotary_factor`` is applied here, so it must not be applied before.
            layer_type: which entry to read if ``rope_parameters`` has one per layer type.
            default_base: theta if the config has none; None: the config must have one.

        Raises:
            ArchitectureError: theta or a setting of the scaling is missing, or the scaling is not implemented.
        """
        settings = {"model_type": kind(config), **_settings(config, layer_type, default_base)}
        if settings.get("rope_theta") is None:
            raise ArchitectureError(
                "config.json has neither rope_theta nor rope_parameters.rope_theta"
                + (f" for {layer_type} layers" if layer_type else "")
                + '; add the model\'s value, e.g. "rope_theta": 10000.0'
            )
        base, scaling = read_float(settings, "rope_theta", above=1.0), scaling_kind(settings)
        if scaling not in _SCALINGS:
            raise ArchitectureError(
                f"config.json asks for rope_type {scaling!r}, which is not implemented; "
                f"implemented are: {', '.join(_SCALINGS)}"
            )
        # Without two dimensions to rotate there would be no position at all.
        part = read_float({**config, **settings}, "partial_rotary_factor", above=1.0 / dim, most=1.0, default=1.0)
        if scaling == "default":  # unused settings must not make two tables of equal angles
            return cls(int(dim * part), base)
        yarn, llama3, length = scaling == "yarn", scaling == "llama3", "original_max_position_embeddings"
        # The settings without a default are required: linear scaling has none of them.
        low = read_float(settings, "beta_slow" if yarn else "low_freq_factor", default=None if llama3 else 1.0)
        high = read_float(settings, "beta_fast" if yarn else "high_freq_factor", default=None if llama3 else 32.0)
        if llama3 and high <= low:
            raise unsupported(settings, "high_freq_factor", f"it must be above low_freq_factor = {low:g}")
        trained = None if yarn else read_int(config, "max_position_embeddings", default=8192)
        factor = read_float(settings, "factor", above=1e-4)  # a smaller one would give angles that are not finite
        return cls(
            int(dim * part), base, scaling, factor, low, high, truncate=read_flag(settings, "truncate", True),
            original=read_int(settings if config.get(length) is None else config, length, default=trained),
            amplitude=_amplitude(settings, factor) if yarn else 1.0,
        )  # fmt: skip

    def table(self, build: Builder, width: int) -> Table:
        """For heads of this ``width``: float32 [max_positions, dim], the cosines of dim / 2 angles, then their sines.

        Raises:
            ArchitectureError: the heads have fewer than ``dim`` dimensions, or ``dim`` is no even number.
        """
        if not 0 <= self.dim <= width or self.dim % 2:
            raise ArchitectureError(f"{self.dim} dimensions of each head are to be rotated, in pairs, but the heads "
                                    f"have {width}; choose an even number up to that (in config.json: "
                                    "partial_rotary_factor, head_dim, or their like)")  # fmt: skip
        length = build.max_positions
        key, nbytes = ("rotary", self, length), length * self.dim * 4
        table = build.table(key, nbytes, lambda device: self._angles(0, length).to(device))
        build.rows |= {table: self._angles} if self.dim else {}
        return table

    def _angles(self, first: int, last: int) -> torch.Tensor:
        """The rows of the positions from ``first`` up to ``last``, on the host."""
        import torch

        inverse = 1.0 / (self.base ** (torch.arange(0, self.dim, 2, dtype=torch.int64).float() / self.dim))
        if self.scaling == "linear":
            inverse = inverse / self.factor
        elif self.scaling == "llama3":
            inverse = self._llama3(inverse)
        elif self.scaling == "yarn":
            inverse = self._yarn(inverse)
        if self.divisors:
            inverse = inverse / torch.tensor(self.divisors)
        # In place: a table may have some hundred megabytes, and a second of them would take as long as the sines.
        table = torch.outer(torch.arange(first, last).float(), inverse.repeat(2))
        table[:, : self.dim // 2].cos_()
        table[:, self.dim // 2 :].sin_()
        return table.mul_(self.amplitude)

    def _yarn(self, inverse: torch.Tensor) -> torch.Tensor:
        """YaRN (Peng et al. 2023): high frequencies are kept, low ones divided by the factor, with a ramp between."""
        import torch

        turns = (self.high, self.low)
        ends = [self.dim * math.log(self.original / (n * 2 * math.pi)) / (2 * math.log(self.base)) for n in turns]
        if self.truncate:
            ends = [math.floor(ends[0]), math.ceil(ends[1])]
        first, last = max(ends[0], 0), min(ends[1], self.dim - 1)
        stretch = ((torch.arange(self.dim // 2).float() - first) / (last - first or 0.001)).clamp(0, 1)
        return inverse / self.factor * stretch + inverse * (1 - stretch)

    def _llama3(self, inverse: torch.Tensor) -> torch.Tensor:
        """Llama 3.1's scaling: long wavelengths are stretched, short ones kept, those between interpolated."""
        import torch

        wavelength = 2 * math.pi / inverse
        stretched = torch.where(wavelength > self.original / self.low, inverse / self.factor, inverse)
        smooth = (self.original / wavelength - self.low) / (self.high - self.low)
        mixed = (1 - smooth) * stretched / self.factor + smooth * stretched
        between = (wavelength >= self.original / self.high) & (wavelength <= self.original / self.low)
        return torch.where(between, mixed, stretched)
