"""The scheme "compressed-tensors" (llm-compressor), whose layers may each have a format of their own.

The tensors stored beside a name decide how it is read; the config adds what they do not show: bits, group sizes, zero
points and act-order. Layers that ``ignore`` names are stored plain, and are read so.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from functools import cache
from re import Pattern
from typing import TYPE_CHECKING, Any, Literal

from evener.contracts.checkpoint import Checkpoint, Headers
from evener.contracts.quant import QuantFormat, QuantScheme, Rounding, WeightPart
from evener.errors import CheckpointError
from evener_formats.beside import BesideScheme
from evener_formats.gptq import Layer
from evener_formats.microscaled import MicroscaledFloats, microscaled_examples
from evener_formats.packed import PackedFloats, PackedIntegers, float_example
from evener_formats.rules import expression, flag, malformed, mapping, number, texts, word
from evener_formats.scaled import ScaledScheme
from evener_formats.unpacked import UnpackedIntegers

if TYPE_CHECKING:
    import torch

#: Formats of compressed-tensors that have one matrix and its scales for a weight, and the packed ones.
_SCALED = ("float-quantized", "int-quantized", "naive-quantized", "mxfp8-quantized")
_PACKED = ("pack-quantized", "nvfp4-pack-quantized", "mxfp4-pack-quantized", "mxfp6-pack-quantized")
#: Bits of integers, least and most.
_BITS = (2, 8)
#: What numbers share a scale.
_STRATEGIES = ("tensor", "channel", "group", "block", "token", "tensor_group", "attn_head")
#: What says how activations or the KV cache were rounded.
_UNUSED = ("input_global_scale", "k_scale", "v_scale")


class PartlyPacked(ScaledScheme):
    """A scheme of eight bits with scales, some of whose weights are packed."""

    def packed(self, name: str, headers: Headers) -> BesideScheme | None:
        """Who reads a weight; None if it is not packed."""
        raise NotImplementedError

    def reader(self, part: WeightPart) -> BesideScheme | None:
        """Who reads a part with its tensors."""
        raise NotImplementedError

    def tensors(self, name: str, headers: Headers) -> Mapping[str, str]:
        packed = self.packed(name, headers)
        found = super().tensors(name, headers) if packed is None else packed.tensors(name, headers)
        stem = name.removesuffix(".weight")
        ends = _UNUSED if packed is None and "scale" in found else (*_UNUSED, "input_scale")
        unused = {end: f"{stem}.{end}" for end in ends} if name.endswith(".weight") else {}
        return {**found, **{end: each for end, each in unused.items() if each in headers}}

    def part(self, name: str, headers: Headers) -> WeightPart | None:
        packed = self.packed(name, headers)
        return super().part(name, headers) if packed is None else packed.part(name, headers)

    def dequantize(self, part: WeightPart, dtype: str) -> torch.Tensor:
        reader = self.reader(part)
        return super().dequantize(part, dtype) if reader is None else reader.dequantize(part, dtype)

    def cut(self, part: WeightPart, axis: Literal["out", "in"], start: int, stop: int) -> WeightPart:
        reader = self.reader(part)
        return super().cut(part, axis, start, stop) if reader is None else reader.cut(part, axis, start, stop)

    def arrange(self, part: WeightPart) -> WeightPart:
        reader = self.reader(part)
        return super().arrange(part) if reader is None else reader.arrange(part)

    def numbers(self, part: WeightPart) -> Iterable[torch.Tensor]:
        reader = self.reader(part)
        return super().numbers(part) if reader is None else reader.numbers(part)


#: How a layer is named, its settings if its numbers are integers in groups, and how its activations are rounded.
_Rule = tuple[str | Pattern[str] | None, Layer | None, Rounding | None]


class CompressedTensors(PartlyPacked):
    """``"quant_method": "compressed-tensors"``.

    Args:
        rules: (how a layer is named, its settings, how its activations are rounded), in the order in which they are
            tried: exact names, expressions, and None for all layers.
    """

    name, methods = "compressed-tensors", ("compressed-tensors",)

    def __init__(self, rules: tuple[_Rule, ...] = ()) -> None:
        self._rules, self._floats = rules, PackedFloats("_packed", "_global_scale", divides=True)
        self._microscaled = MicroscaledFloats()
        self._integers, self._unpacked = PackedIntegers(cache(self._layer)), UnpackedIntegers(cache(self._layer))

    def configured(self, config: Mapping[str, Any], checkpoint: Checkpoint | None = None) -> QuantScheme:
        settings = config["quantization_config"]
        groups = mapping(settings, "config_groups")
        if len(groups) > 10_000:
            raise malformed(settings, "config_groups", "at most 10000 groups")
        rules: list[_Rule] = []
        formats = {str(settings.get("format"))}
        for group in groups.values():
            group = mapping({"config_groups": group}, "config_groups")
            mapping(group, "weights")
            form = str(group.get("format") or settings.get("format"))
            formats.add(form)
            layer, how = _layer_of(group) if _is_in_groups(form, group) else None, _rounding_of(group)
            for text in texts(group, "targets") or ["Linear"]:
                if text.startswith("re:"):
                    rules.append((expression(text[3:], "quantization_config.config_groups"), layer, how))
                else:
                    rules.append((text if "." in text else None, layer, how))
        sparse = mapping(settings, "sparsity_config").get("format") not in (None, "dense")
        unread = [f"the format {each!r}" for each in sorted(formats - {*_SCALED, *_PACKED, "mixed-precision", "None"})]
        unread += ["sparse weights"] if sparse else []
        unread += ["transforms (transform_config)"] if settings.get("transform_config") else []
        if unread:
            raise CheckpointError(
                f"config.json's quantization_config has {unread[0][:80]}, which {self.name} does not read yet; use a "
                f"checkpoint in {', '.join((*_SCALED, *_PACKED))}"
            )
        kinds = (str, Pattern, type(None))
        rules.sort(key=lambda rule: [isinstance(rule[0], kind) for kind in kinds].index(True))
        return CompressedTensors(tuple(rules))

    def packed(self, name: str, headers: Headers) -> BesideScheme | None:
        if headers.get(f"{name}_scale", ("", ()))[0] == "uint8":
            return self._microscaled
        if f"{name}_packed" not in headers:
            stored = headers.get(name, ("", ()))[0] == "int8" and self._settings(name.removesuffix(".weight"))[0]
            return self._unpacked if stored else None
        return self._floats if headers[f"{name}_packed"][0] == "uint8" else self._integers

    def reader(self, part: WeightPart) -> BesideScheme | None:
        if "exponents" in part.tensors:
            return self._microscaled
        if "packed" not in part.tensors:
            return self._unpacked if "numbers" in part.tensors else None
        return self._floats if "whole" in part.tensors else self._integers

    def part(self, name: str, headers: Headers) -> WeightPart | None:
        part, reader = super().part(name, headers), self.packed(name, headers)
        if part is None or reader in (None, self._floats, self._microscaled):
            return part
        how = self.rounding(name, part.format)
        # No published scheme has integers in groups and a fixed scale of activations.
        return part if how is None or how.group < 0 else replace(part, format=replace(part.format, activation=how))

    def rounding(self, name: str, form: QuantFormat) -> Rounding | None:
        return self._settings(name.removesuffix(".weight"))[1]

    def _settings(self, stem: str) -> tuple[Layer | None, Rounding | None]:
        """Those of the first rule that names a layer."""
        for rule, layer, how in self._rules:
            if rule is None or (rule == stem if isinstance(rule, str) else rule.match(stem)):
                return layer, how
        return None, None

    def _layer(self, stem: str) -> Layer:
        layer, _ = self._settings(stem)
        if layer is not None:
            return layer
        raise CheckpointError(
            f"{stem} is stored packed, and no config_group of config.json's quantization_config says its bits and "
            "groups; use the config.json that was published with these weights"
        )

    def examples(self, name: str, seed: int) -> Iterator[tuple[Mapping[str, Any], Headers, Mapping[str, torch.Tensor]]]:
        import torch

        yield from super().examples(name, seed)
        random, rows, columns = torch.Generator().manual_seed(seed), 64, 192
        for bits, group, symmetric, actorder in (
            (4, 32, True, None), (4, 64, False, None), (4, 32, False, "group"), (8, 96, True, "group"),
            (4, -1, True, None), (8, 64, False, None), (3, 32, False, None), (5, 64, True, None),
        ):  # fmt: skip
            groups = columns // group if group > 0 else 1
            zeros = {} if symmetric else {"zero_point": (rows * bits // 32, groups)}
            sizes = {"packed": (rows, columns * bits // 32), **zeros}
            tensors = {
                f"{name}_{end}": torch.randint(-(2**31), 2**31, size, generator=random).int()
                for end, size in sizes.items()
            }
            # Weights stay below one: kernels that round activations are allowed an error for such weights.
            scales = (torch.rand(rows, groups, generator=random) + 1) / (4 << bits)
            tensors[f"{name}_scale"] = scales.bfloat16()
            tensors[f"{name}_shape"] = torch.tensor([rows, columns])
            if actorder:
                tensors[f"{name}_g_idx"] = (torch.randperm(columns, generator=random) // group).int()
            weights = {
                "num_bits": bits, "type": "int", "symmetric": symmetric, "actorder": actorder,
                "strategy": "group" if group > 0 else "channel", "group_size": group if group > 0 else None,
            }  # fmt: skip
            groups_of = {"group_0": {"targets": ["Linear"], "weights": weights}}
            found = {"quant_method": self.name, "format": "pack-quantized", "config_groups": groups_of}
            yield {"quantization_config": found}, _headers(tensors), tensors
        yield from _four_and_eight_bits(name, random)
        yield from microscaled_examples(name, random)
        tensors = float_example(name, "_packed", "_global_scale", random)
        yield (
            {"quantization_config": {"quant_method": self.name, "format": "nvfp4-pack-quantized"}}, _headers(tensors),
            tensors,
        )  # fmt: skip


def _is_in_groups(form: str, group: Mapping[str, Any]) -> bool:
    """Whether the weights of a config_group in a format are integers that ``Layer`` describes."""
    weights = group.get("weights")
    if form not in ("int-quantized", "naive-quantized") or weights is None:
        return form in _PACKED[:1]
    grouped = weights.get("strategy") == "group" or weights.get("num_bits") != 8
    return bool(weights.get("type", "int") == "int" and grouped)


def _layer_of(group: Mapping[str, Any]) -> Layer:
    """Settings of a config_group with integers in groups."""
    weights = group.get("weights")
    weights = weights if isinstance(weights, Mapping) else {}
    bits, strategy, size = weights.get("num_bits"), weights.get("strategy"), weights.get("group_size")
    whole = strategy == "channel" or (strategy == "group" and size == -1)
    kind, grouped = weights.get("type", "int"), strategy == "group" and _positive(size)
    if not isinstance(bits, int) or not _BITS[0] <= bits <= _BITS[1] or kind != "int" or not (whole or grouped):
        raise CheckpointError(
            f"config.json's quantization_config has weights of type {str(kind)[:20]} with num_bits {str(bits)[:20]}, "
            f"strategy {str(strategy)[:20]} and group_size {str(size)[:20]}; integers are read with "
            f"{' to '.join(map(str, _BITS))} bits in groups or channels; use such a checkpoint"
        )
    symmetric, order = weights.get("symmetric", True), weights.get("actorder")
    if not isinstance(symmetric, bool) or order not in (None, False, True, "group", "weight", "static", "dynamic"):
        raise CheckpointError(
            f"config.json's quantization_config has symmetric: {str(symmetric)[:20]} and actorder: {str(order)[:20]}; "
            "use the config.json that was published with these weights"
        )
    return Layer(int(bits), 0 if whole or size is None else int(size), symmetric, order in (True, "group", "dynamic"))


def _rounding_of(group: Mapping[str, Any]) -> Rounding | None:
    """How a config_group says that activations are rounded; None: not, or in a way that no kernel knows.

    Raises:
        CheckpointError: it does not say it in the words of compressed-tensors.
    """
    found = mapping(group, "input_activations")
    if not found:
        return None
    bits, size = number(found, ("num_bits",), 8), found.get("group_size")
    storage = {"float": "float8_e4m3fn", "int": "int8"}[word(found, "type", ("float", "int")) or "int"]
    strategy, dynamic = word(found, "strategy", _STRATEGIES), found.get("dynamic", False)
    if bits is None or bits < 1:
        raise malformed(found, "num_bits", "a number of bits")
    if not isinstance(dynamic, bool) and dynamic != "local":
        raise malformed(found, "dynamic", "true, false or local")
    if size is not None and not _positive(size) and size != -1:
        raise malformed(found, "group_size", "a number of columns")
    if bits != 8 or not flag(found, "symmetric", True) or dynamic == "local":
        return None
    if not dynamic:
        return Rounding(storage, -1) if strategy in (None, "tensor") else None
    if strategy == "group":
        return Rounding(storage, int(size)) if size is not None and _positive(size) else None
    # A scale for each token is finer than one for all tokens of a step, which would depend on the others.
    return Rounding(storage) if strategy in (None, "tensor", "token") else None


def _positive(size: Any) -> bool:
    return isinstance(size, int) and not isinstance(size, bool) and size > 0


def _four_and_eight_bits(
    name: str, random: torch.Generator
) -> Iterator[tuple[Mapping[str, Any], Headers, Mapping[str, torch.Tensor]]]:
    """Examples of W4A8 and W4AFP8."""
    import torch

    rows, columns = 64, 192
    for group, symmetric, kind in ((64, True, "int"), (32, False, "int"), (96, True, "float")):
        groups = columns // group
        tensors = {
            name: torch.randint(-8, 8, (rows, columns), generator=random).to(torch.int8),
            f"{name}_scale": ((torch.rand(rows, groups, generator=random) + 1) / 64).bfloat16(),
        }
        if not symmetric:
            tensors[f"{name}_zero_point"] = torch.randint(-8, 8, (rows, groups), generator=random).to(torch.int8)
        weights = {"num_bits": 4, "type": "int", "symmetric": symmetric, "strategy": "group", "group_size": group}
        how = {"num_bits": 8, "type": kind, "symmetric": True, "strategy": "token", "dynamic": True}
        groups_of = {"group_0": {"targets": ["Linear"], "weights": weights, "input_activations": how}}
        found = {"quant_method": "compressed-tensors", "format": "int-quantized", "config_groups": groups_of}
        yield {"quantization_config": found}, _headers(tensors), tensors


def _headers(tensors: Mapping[str, torch.Tensor]) -> Headers:
    return {name: (str(t.dtype).removeprefix("torch."), tuple(t.shape)) for name, t in tensors.items()}
