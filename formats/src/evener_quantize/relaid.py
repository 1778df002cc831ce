"""A checkpoint of integers in groups whose numbers are stored in another layout: ``quant=gptq``, ``awq`` or ``halves``
for one that is quantized otherwise. No number is rounded again. Torch-free to import."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import cached_property
from typing import TYPE_CHECKING, Any

from evener_convert.matrices import kinds_of, stored_names

from evener.contracts.checkpoint import Checkpoint, Extent, Headers
from evener.contracts.conversion.views import CheckpointView, ViewRequest
from evener.contracts.quant import QuantScheme, WeightPart
from evener.errors import ConfigError
from evener.layers.builder import Builder
from evener.loading.scheme import Unquantized, pick_scheme
from evener_quantize.layouts import LAYOUTS, Layout
from evener_quantize.settings import METHODS

if TYPE_CHECKING:
    import torch


class RelaidCheckpoint(CheckpointView):
    """``inner`` in another layout. A matrix is arranged anew when a tensor of it is asked for, and not kept longer than
    until the next one.

    Args:
        parts: what is stored anew, by name, without tensors.
        kept: names of linear weights that are not quantized.
    """

    changes, keys = "numbers", frozenset({"quant"})

    def __init__(
        self, inner: Checkpoint, scheme: QuantScheme, layout: Layout, parts: Mapping[str, WeightPart], kept: list[str]
    ) -> None:
        super().__init__(inner)
        self._scheme, self._layout, self._parts = scheme, layout, parts
        self._settings = layout.settings(list(parts.values()), kept, scheme.name)
        before = {each for name in parts for each in scheme.tensors(name, inner.headers).values()}
        made = {name: layout.headers(part) for name, part in parts.items()}
        self._source = {each: name for name, headers in made.items() for each in headers}
        left = {name: each for name, each in inner.headers.items() if name not in before}
        self._headers: Headers = {**left, **{n: each for headers in made.values() for n, each in headers.items()}}
        self.copied = (inner.copied & left.keys()) | self._source.keys()
        self._last: tuple[str, Mapping[str, torch.Tensor]] = ("", {})

    @classmethod
    def of(cls, request: ViewRequest) -> RelaidCheckpoint | None:
        """The checkpoint in the layout ``quant``, if it is stored in another one.

        Raises:
            ConfigError: a matrix cannot be stored so, or none is quantized.
        """
        layout, checkpoint = LAYOUTS.get(request.quant), request.checkpoint
        if layout is None:
            return None
        if Unquantized().detect(checkpoint.config):
            method = layout.name if layout.name in METHODS else METHODS[0]
            raise ConfigError(
                f"quant={layout.name} converts an already quantized checkpoint; {checkpoint.path} is not quantized: "
                f"type evener quantize {checkpoint.path} DST --method {method}, or leave quant=auto"
            )
        scheme = pick_scheme(checkpoint.config, request.schemes, "auto", checkpoint)
        if scheme.name == layout.name:
            return None
        build = Builder("bfloat16", request.length, lambda name: scheme.part(name, checkpoint.headers))
        vocabulary = request.architecture(checkpoint.config, build).vocab_size
        parts: dict[str, WeightPart] = {}
        kept: list[str] = []
        for item, declared, kind in kinds_of(build.weights, vocabulary):
            for name in stored_names(item, declared):
                part = scheme.part(name, checkpoint.headers)
                if part is None:
                    continue  # the loader reports what is missing
                if part.format.plain:
                    # Routers too: other readers take every matrix for a quantized one that the config does not name.
                    kept += [name] if kind not in ("head", "shared") else []
                    continue
                stack = item.experts and "{}" not in declared.name
                reason = "it is a stack of experts in one tensor" if stack else layout.refusal(part)
                if reason or not name.endswith(".weight"):
                    raise ConfigError(
                        f"quant={layout.name}: {name} of {checkpoint.path} cannot be stored so: "
                        f"{reason or 'its name does not end in .weight'}; leave quant=auto"
                    )
                parts[name] = part
        if not parts:
            raise ConfigError(f"quant={layout.name}: {checkpoint.path} has no quantized matrix; leave quant=auto")
        return cls(checkpoint, scheme, layout, parts, kept)

    @property
    def headers(self) -> Headers:
        return self._headers

    @cached_property
    def config(self) -> Mapping[str, Any]:
        before = {key: each for key, each in self.inner.config.items() if key != "compression_config"}
        return {**before, "quantization_config": dict(self._settings)}

    def tensor(self, name: str) -> torch.Tensor:
        source = self._source.get(name)
        if source is None:
            return self.inner.tensor(name)
        if self._last[0] != source:
            roles = self._scheme.tensors(source, self.inner.headers)
            stored = {role: self.inner.tensor(each) for role, each in roles.items()}
            part = self._scheme.arrange(replace(self._parts[source], tensors=stored))
            self._last = source, self._layout.tensors(part)
        return self._last[1][name]

    def extent(self, name: str) -> Extent | None:
        return None if name in self._source else self.inner.extent(name)

    def close(self) -> None:
        self._last = "", {}
        self.inner.close()
