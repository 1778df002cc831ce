"""The scheme "torchao": int8, float8 and integers of two to eight bits, as torchao's safetensors files have them.

A weight ``<module>.weight`` [rows, columns] is stored as ``<module>._weight_qdata`` int8 or float8 [rows, columns],
``_weight_scale`` [rows, groups], for float8 also for the whole matrix or for blocks, and of integers
``_weight_zero_point`` int8 [rows, groups], which are all zero if the config says that weights are symmetric. Torchao's
other layouts are made for one kind of device each, and are refused. Imports torch only to read weights.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Literal

from evener.contracts.checkpoint import Checkpoint, Headers
from evener.contracts.quant import QuantFormat, QuantScheme, Rounding, WeightPart
from evener.errors import CheckpointError
from evener_formats.beside import Axes, BesideScheme
from evener_formats.gptq import Layer
from evener_formats.rules import mapping, word
from evener_formats.scaled import ScaledScheme
from evener_formats.unpacked import UnpackedIntegers

if TYPE_CHECKING:
    import torch

_FLOATS = ("float8_e4m3fn", "float8_e5m2")
#: Kinds of config whose weights are plain, and how each may have rounded activations.
_KINDS = {
    "Int8WeightOnlyConfig": "", "Int8DynamicActivationInt8WeightConfig": "int8",
    "Int8StaticActivationInt8WeightConfig": "", "Float8WeightOnlyConfig": "",
    "Float8DynamicActivationFloat8WeightConfig": _FLOATS[0], "Float8StaticActivationFloat8WeightConfig": "",
    "IntxWeightOnlyConfig": "", "Int8DynamicActivationIntxWeightConfig": "",
}  # fmt: skip
#: Kinds that have a config for each of several layers.
_MAPS = ("FqnToConfig", "ModuleFqnToConfig", "AOPerModuleConfig")
#: What is stored beside a weight's numbers and scales. Fixed scales of activations are not used.
_UNUSED = ("act_quant_scale", "act_quant_zero_point")
#: What changes results, or belongs to a layout that is not read.
_UNREAD = ("act_pre_scale", "scale_and_zero", "per_tensor_scale")


class _Scaled(ScaledScheme):
    """Float8 with scales.

    Args:
        how: how activations may be rounded.
    """

    name, methods = "torchao", ()

    def __init__(self, how: Rounding | None) -> None:
        self._how = how

    def rounding(self, name: str, form: QuantFormat) -> Rounding | None:
        if self._how is None or self._how.storage not in _FLOATS:
            return None
        return Rounding(self._how.storage, max(0, form.group))


class TorchaoScheme(BesideScheme):
    """``"quant_method": "torchao"``.

    Args:
        layer: bits of integers, and whether they have zero points.
        how: how activations may be rounded.
    """

    name = "torchao"

    def __init__(self, layer: Layer | None = None, how: Rounding | None = None) -> None:
        self._layer, self._how, self._floats = layer or Layer(8, 0), how, _Scaled(how)

    def detect(self, config: Mapping[str, Any]) -> bool:
        settings = config.get("quantization_config")
        return isinstance(settings, Mapping) and settings.get("quant_method") == self.name

    def configured(self, config: Mapping[str, Any], checkpoint: Checkpoint | None = None) -> QuantScheme:
        found = list(_configs(config["quantization_config"].get("quant_type"), 6))
        kinds = [str(each.get("_type")) for each in found]
        wrong = [kind for kind in kinds if kind not in _KINDS] or ([] if kinds else ["no config"])
        if wrong:
            raise CheckpointError(
                f"config.json's quantization_config has a quant_type with {wrong[0][:60]!r}, whose weights torchao "
                f"stores for one kind of device or in files of Python objects; {self.name} reads safetensors files of "
                f"{', '.join(_KINDS)}; quantize the model with one of these, or use a checkpoint in another format"
            )
        data = [mapping(each, "_data") for each in found]
        types = [str(each.get(key)) for each in data for key in ("mapping_type", "weight_mapping_type")]
        bits = {_bits(kind, each) for kind, each in zip(kinds, data, strict=True)}
        layer = Layer(bits.pop() if len(bits) == 1 else 8, 0, not any("ASYMMETRIC" in each for each in types))
        return TorchaoScheme(layer, _rounding(kinds[0], data[0]) if len(kinds) == 1 else None)

    def tensors(self, name: str, headers: Headers) -> Mapping[str, str]:
        own = self._own(name, headers)
        if not own:
            return {"weight": name}
        inner = self._reader(own[name], name, headers).tensors(name, {each: headers[own[each]] for each in own})
        roles = {role: own[each] for role, each in inner.items()}
        prefix = _prefix(name)
        others = {end: prefix + end for end in (*_UNUSED, "zero_point") if prefix + end in headers}
        return {**roles, **{end: each for end, each in others.items() if each not in roles.values()}}

    def part(self, name: str, headers: Headers) -> WeightPart | None:
        own, prefix = self._own(name, headers), _prefix(name)
        unread = [prefix + end for end in _UNREAD if prefix + end in headers]
        kind, shape = headers.get(prefix + "qdata", ("nothing", ()))
        if unread or (own and (kind not in ("int8", *_FLOATS) or len(own) < 2)):
            raise CheckpointError(
                f"{name} is stored by torchao as {kind} {list(shape)}{' with ' if unread else ''}"
                f"{', '.join(unread)}; {self.name} reads int8 and {', '.join(_FLOATS)} [rows, columns] with "
                f"{prefix}scale; quantize the model in such a format"
            )
        if not own:
            return super().part(name, headers)
        seen = {each: headers[own[each]] for each in own}
        part = self._reader(own[name], name, headers).part(name, seen)
        if part is None or kind != "int8" or self._how is None or self._how.storage != "int8" or part.format.zero:
            return part
        return replace(part, format=replace(part.format, activation=self._how))

    def axes(self, part: WeightPart) -> Mapping[str, Axes]:
        raise NotImplementedError("only plain parts are cut here")

    def dequantize(self, part: WeightPart, dtype: str) -> torch.Tensor:
        reader = self._reader_of(part)
        return super().dequantize(part, dtype) if reader is None else reader.dequantize(self._checked(part), dtype)

    def cut(self, part: WeightPart, axis: Literal["out", "in"], start: int, stop: int) -> WeightPart:
        reader = self._reader_of(part)
        return super().cut(part, axis, start, stop) if reader is None else reader.cut(part, axis, start, stop)

    def arrange(self, part: WeightPart) -> WeightPart:
        reader = self._reader_of(part)
        return part if reader is None else reader.arrange(self._checked(part))

    def numbers(self, part: WeightPart) -> Iterable[torch.Tensor]:
        reader = self._reader_of(part)
        return super().numbers(part) if reader is None else reader.numbers(part)

    def _own(self, name: str, headers: Headers) -> dict[str, str]:
        """The stored names of a weight's tensors by those that other schemes have for them; empty: it is plain."""
        prefix = _prefix(name)
        ends = {"qdata": name, "scale": f"{name}_scale"}
        if not self._layer.symmetric:
            ends["zero_point"] = f"{name}_zero_point"
        found = {each: prefix + end for end, each in ends.items() if prefix + end in headers}
        return found if name in found else {}

    def _reader(self, stored: str, name: str, headers: Headers) -> QuantScheme:
        kind, shape = headers[stored]
        if kind != "int8":
            return self._floats
        _, scales = headers.get(f"{_prefix(name)}scale", ("", ()))
        groups = scales[1] if len(scales) == 2 else 1
        return self._integers(shape[-1] // groups if groups > 1 and len(shape) == 2 else 0)

    def _reader_of(self, part: WeightPart) -> QuantScheme | None:
        """Who reads a part; None: it is plain."""
        if part.format.plain:
            return None
        return self._integers(part.format.group) if "numbers" in part.tensors else self._floats

    def _integers(self, group: int) -> UnpackedIntegers:
        layer = replace(self._layer, group=group)
        return UnpackedIntegers(lambda stem: layer)

    def _checked(self, part: WeightPart) -> WeightPart:
        zeros = part.tensors.get("zero_point")
        if zeros is not None and bool((zeros != 0).any()):
            raise CheckpointError(
                f"the zero points of {part.name} are not all zero, and quant_type in config.json says that its weights "
                "are symmetric; use the config.json that was published with these weights"
            )
        return part

    def examples(self, name: str, seed: int) -> Iterator[tuple[Mapping[str, Any], Headers, Mapping[str, torch.Tensor]]]:
        import torch

        random, rows, columns, prefix = torch.Generator().manual_seed(seed), 48, 192, _prefix(name)
        for kind, data, scales in (
            ("Int8WeightOnlyConfig", {}, (rows, 1)), ("Int8DynamicActivationInt8WeightConfig", {}, (rows, 1)),
            ("IntxWeightOnlyConfig", {"weight_dtype": {"_type": "torch.dtype", "_data": "int4"}}, (rows, 6)),
            ("IntxWeightOnlyConfig", {"weight_dtype": {"_type": "torch.dtype", "_data": "int3"},
                                      "mapping_type": {"_type": "MappingType", "_data": "ASYMMETRIC"}}, (rows, 3)),
            ("Float8WeightOnlyConfig", {}, (rows, 1)), ("Float8DynamicActivationFloat8WeightConfig", {}, (1, 1)),
        ):  # fmt: skip
            floats, bits = kind.startswith("Float8"), _bits(kind, data)
            numbers = torch.randint(-(1 << bits - 1), 1 << bits - 1, (rows, columns), generator=random)
            scale = (torch.rand(scales, generator=random) + 1) / (4 << bits)
            stored = {"qdata": numbers.to(torch.float8_e4m3fn if floats else torch.int8), "scale": scale}
            if not floats:
                zeros = (
                    torch.randint(-2, 3, scales, generator=random) if "mapping_type" in data else torch.zeros(scales)
                )
                stored["zero_point"] = zeros.to(torch.int8)
            tensors = {prefix + end: tensor for end, tensor in stored.items()}
            headers = {n: (str(t.dtype).removeprefix("torch."), tuple(t.shape)) for n, t in tensors.items()}
            quant_type = {"default": {"_type": kind, "_version": 2, "_data": data}}
            yield {"quantization_config": {"quant_method": self.name, "quant_type": quant_type}}, headers, tensors


def _prefix(name: str) -> str:
    """What the names of a weight's tensors begin with."""
    stem, _, last = name.rpartition(".")
    return f"{stem}._{last}_"


def _configs(found: Any, depth: int) -> Iterator[Mapping[str, Any]]:
    """The configs in a ``quant_type``: ``{"default": config}``, and those that a map by names of layers has."""
    if not isinstance(found, Mapping) or depth == 0:
        if found is not None:
            yield {"_type": str(found)}
    elif "_type" not in found or found["_type"] in _MAPS:
        inner = found.get("_data") if "_type" in found else found
        for each in inner.values() if isinstance(inner, Mapping) else ():
            if isinstance(each, Mapping):
                yield from _configs(each, depth - 1)
    else:
        yield found


def _rounding(kind: str, data: Mapping[str, Any]) -> Rounding | None:
    """How activations may be rounded; None: not, or in a way that no kernel knows."""
    storage, dtype = _KINDS[kind], data.get("activation_dtype")
    other = isinstance(dtype, Mapping) and dtype.get("_data") != storage
    return None if not storage or other or "ASYMMETRIC" in str(data.get("act_mapping_type")) else Rounding(storage)


def _bits(kind: str, data: Mapping[str, Any]) -> int:
    """Bits of an integer.

    Raises:
        CheckpointError: the config says another dtype.
    """
    if "Intx" not in kind or data.get("weight_dtype") is None:
        return 8
    known = {f"int{bits}": bits for bits in range(2, 9)}
    return known[word(mapping(data, "weight_dtype"), "_data", known) or "int8"]
