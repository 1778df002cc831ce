"""The tensors that a quantized checkpoint has for a weight, from its ``quantization_config`` alone: for ``load=dummy``,
and to explain a model of which only ``config.json`` is there. Torch-free."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from fnmatch import fnmatchcase
from typing import Any

from evener.contracts.checkpoint import Headers
from evener.contracts.quant import QuantScheme
from evener.errors import CheckpointError
from evener_formats.gptq import HALVES
from evener_formats.rules import expression, number, texts

#: Keys that name the layers that are stored plain.
_EXCEPTIONS = ("ignore", "modules_to_not_convert", "exclude_modules", "ignored_layers")
_FLOAT8 = "float8_e4m3fn"
#: Formats of floats with powers of two, and the bits of a number.
_MICROSCALED = {"mxfp4-pack-quantized": 4, "mxfp6-pack-quantized": 6, "mxfp8-quantized": 8}
#: What reads a norm, and nothing else.
_AFTER_NORMS = ("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj")
_Sizes = tuple[str, int, int]


def described(
    scheme: QuantScheme, settings: Mapping[str, Any], name: str, rows: int, columns: int, *, experts: int = 0,
    dtype: str = "bfloat16", head: bool = False,
) -> Headers:  # fmt: skip
    """Headers of the tensors of a weight [rows, columns], as the tools of its method write them: as a rule they leave
    the head plain, and a weight whose sizes their groups do not divide.

    Args:
        scheme: configured for ``settings``, the ``quantization_config``.
        name: of the weight in the checkpoint.
        experts: number of matrices in one tensor; 0: it is one matrix.
        head: whether it is the model's head.

    Raises:
        CheckpointError: the method stores what this module does not know.
    """
    method = HALVES if settings.get("layout") == HALVES else str(settings.get("quant_method"))
    if method not in _WRITERS:
        raise CheckpointError(
            f"this folder has no weights, and load=dummy makes none in the format {method[:40]!r} (known: "
            f"{', '.join(sorted(_WRITERS))}); use load=auto with a folder that has weights, or a config.json without "
            "quantization_config"
        )
    stem, stack = name.removesuffix(".weight"), (experts,) if experts else ()
    plain: Headers = {name: (dtype, (*stack, rows, columns))}
    if (head and not settings.get("lm_head")) or _is_excepted(stem, settings):
        return plain
    found = _WRITERS[method](settings, (name, rows, columns), bool(experts))
    if found is None:
        return plain
    stacked = {each: (kind, (*stack, *shape)) for each, (kind, shape) in found.items()}
    try:
        part = scheme.part(name, stacked)
    except CheckpointError:
        part = None
    return plain if part is None or (part.rows, part.columns) != (rows, columns) else stacked


def _is_excepted(stem: str, settings: Mapping[str, Any]) -> bool:
    for key in _EXCEPTIONS:
        for text in texts(settings, key):
            if text.startswith("re:"):
                if expression(text[3:], f"quantization_config.{key}").match(stem):
                    return True
            elif fnmatchcase(stem, text) or f".{text}." in f".{stem}.":
                return True
    dynamic = settings.get("dynamic")
    rules: Iterable[Any] = dynamic if isinstance(dynamic, Mapping) else ()
    left = [expression(str(each)[2:], "quantization_config.dynamic") for each in rules if str(each).startswith("-:")]
    return any(each.match(stem) for each in left)


def _fp8(settings: Mapping[str, Any], weight: _Sizes, stacked: bool) -> Headers:
    name, rows, columns = weight
    block = settings.get("weight_block_size")
    fixed = settings.get("activation_scheme") == "static"
    if settings.get("quant_method") == "fbgemm_fp8":
        scale: Headers = {f"{name}_scale": ("float32", (rows, 1))}
    elif sizes := _sizes(block):
        scale = {f"{name}_scale_inv": ("float32", (-(-rows // sizes[0]), -(-columns // sizes[1])))}
    else:
        scale = {f"{name}_scale": ("float32", ())}
    return {name: (_FLOAT8, (rows, columns)), **scale, **_input_scale(name, fixed)}


def _input_scale(name: str, fixed: bool, shape: tuple[int, ...] = ()) -> Headers:
    return {f"{name.removesuffix('.weight')}.input_scale": ("float32", shape)} if fixed else {}


def _gptq(settings: Mapping[str, Any], weight: _Sizes, stacked: bool) -> Headers | None:
    (name, rows, columns), bits = weight, int(settings["bits"])
    groups, stem = _groups(settings.get("group_size", 128), columns), name.removesuffix(".weight")
    return {
        f"{stem}.qweight": ("int32", (columns * bits // 32, rows)), f"{stem}.scales": ("float16", (groups, rows)),
        f"{stem}.qzeros": ("int32", (groups, rows * bits // 32)), f"{stem}.g_idx": ("int32", (columns,)),
    }  # fmt: skip


def _awq(settings: Mapping[str, Any], weight: _Sizes, stacked: bool) -> Headers | None:
    name, rows, columns = weight
    groups = _groups(settings.get("group_size", settings.get("q_group_size", 128)), columns)
    stem = name.removesuffix(".weight")
    return {
        f"{stem}.qweight": ("int32", (columns, rows // 8)), f"{stem}.scales": ("float16", (groups, rows)),
        f"{stem}.qzeros": ("int32", (groups, rows // 8)),
    }  # fmt: skip


def _halves(settings: Mapping[str, Any], weight: _Sizes, stacked: bool) -> Headers | None:
    name, rows, columns = weight
    scales = ("float16", (_groups(settings.get("group_size", 128), columns), rows))
    stem, width = name.removesuffix(".weight"), -(-columns // 128) * 64
    if settings.get("bits") == 8 or settings.get("quant_method") == "w8a16":
        return {f"{stem}.qweight": ("int8", (rows, columns)), f"{stem}.scales": scales}
    return {f"{stem}.qweight": ("uint8", (rows, width)), f"{stem}.qzeros": scales, f"{stem}.scales": scales}


def _w4afp8(settings: Mapping[str, Any], weight: _Sizes, stacked: bool) -> Headers:
    name, rows, columns = weight
    if ".experts." not in name:
        return _fp8({"weight_block_size": [128, 128]}, weight, stacked)
    groups = _groups(settings.get("group_size", 128), columns)
    return {name: ("int8", (rows, columns // 2)), f"{name}_scale_inv": ("float32", (rows, groups))}


def _groups(size: Any, columns: int) -> int:
    """Groups of a row; a ``size`` that is no number of columns is refused when the config is read."""
    return -(-columns // size) if isinstance(size, int) and 0 < size < columns else 1


def _compressed(settings: Mapping[str, Any], weight: _Sizes, stacked: bool) -> Headers | None:
    name, rows, columns = weight
    group = _group_of(settings, name.removesuffix(".weight"))
    if group is None:
        return None
    weights = group.get("weights")
    weights = weights if isinstance(weights, Mapping) else {}
    form = str(group.get("format") or settings.get("format"))
    strategy, bits = weights.get("strategy"), number(weights, ("num_bits",)) or 8
    groups = _groups(weights.get("group_size"), columns) if strategy == "group" else 1
    if form == "nvfp4-pack-quantized":
        return _nvfp4(name, rows, columns, "_packed", "_global_scale")
    if form in _MICROSCALED:
        packed = {name: (_FLOAT8, (rows, columns))} if form == "mxfp8-quantized" else {
            f"{name}_packed": ("uint8", (rows, columns * _MICROSCALED[form] // 8))
        }  # fmt: skip
        return {**packed, f"{name}_scale": ("uint8", (rows, columns // 32))}
    symmetric = weights.get("symmetric", True)
    if form == "pack-quantized":
        found: dict[str, tuple[str, tuple[int, ...]]] = {
            f"{name}_packed": ("int32", (rows, columns * bits // 32)), f"{name}_scale": ("bfloat16", (rows, groups)),
            f"{name}_shape": ("int64", (2,)),
        }  # fmt: skip
        if not symmetric:
            found[f"{name}_zero_point"] = ("int32", (-(-rows * bits // 32), groups))
        if weights.get("actorder") in (True, "group", "dynamic"):
            found[f"{name}_g_idx"] = ("int32", (columns,))
        return found
    block = weights.get("block_structure") if strategy == "block" else None
    high, wide = _sizes(block) or (1, 1)
    scales = {
        "block": (-(-rows // high), -(-columns // wide)), "tensor": (1,), "channel": (rows, 1),
    }.get(str(strategy), (rows, groups))  # fmt: skip
    how = group.get("input_activations")
    fixed = isinstance(how, Mapping) and not how.get("dynamic", False)
    more = {} if symmetric else {f"{name}_zero_point": ("int8", scales)}
    stored = "int8" if weights.get("type", "int") == "int" else _FLOAT8
    return {
        name: (stored, (rows, columns)), f"{name}_scale": ("bfloat16", scales), **more,
        **_input_scale(name, fixed, (1,)),
    }  # fmt: skip


def _sizes(block: Any) -> tuple[int, int] | None:
    """Rows and columns of a block; None if the config has no such pair."""
    if isinstance(block, list) and len(block) == 2 and all(isinstance(n, int) and n > 0 for n in block):
        return block[0], block[1]
    return None


def _group_of(settings: Mapping[str, Any], stem: str) -> Mapping[str, Any] | None:
    """The ``config_group`` of a layer: of those that name it exactly, by an expression, or by its class, the first."""
    named: list[tuple[int, Mapping[str, Any]]] = []
    for group in (settings.get("config_groups") or {}).values():
        targets = group.get("targets")
        for target in map(str, targets if isinstance(targets, list) else ["Linear"]):
            if target.startswith("re:"):
                rank = 1 if re.match(expression(target[3:], "quantization_config.config_groups"), stem) else None
            else:
                rank = 2 if "." not in target else 0 if target == stem else None
            named += [] if rank is None else [(rank, group)]
    return min(named, key=lambda each: each[0])[1] if named else None


def _nvfp4(name: str, rows: int, columns: int, weight: str, whole: str) -> Headers:
    return {
        name + weight: ("uint8", (rows, columns // 2)), f"{name}_scale": (_FLOAT8, (rows, columns // 16)),
        name + whole: ("float32", (1,)),
    }  # fmt: skip


def _modelopt(settings: Mapping[str, Any], weight: _Sizes, stacked: bool) -> Headers | None:
    name, rows, columns = weight
    inner = settings.get("quantization")
    named = inner if isinstance(inner, Mapping) else settings
    if _is_excepted(name.removesuffix(".weight"), named):
        return None
    algorithm = str(named.get("quant_algo")).upper()
    if "NVFP4" in algorithm:
        return _nvfp4(name, rows, columns, "", "_scale_2")
    if algorithm.startswith("MX"):
        stored = (_FLOAT8, (rows, columns)) if algorithm == "MXFP8" else ("uint8", (rows, columns // 2))
        return {name: stored, f"{name}_scale": ("uint8", (rows, columns // 32))}
    if algorithm in ("W4A16_AWQ", "W4A8_AWQ"):
        group = number(named, ("group_size",), 128) or 128
        return {
            name: ("uint8", (rows // 2, columns)), f"{name}_scale": ("float32", (rows, _groups(group, columns))),
            **_factors(name, columns, algorithm),
        }  # fmt: skip
    if algorithm in ("W8A16", "W8A8_SQ_PER_CHANNEL"):
        smooth = algorithm != "W8A16"
        more = {**_input_scale(name, True), **_factors(name, columns, algorithm)} if smooth else {}
        return {name: ("int8", (rows, columns)), f"{name}_scale": ("float32", (rows,)), **more}
    if algorithm == "FP8_PER_CHANNEL_PER_TOKEN":
        return {name: (_FLOAT8, (rows, columns)), f"{name}_scale": ("float32", (rows,))}
    if algorithm == "FP8_PB_WO":
        blocks = (-(-rows // 128), 1, -(-columns // 128), 1)
        return {name: (_FLOAT8, (rows, columns)), f"{name}_scale": ("float32", blocks)}
    return {name: (_FLOAT8, (rows, columns)), f"{name}_scale": ("float32", ()), **_input_scale(name, True)}


def _factors(name: str, columns: int, algorithm: str) -> Headers:
    """``pre_quant_scale``. With AWQ the tool moves it into the norm before, if nothing else reads this norm; a router
    reads that of experts."""
    stem = name.removesuffix(".weight")
    moved = "AWQ" in algorithm and ".experts." not in stem and stem.endswith(_AFTER_NORMS)
    return {} if moved else {f"{stem}.pre_quant_scale": ("bfloat16", (columns,))}


def _mxfp4(settings: Mapping[str, Any], weight: _Sizes, stacked: bool) -> Headers | None:
    name, rows, columns = weight
    blocks = columns // 32
    if not stacked:
        return None
    return {f"{name}_blocks": ("uint8", (rows, blocks, 16)), f"{name}_scales": ("uint8", (rows, blocks))}


_WRITERS = {
    "fp8": _fp8, "fbgemm_fp8": _fp8, "gptq": _gptq, "awq": _awq, HALVES: _halves, "compressed-tensors": _compressed,
    "modelopt": _modelopt, "modelopt_fp4": _modelopt, "mxfp4": _mxfp4, "w4afp8": _w4afp8,
}  # fmt: skip
