"""What a checkpoint says about its KV cache: the element type, scales stored as tensors, and which model it is.
Torch-free; reading a scale imports torch.

Names of scales follow the attention layer's own name. They are those of compressed-tensors and llm-compressor
(``k_scale``, before that ``k_proj.output_scale``), of ModelOpt (``k_proj.k_scale``), of Quark and vLLM
(``attn.k_scale``), and one for both (``kv_scale``).
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from evener.contracts.checkpoint import Checkpoint, Headers
from evener.errors import CheckpointError
from evener_formats.kv_cache.scales import Scales, Shares, check_scale

_KEY, _VALUE = (
    (f"{part}_scale", f"attn.{part}_scale", f"{part}_proj.{part}_scale", f"{part}_proj.output_scale") for part in "kv"
)
_BOTH = ("kv_scale",)
#: Zero points, which must be 0: the stored values are symmetric.
_ZEROS = tuple(f"{part}{end}" for part in "kv" for end in ("_zero_point", "_proj.output_zero_point"))
#: How queries and probabilities are rounded for products in eight bits; here they are not.
_UNUSED = tuple(f"{where}{what}_scale" for what in ("q", "prob") for where in ("", "attn."))
_UNUSED += ("q_proj.output_scale", "q_proj.output_zero_point", "q_zero_point")
_METHODS = ("quantization_config", "compression_config")
#: What does not say which model it is: how its numbers are stored, and who saved it.
_INCIDENTAL = {*_METHODS, "torch_dtype", "dtype", "transformers_version", "_name_or_path", "architectures", "use_cache"}


def stored_element_type(config: Mapping[str, Any]) -> tuple[str | None, str]:
    """The element type of the KV cache that ``config.json`` asks for, and how it says so; None if it asks for none."""
    settings: Mapping[str, Any] = next((config[key] for key in _METHODS if isinstance(config.get(key), Mapping)), {})
    scheme, algorithm = settings.get("kv_cache_scheme"), settings.get("kv_cache_quant_algo")
    if isinstance(scheme, Mapping):
        kind = scheme.get("type"), scheme.get("num_bits")
        dtype = {("float", 8): "float8_e4m3fn", ("int", 8): "int8"}.get(kind)  # type: ignore[arg-type]
        return dtype, f"kv_cache_scheme of {str(kind[1])[:8]} bits of {str(kind[0])[:8]}"
    if scheme is not None:  # Model Optimizer names an algorithm here too
        algorithm = str(scheme)
    if algorithm is not None:
        algorithm = str(algorithm)
        return {"FP8": "float8_e4m3fn", "INT8": "int8"}.get(algorithm), f"kv_cache_quant_algo {algorithm[:16]}"
    return None, ""


def scale_tensors(layer: str, headers: Headers) -> Iterator[str]:
    """Names of the checkpoint's tensors that belong to the state of ``layer``."""
    for name in (*_KEY, *_VALUE, *_BOTH, *_ZEROS, *_UNUSED):
        if f"{layer}.{name}" in headers:
            yield f"{layer}.{name}"


def stored_scales(checkpoint: Checkpoint, layers: Mapping[int, str], dtype: str) -> Scales | None:
    """The scales in the checkpoint's tensors; None if it has none.

    Args:
        layers: names of attention layers by their numbers.
        dtype: the element type that they were made for.

    Raises:
        CheckpointError: some layers have none, only keys or values have one, or one cannot be used.
    """
    found = {number: _of_layer(checkpoint, name) for number, name in layers.items()}
    have = {number: pair for number, pair in found.items() if pair is not None}
    if not have:
        return None
    if missing := [layers[number] for number in found if number not in have]:
        raise CheckpointError(
            f"{checkpoint.path} has scales of the KV cache for {len(have)} layers, but none for {missing[0]}; fetch "
            "the files again, or give a file: infer.kv_scales=FILE"
        )
    return Scales(dtype, have, f"{checkpoint.path} (tensors of the checkpoint)")


def _of_layer(checkpoint: Checkpoint, layer: str) -> tuple[Shares, Shares] | None:
    for end in _ZEROS:
        if f"{layer}.{end}" in checkpoint.headers and any(_numbers(checkpoint, f"{layer}.{end}")):
            raise CheckpointError(f"{layer}.{end} is not 0, but state is stored without zero points; make scales with "
                                  "`evener calibrate`, and name them: infer.kv_scales=FILE")  # fmt: skip
    pair = [_first(checkpoint, layer, names + _BOTH) for names in (_KEY, _VALUE)]
    if (pair[0] is None) != (pair[1] is None):
        raise CheckpointError(f"{layer} has a scale of its {'values' if pair[0] is None else 'keys'} only; fetch the "
                              "files again, or give a file: infer.kv_scales=FILE")  # fmt: skip
    return None if pair[0] is None or pair[1] is None else (pair[0], pair[1])


def _first(checkpoint: Checkpoint, layer: str, names: Sequence[str]) -> Shares | None:
    name = next((f"{layer}.{name}" for name in names if f"{layer}.{name}" in checkpoint.headers), None)
    if name is None:
        return None
    values = tuple(check_scale(value, name) for value in _numbers(checkpoint, name))
    return Shares(values, per_head=len(values) > 1)


def _numbers(checkpoint: Checkpoint, name: str) -> list[float]:
    shape = checkpoint.headers[name][1]
    if sum(size > 1 for size in shape) > 1 or any(not 0 < size <= 4096 for size in shape):
        raise CheckpointError(f"{name} has the shape {list(shape)}; a scale of the KV cache is one number, or one for "
                              "each head; fetch the files again")  # fmt: skip
    return [float(value) for value in checkpoint.tensor(name).flatten().float().tolist()]


def model_fingerprint(config: Mapping[str, Any]) -> str:
    """Which model a ``config.json`` describes, however its weights are stored."""
    telling = {key: value for key, value in config.items() if key not in _INCIDENTAL}
    return hashlib.sha256(json.dumps(telling, sort_keys=True, default=str).encode()).hexdigest()[:32]
