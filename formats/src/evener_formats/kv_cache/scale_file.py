"""``kv_cache_scales.json``: scales of keys and values, for each rank and layer. Torch-free.

::

    {"model_type": "llama",
     "kv_cache": {"dtype": "float8_e4m3fn",
                  "scaling_factor": {"0": {"0": 0.031, "1": 0.027}},
                  "key_scaling_factor": {"0": {"0": [0.031, 0.022], "1": 0.027}},
                  "value_scaling_factor": {"0": {"0": 0.011, "1": 0.009}}},
     "fingerprint": "…"}

Outer names are ranks, inner ones layers. ``scaling_factor`` alone, one number for keys and values, is the form that
vLLM and KsanaLLM read. The two after it are apart and may have one number for each head; where they are given they are
used. ``fingerprint`` (optional) is that of the model; scales of another model are refused.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from evener.errors import CheckpointError
from evener_formats.kv_cache.scales import LARGEST, Scales, Shares, check_scale

#: The name of the file in a model's folder.
FILE_NAME = "kv_cache_scales.json"
#: Bytes of the longest file that is read: 1,000 layers of 100 heads on 4 ranks have a third of that.
MAX_BYTES = 32_000_000
_MOST_RANKS, _MOST_LAYERS, _MOST_HEADS = 4096, 10_000, 4096
_APART = ("key_scaling_factor", "value_scaling_factor")


def read_scale_file(path: Path) -> Scales:
    """The scales in the file ``path``.

    Raises:
        CheckpointError: there is no such file, or it holds no such scales.
    """
    try:
        if path.exists() and not path.is_file():  # reading a pipe or a device may wait for ever
            raise CheckpointError(f"infer.kv_scales={path} is not a regular file; `evener calibrate` makes one")
        if path.exists() and (size := os.stat(path).st_size) > MAX_BYTES:
            raise CheckpointError(f"{path} has {size:,} bytes, which is no file of scales ({MAX_BYTES:,} at most)")
        text = path.read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        raise CheckpointError(f"cannot read infer.kv_scales={path}: {error}; `evener calibrate` makes it") from error
    return parse_scales(text, str(path))


def parse_scales(text: str, where: str) -> Scales:
    """The scales in the text of a file that messages call ``where``.

    Raises:
        CheckpointError: it is too long, or holds no such scales; the message names the rank and layer.
    """
    try:
        found = json.loads(text) if len(text) <= MAX_BYTES else None
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{where} is not valid JSON ({error or type(error).__name__}); make it again with "
                              "`evener calibrate`") from error  # fmt: skip
    cache = found.get("kv_cache") if isinstance(found, dict) else None
    if not isinstance(found, dict) or not isinstance(cache, dict):
        raise _wrong(where, "has no object kv_cache")
    dtype = cache.get("dtype", "float8_e4m3fn")
    if dtype not in LARGEST:
        raise _wrong(where, f"is for {str(dtype)[:40]!r}, not for one of {', '.join(LARGEST)}")
    if ("scaling_factor" not in cache and not all(name in cache for name in _APART)) or (
        sum(name in cache for name in _APART) == 1
    ):
        raise _wrong(where, f"has neither scaling_factor nor both of {' and '.join(_APART)} in kv_cache")
    names = _APART if _APART[0] in cache else ("scaling_factor", "scaling_factor")
    keys, values = (_shares(cache[name], f"{where}: {name}") for name in names)
    if keys.keys() != values.keys():
        raise _wrong(where, f"has {len(keys)} layers of keys and {len(values)} of values, not the same layers")
    fingerprint = found.get("fingerprint", "")
    if not isinstance(fingerprint, str):
        raise _wrong(where, "has a fingerprint that is no text")
    return Scales(dtype, {layer: (keys[layer], values[layer]) for layer in keys}, where, fingerprint)


def format_scales(scales: Scales, model_type: str) -> str:
    """The text of a file of one rank; ``parse_scales`` gives equal scales."""

    def table(of: Any) -> Mapping[str, Mapping[str, Any]]:
        return {"0": {str(number): of(*pair) for number, pair in sorted(scales.layers.items())}}

    def written(shares: Shares) -> float | list[float]:
        return list(shares.values) if shares.per_head else shares.values[0]

    cache = {
        "dtype": scales.dtype,
        "scaling_factor": table(lambda key, value: max(*key.values, *value.values)),
        "key_scaling_factor": table(lambda key, value: written(key)),
        "value_scaling_factor": table(lambda key, value: written(value)),
    }
    return json.dumps({"model_type": model_type, "kv_cache": cache, "fingerprint": scales.fingerprint}, indent=1) + "\n"


def _shares(table: object, where: str) -> dict[int, Shares]:
    """Each layer's scales, of all ranks."""
    ranks = _numbered(table, where, "ranks", _MOST_RANKS)
    if sorted(ranks) != list(range(len(ranks))):
        raise _wrong(where, "does not have ranks 0, 1, … without a gap")
    by_rank = [_numbered(ranks[rank], f"{where} of rank {rank}", "layers", _MOST_LAYERS) for rank in sorted(ranks)]
    if any(layers.keys() != by_rank[0].keys() for layers in by_rank):
        raise _wrong(where, "does not have the same layers on each rank")
    found: dict[int, Shares] = {}
    for layer in by_rank[0]:
        given = [layers[layer] for layers in by_rank]
        lists = [isinstance(each, list) for each in given]
        if any(lists) and (not all(lists) or len({len(each) for each in given}) > 1):
            raise _wrong(where, f"does not have equally many heads of layer {layer} on each rank")
        values = [value for each in given for value in (each if isinstance(each, list) else [each])]
        if not 0 < len(values) <= _MOST_HEADS:
            raise _wrong(where, f"has {len(values)} scales of layer {layer}")
        found[layer] = Shares(tuple(check_scale(v, f"{where}: a scale of layer {layer}") for v in values), any(lists))
    return found


def _numbered(table: object, where: str, what: str, most: int) -> dict[int, Any]:
    if not isinstance(table, dict) or not 0 < len(table) <= most:
        raise _wrong(where, f"is no object of 1 to {most} {what}")
    if not all(name.isascii() and name.isdecimal() and len(name) < 6 and str(int(name)) == name for name in table):
        raise _wrong(where, f"has {what} that are not numbered 0, 1, …")
    return {int(name): each for name, each in table.items()}


def _wrong(where: str, what: str) -> CheckpointError:
    return CheckpointError(f"{where} {what}; make the file again with `evener calibrate`, or leave it out")
