"""The scheme "gptq": integers of 2 to 8 bits as GPTQModel and AutoGPTQ save them.

A linear weight ``<layer>.weight`` [rows, columns] is stored as ``<layer>.qweight`` int32 [columns x bits / 32, rows],
``qzeros`` int32 [groups, rows x bits / 32], ``scales`` [groups, rows] and ``g_idx`` int32 [columns], the group of each
column. ``"checkpoint_format": "gptq"`` stores each zero point less one, "gptq_v2" as it is. "gptq_p", the only one with
5, 6 and 7 bits, stores them as they are too, and all numbers in planes of bits. Numbers of 2 and 3 bits are kept in 4,
and those of 5 to 7 in 8. Imports torch only to read weights.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cache
from math import lcm
from typing import TYPE_CHECKING, Any

from evener.contracts.checkpoint import Checkpoint, Headers
from evener.contracts.quant import QuantFormat, QuantScheme, WeightPart
from evener.errors import CheckpointError
from evener_formats.beside import PLAIN, Along, Axes, BesideScheme
from evener_formats.rules import expression, flag, number
from evener_formats.words import BITS, PLANES, least_count, pairs, per_word, unpack, unpack_planes

if TYPE_CHECKING:
    import torch

#: Where the zero points are stored less one, and where as they are.
_PLANAR = "gptq_p"
_FORMATS = {"gptq": 1, "gptq_v2": 0, _PLANAR: 0}
#: The ``layout`` of a ``quantization_config`` with numbers of GPTQ or AWQ in files that another scheme reads.
HALVES = "halves"


@dataclass(frozen=True)
class Layer:
    """How a layer's weight was quantized.

    Attributes:
        bits: of a number.
        group: columns of a group; 0: the whole row.
        symmetric: whether the zero point is the middle of the numbers.
        act_order: whether ``g_idx`` says the groups, instead of neighbours.
    """

    bits: int = 4
    group: int = 128
    symmetric: bool = True
    act_order: bool = False

    @classmethod
    def of(cls, settings: Mapping[str, Any], method: str = "gptq", known: Collection[int] = BITS) -> Layer:
        """From the keys of a ``quantization_config``; ``known`` are the bits that its format has.

        Raises:
            CheckpointError: a value is none that is read.
        """
        bits, group = number(settings, ("bits", "w_bit")), number(settings, ("group_size", "q_group_size"), 128)
        if bits is None or bits not in known or group is None or not (group == -1 or group > 0):
            raise CheckpointError(
                f"config.json's quantization_config has bits: {str(settings.get('bits'))[:40]} and group_size: "
                f"{str(settings.get('group_size'))[:40]}; {method} has {', '.join(map(str, known))} bits and a "
                "positive group_size, or -1 for whole rows; use the config.json that was published with these weights"
            )
        symmetric, act_order = flag(settings, "sym", True), flag(settings, "desc_act", False)
        return cls(bits, max(0, group), symmetric, act_order)


class GptqScheme(BesideScheme):
    """``"quant_method": "gptq"``.

    Args:
        layer: the settings of the layers that no rule names.
        less: what is added to a stored zero point.
        rules: (expression, settings) of ``dynamic``, the first that fits a layer's name; None: it is not quantized.
        planar: whether numbers are stored in planes of bits.
    """

    name = "gptq"

    def __init__(
        self, layer: Layer = Layer(), less: int = 1, rules: tuple[tuple[Any, Layer | None], ...] = (),
        planar: bool = False,
    ) -> None:  # fmt: skip
        self._less, self._rules, self._layer, self._planar = less, rules, layer, planar
        self.layer = cache(self._find)

    def detect(self, config: Mapping[str, Any]) -> bool:
        settings = config.get("quantization_config")
        if not isinstance(settings, Mapping) or settings.get("layout") == HALVES:
            return False
        return bool(settings.get("quant_method") == self.name)

    def configured(self, config: Mapping[str, Any], checkpoint: Checkpoint | None = None) -> QuantScheme:
        settings = config["quantization_config"]
        form = str(settings.get("checkpoint_format") or settings.get("format") or "gptq")
        if form not in _FORMATS or settings.get("is_marlin_format") or settings.get("pack_dtype", "int32") != "int32":
            raise CheckpointError(
                f"config.json's quantization_config has the checkpoint_format {form[:40]!r}"
                f"{', is_marlin_format' if settings.get('is_marlin_format') else ''}, pack_dtype "
                f"{str(settings.get('pack_dtype', 'int32'))[:40]!r}; {self.name} reads {' and '.join(_FORMATS)} in "
                "int32; use a checkpoint in one of them"
            )
        known = PLANES if form == _PLANAR else BITS
        layer, dynamic = Layer.of(settings, self.name, known), settings.get("dynamic") or {}
        if not isinstance(dynamic, Mapping) or len(dynamic) > 10_000:
            raise CheckpointError("config.json's quantization_config has a dynamic that is no map of rules; correct it")
        rules = []
        for text, changes in dynamic.items():
            pattern = expression(str(text).removeprefix("-:").removeprefix("+:"), "quantization_config.dynamic")
            changed = {} if str(text).startswith("-:") else {**settings, **_mapping(changes, text)}
            rules.append((pattern, Layer.of(changed, self.name, known) if changed else None))
        return GptqScheme(layer, _FORMATS[form], tuple(rules), form == _PLANAR)

    def _find(self, stem: str) -> Layer:
        found = next((layer for pattern, layer in self._rules if pattern.match(stem)), self._layer)
        if found is None:
            raise CheckpointError(
                f"{stem} is quantized, and quantization_config.dynamic in config.json says that it is not; use the "
                "config.json that was published with these weights"
            )
        return found

    def _unit(self, layer: Layer) -> int:
        """The least count of numbers that fills whole words."""
        return 32 if self._planar and len(PLANES[layer.bits]) > 1 else least_count(layer.bits)

    def tensors(self, name: str, headers: Headers) -> Mapping[str, str]:
        stem = name.removesuffix(".weight")
        if name == stem or f"{stem}.qweight" not in headers:
            return {"weight": name}
        roles = {role: f"{stem}.{role}" for role in ("qweight", "qzeros", "scales")}
        return {**roles, "g_idx": f"{stem}.g_idx"} if f"{stem}.g_idx" in headers else roles

    def part(self, name: str, headers: Headers) -> WeightPart | None:
        roles, stem = self.tensors(name, headers), name.removesuffix(".weight")
        if "qweight" not in roles:
            return super().part(name, headers)
        layer = self.layer(stem)
        absent = ("int32", ())
        (kind, words), (zero, zeros), (scale, scales) = (
            headers.get(roles[role], absent) for role in ("qweight", "qzeros", "scales")
        )
        rows = words[1] if len(words) == 2 else 0
        exact = per_word(layer.bits) * (words[0] if len(words) == 2 else 0)
        columns, unit = int(exact), self._unit(layer)
        group = 0 if layer.group >= columns else layer.group
        groups = -(-columns // group) if group else 1
        fits = (
            (kind, zero) == ("int32", "int32") and scale in PLAIN and rows > 0 and rows % unit == 0
            and columns > 0 and columns == exact and columns % unit == 0 and group % unit == 0
            and scales == (groups, rows) and zeros == (groups, rows * layer.bits // 32)
        )  # fmt: skip
        if not fits:
            raise CheckpointError(
                f"{stem} is stored as qweight {kind} {list(words)}, qzeros {zero} {list(zeros)} and scales {scale} "
                f"{list(scales)}, which are not those of {layer.bits} bits in groups of {layer.group or 'whole rows'}: "
                f"int32 [columns x {layer.bits} / 32, rows], int32 [groups, rows x {layer.bits} / 32] and [groups, "
                f"rows], rows, columns and groups in multiples of {unit}; use the config.json that was published with "
                "these weights"
            )
        index = headers[roles["g_idx"]] if "g_idx" in roles else None
        if index != ("int32", (columns,)) and (index is not None or layer.act_order):
            raise CheckpointError(
                f"{stem}.g_idx should be int32 [{columns}], the group of each column, as desc_act is true or it is "
                "there; fetch the files again"
            )
        form = integer_format(layer, columns, group, scale)
        cut = (1 if layer.symmetric else unit, lcm(unit, max(1, group)))
        return WeightPart(name, rows, columns, replace(form, cut=cut))

    def axes(self, part: WeightPart) -> Mapping[str, Axes]:
        layer, group = self.layer(part.name.removesuffix(".weight")), part.format.group
        groups, words = Along(0, group) if group and part.format.order == "row" else None, per_word(layer.bits)
        # The zero points of a symmetric layer are all equal: any rows can be cut, and the zero points stay whole.
        zeros = Axes() if layer.symmetric else Axes(Along(1, words), groups)
        return {
            "qweight": Axes(Along(1), Along(0, words)), "qzeros": zeros, "scales": Axes(Along(1), groups),
            "g_idx": Axes(None, Along(0)),
        }  # fmt: skip

    def arrange(self, part: WeightPart) -> WeightPart:
        if part.format.plain:
            return part
        layer, stored = self.layer(part.name.removesuffix(".weight")), part.tensors
        read = unpack_planes if self._planar else unpack
        numbers = read(stored["qweight"].T.contiguous(), layer.bits)
        # A zero point less one is stored as the largest number if it was 0.
        zeros = (read(stored["qzeros"], layer.bits).T + self._less) & ((1 << layer.bits) - 1)
        tensors = integer_tensors(part, layer, numbers, zeros, stored["scales"].T)
        if "g_idx" in stored:
            check_groups(part, stored["g_idx"])
            if part.format.order == "act":
                tensors["group_index"] = stored["g_idx"]
        return replace(part, tensors=tensors)

    def examples(self, name: str, seed: int) -> Iterator[tuple[Mapping[str, Any], Headers, Mapping[str, torch.Tensor]]]:
        import torch

        random, stem = torch.Generator().manual_seed(seed), name.removesuffix(".weight")
        for bits, group, symmetric, act_order, form in (
            (4, 32, True, False, "gptq"), (4, 64, False, False, "gptq_v2"), (4, 32, False, True, "gptq"),
            (8, 32, True, True, "gptq"), (8, -1, False, False, "gptq_v2"), (3, 32, False, False, "gptq"),
            (2, 64, True, True, "gptq_v2"), (3, 96, True, False, "gptq"), (5, 32, False, False, _PLANAR),
            (7, 64, False, True, _PLANAR), (6, -1, False, False, _PLANAR),
        ):  # fmt: skip
            rows, columns = 96, 192
            groups = columns // group if group > 0 else 1

            def words(*shape: int) -> torch.Tensor:
                return torch.randint(-(2**31), 2**31, shape, generator=random).int()

            middle = sum((1 << bits - 1) - _FORMATS[form] << bits * i for i in range(32)).to_bytes(4 * bits, "little")
            zeros = torch.frombuffer(bytearray(middle), dtype=torch.int32).repeat(groups, rows // 32)
            index = torch.arange(columns) // (columns // groups)
            index = index[torch.randperm(columns, generator=random)] if act_order else index
            tensors = {
                f"{stem}.qweight": words(columns * bits // 32, rows), f"{stem}.g_idx": index.int(),
                f"{stem}.qzeros": zeros if symmetric else words(groups, rows * bits // 32),
                # Weights stay below one: kernels that round activations are allowed an error for such weights.
                f"{stem}.scales": ((torch.rand(groups, rows, generator=random) + 1) / (4 << bits)).half(),
            }  # fmt: skip
            settings = {"bits": bits, "group_size": group, "sym": symmetric, "desc_act": act_order}
            config = {"quantization_config": {"quant_method": self.name, "checkpoint_format": form, **settings}}
            yield config, _headers(tensors), tensors
        yield config, {name: ("bfloat16", (6, 10))}, {name: torch.randn(6, 10, generator=random).bfloat16()}


def integer_format(layer: Layer, columns: int, group: int, scale: str) -> QuantFormat:
    """The format in which a weight of these settings is arranged."""
    storage, zeros = ("int8", "int8") if layer.bits > 4 else ("uint4", "uint8")
    act = layer.act_order and group > 0
    return QuantFormat(
        storage, group, scale=scale, zero=None if layer.symmetric else zeros, order="act" if act else "row",
        groups=-(-columns // group) if act else 0,
    )  # fmt: skip


def integer_tensors(
    part: WeightPart, layer: Layer, numbers: torch.Tensor, zeros: torch.Tensor, scales: torch.Tensor
) -> dict[str, torch.Tensor]:
    """Tensors of ``integer_format``.

    Args:
        numbers: unsigned, uint8 [rows, columns].
        zeros: the same kind of numbers, uint8 [rows, groups].
        scales: [rows, groups].

    Raises:
        CheckpointError: zero points differ from the middle although the config says that the weights are symmetric.
    """
    import torch

    middle = 1 << (layer.bits - 1)
    if layer.symmetric and bool((zeros != middle).any()):
        raise CheckpointError(
            f'the zero points of {part.name} are not all {middle}, and config.json says "sym": true; set "sym": false '
            "in its quantization_config"
        )
    if layer.bits > 4:
        # Fewer than eight are kept in eight.
        tensors = {"weight": (numbers - middle).view(torch.int8)}
        zeros = (zeros - middle).view(torch.int8)
    else:
        # Fewer bits are moved to the middle of four.
        tensors = {"weight": pairs(numbers + (8 - middle) if layer.symmetric else numbers)}
    tensors["scale"] = scales.contiguous()
    return tensors if layer.symmetric else {**tensors, "zero": zeros.contiguous()}


def check_groups(part: WeightPart, index: torch.Tensor) -> None:
    """
    Raises:
        CheckpointError: a column's group does not exist, or the groups are not those that the format says.
    """
    import torch

    form, columns = part.format, part.columns
    groups, whole = form.row_scales(columns), torch.arange(columns, device=index.device)
    least, most = int(index.min()), int(index.max())
    if form.order == "row":
        # A piece that was cut keeps the numbers of its groups.
        expected = whole // form.group if form.group else torch.zeros_like(whole)
        wrong = not torch.equal(index.long() - (least if form.group else 0), expected)
        advice = 'set "desc_act": true in config.json\'s quantization_config'
    else:
        wrong, advice = least < 0 or most >= groups, "fetch the files again"
        if not wrong and groups == -(-columns // form.group):
            full = torch.full((groups,), form.group)
            full[-1] = columns - (groups - 1) * form.group
            wrong = not torch.equal(torch.bincount(index.cpu(), minlength=groups), full)
    if wrong:
        raise CheckpointError(
            f"the groups of columns in g_idx of {part.name}, {least} to {most}, are not {groups} groups of "
            f"{form.group or columns}; {advice}"
        )


def _mapping(changes: Any, text: Any) -> Mapping[str, Any]:
    if isinstance(changes, Mapping):
        return changes
    raise CheckpointError(
        f"config.json's quantization_config.dynamic has {str(changes)[:40]!r} for {str(text)[:80]!r}, not a map of "
        "settings; correct the file"
    )


def _headers(tensors: Mapping[str, torch.Tensor]) -> Headers:
    return {name: (str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape)) for name, tensor in tensors.items()}
