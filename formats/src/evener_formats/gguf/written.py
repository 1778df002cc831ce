"""What a GGUF file says of a model: the inverse of ``families``, from the same tables. Torch-free but for the numbers.

llama.cpp's conventions: vectors (norms, biases) are float32; rows of q and k are in the order of interleaved rotary
pairs where the family says so; Gemma's norms have one added to their weights; Llama 3's rope scaling is a tensor of
divisors.
"""

from __future__ import annotations

import json
import re
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from evener.contracts.checkpoint import Headers
from evener.contracts.quant import BLOCKS
from evener.errors import ArchitectureError, CheckpointError, ConfigError
from evener_formats.gguf.expert_keys import expert_keys
from evener_formats.gguf.families import FAMILIES, Deepseek2, Gemma3, GptOss, Llama, Mixtral, llama3_divisor
from evener_formats.gguf.header import MAX_HEADER, MXFP4, TYPES

if TYPE_CHECKING:
    import torch

ALIGNMENT = 32
DIVISORS = "rope_freqs.weight"
#: llama.cpp's number of the format of most matrices (``LLAMA_FTYPE``), by ``quant`` or by a dtype.
_FILE_TYPES: Mapping[str, int] = {
    "float32": 0, "float16": 1, "bfloat16": 32, "q4_0": 2, "q4_1": 3, "q8_0": 7, "q5_0": 8, "q5_1": 9, "q2_k": 10,
    "q3_k": 12, "q4_k": 14, "q4_k_m": 15, "q5_k": 16, "q5_k_m": 17, "q6_k": 18, MXFP4: 38,
}  # fmt: skip
_NUMBERS: Mapping[str, int] = {name: number for number, (name, _, _) in TYPES.items()}


#: GGUF's name of a family, and what it calls keys and tensors, by the architecture of a folder.
_WRITTEN: Mapping[str, tuple[str, type[Llama]]] = {
    **{family.architecture: (name, family) for name, family in FAMILIES.items()},
    Mixtral.architecture: ("llama", Mixtral), "DeepseekV2ForCausalLM": ("deepseek2", Deepseek2),
}  # fmt: skip


def family_of(architecture: str) -> tuple[str, type[Llama]]:
    """GGUF's name of the family whose models are saved as ``architecture``, and the family.

    Raises:
        ArchitectureError: there is none.
    """
    if architecture not in _WRITTEN:
        raise ArchitectureError(
            f"a {architecture} cannot be written as GGUF; what can is {', '.join(sorted(_WRITTEN))}. Give the name of "
            "a folder to store it as safetensors"
        )
    return _WRITTEN[architecture]


def stored_name(family: type[Llama], name: str) -> str:
    """GGUF's name of the tensor that a model folder calls ``name``.

    Raises:
        ArchitectureError: the family has no such tensor in GGUF.
    """
    stem, dot, kind = name.rpartition(".")
    whole = re.fullmatch(r"model\.layers\.(\d+)\.(.+)", name)
    if whole and (other := next((short for short, long in family.others.items() if long == whole[2]), None)):
        return f"blk.{whole[1]}.{other}"
    layer = re.fullmatch(r"model\.layers\.(\d+)\.(.+)", stem)
    table = family.top if layer is None else family.names
    part = stem if layer is None else layer[2]
    stored = next((short for short, long in table.items() if long == part), None)
    if stored is None or kind not in ("weight", "bias"):
        raise ArchitectureError(
            f"the tensor {name[:120]!r} has no name in a GGUF file of a {family.model_type}; give the name of a folder "
            "to store the model as safetensors"
        )
    return f"{stored}{dot}{kind}" if layer is None else f"blk.{layer[1]}.{stored}{dot}{kind}"


def stored_header(stored: str, header: tuple[str, tuple[int, ...]]) -> tuple[str, tuple[int, ...]]:
    """Dtype and shape of a tensor in the file.

    Raises:
        ConfigError: GGUF has no such dtype.
    """
    dtype, shape = header
    if dtype not in ("float32", "float16", "bfloat16", *BLOCKS):
        raise ConfigError(
            f"{stored} would be {dtype}, which is not written to GGUF files; use an unquantized model, and one of "
            "quant=q8_0, q6_k, q5_k, q4_k, q4_k_m, or none"
        )
    return ("float32", shape) if len(shape) == 1 else (dtype, shape)


def stored_numbers(family: Llama, stored: str, values: torch.Tensor) -> torch.Tensor:
    """A tensor as the file has it.

    Args:
        family: made from the file's own header.
        stored: GGUF's name.
        values: as a model folder has it; of blocks, uint8 [rows, bytes of a row].
    """
    if heads := family.permuted_heads(stored):
        # A row is stored as whole blocks, so rows can be permuted without dequantizing.
        values = values.unflatten(0, (heads, 2, -1)).transpose(1, 2).reshape(values.shape).contiguous()
    if values.dim() == 1:
        values = values.float()
    name = family.name(stored)
    if family.norm_offset and name is not None and name.endswith("norm.weight"):
        values = values + family.norm_offset
    return values


def model_keys(name: str, family: type[Llama], config: Mapping[str, Any]) -> dict[str, Any]:
    """The keys of the family that GGUF calls ``name``, from ``config.json``, which its class has read.

    Raises:
        ArchitectureError: GGUF cannot express the model's rope scaling.
    """
    heads, hidden = config["num_attention_heads"], config["hidden_size"]
    dim = config.get("head_dim") or hidden // heads
    keys: dict[str, Any] = {
        "context_length": config["max_position_embeddings"], "embedding_length": hidden,
        "block_count": config["num_hidden_layers"], "feed_forward_length": config["intermediate_size"],
        "attention.head_count": heads, "attention.head_count_kv": config.get("num_key_value_heads") or heads,
        "attention.layer_norm_rms_epsilon": float(config["rms_norm_eps"]), "attention.key_length": dim,
        "attention.value_length": dim, "rope.dimension_count": dim, "vocab_size": config["vocab_size"],
    }  # fmt: skip
    settings, local = _rope(config)
    if settings.get("rope_theta") is not None:
        keys["rope.freq_base"] = float(settings["rope_theta"])
    kind = _scaling(settings)
    if kind in ("linear", "yarn"):
        keys |= {"rope.scaling.type": kind, "rope.scaling.factor": float(settings["factor"])}
        if settings.get("original_max_position_embeddings") is not None:
            keys["rope.scaling.original_context_length"] = settings["original_max_position_embeddings"]
        if issubclass(family, GptOss):
            keys |= {f"rope.scaling.yarn_{k}": float(settings[k]) for k in ("beta_fast", "beta_slow") if k in settings}
        if issubclass(family, Deepseek2) and settings.get("mscale_all_dim") is not None:
            # The file has a tenth of it.
            keys["rope.scaling.yarn_log_multiplier"] = 0.1 * settings["mscale_all_dim"]
    elif kind not in ("default", "llama3"):
        raise ArchitectureError(
            f"the model's rope_type is {kind[:80]!r}, and GGUF has default, linear, yarn and llama3; give the name of "
            "a folder to store it as safetensors"
        )
    if issubclass(family, Gemma3):
        if type(config.get("sliding_window")) is not int:
            raise ArchitectureError(
                "a Gemma 3 without sliding_window cannot be written as GGUF; give the name of a folder to store it as "
                "safetensors"
            )
        keys["attention.sliding_window"] = config["sliding_window"]
        keys["attention.sliding_window_pattern"] = _pattern(config)
        if local.get("rope_theta") is not None:
            keys["rope.freq_base_swa"] = float(local["rope_theta"])
        if config.get("final_logit_softcapping") is not None:
            keys["final_logit_softcapping"] = float(config["final_logit_softcapping"])
    return {f"{name}.{key}": value for key, value in (keys | expert_keys(family, config)).items()}


def divisors(config: Mapping[str, Any]) -> list[float]:
    """Llama 3's divisors of the rotary frequencies; empty if the model has another scaling, or none."""
    settings, _ = _rope(config)
    if _scaling(settings) != "llama3":
        return []
    dim = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
    theta = settings["rope_theta"] if settings.get("rope_theta") is not None else 10000.0
    return [llama3_divisor(theta, i / (dim // 2), settings) for i in range(dim // 2)]


def general_keys(name: str, quant: str, tensors: Headers, origin: Mapping[str, Any]) -> dict[str, Any]:
    """Keys of every family: the model's name, its file type, and what it was made from."""
    held: dict[str, int] = {}
    for dtype, shape in tensors.values():
        held[dtype] = held.get(dtype, 0) + _nbytes(dtype, shape)
    most = MXFP4 if MXFP4 in held else max(held, key=lambda dtype: held[dtype])
    return {
        "general.type": "model", "general.name": name, "general.file_type": _FILE_TYPES[
            quant if quant in _FILE_TYPES else most],
        "general.quantization_version": 2, "evener.convert": json.dumps(origin, sort_keys=True),
    }  # fmt: skip


def header_bytes(family: str, keys: Mapping[str, Any], tensors: Headers) -> bytes:
    """The file's bytes before the first tensor.

    Args:
        family: GGUF's name of it.
        keys: with their values: bool, int (stored as uint32), float (float32), str, and lists of one of the last
            three; ints of a list are stored as int32.
        tensors: dtype or block format, and shape in elements, in the order in which their bytes follow, each at a
            multiple of ``ALIGNMENT``.

    Raises:
        CheckpointError: a number does not fit, or the header is larger than readers accept.
    """
    import numpy as np
    from gguf import GGMLQuantizationType, GGUFWriter

    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "header"
        writer = GGUFWriter(path, family)
        for key, value in keys.items():
            _add(writer, key, value)
        for name, (dtype, shape) in tensors.items():
            kind = GGMLQuantizationType(_NUMBERS[dtype])
            writer.add_tensor_info(name, shape, np.dtype(np.float32), _nbytes(dtype, shape), kind)
        try:
            writer.write_header_to_file()
            writer.write_kv_data_to_file()
            writer.write_ti_data_to_file()
        except (UnicodeEncodeError, OverflowError) as error:
            raise CheckpointError(
                f"a text or number of the model's files cannot be stored in a GGUF file ({error}); fetch them again"
            ) from error
        finally:
            writer.close()
        found = path.read_bytes()
    if len(found) > MAX_HEADER:
        raise CheckpointError(
            f"the header of the GGUF file would have {len(found):,} bytes, and readers accept {MAX_HEADER:,}; the "
            "model's tokenizer is too large"
        )
    return found + bytes(-len(found) % ALIGNMENT)


def _add(writer: Any, key: str, value: Any) -> None:
    if isinstance(value, bool):
        writer.add_bool(key, value)
    elif isinstance(value, int):
        if not 0 <= value < 1 << 32:
            raise CheckpointError(f"{key} would be {value}, which a GGUF file cannot store; correct config.json")
        writer.add_uint32(key, value)
    elif isinstance(value, float):
        if not abs(value) < 3e38:
            raise CheckpointError(f"{key} would be {value}, which a GGUF file cannot store; correct the model's files")
        writer.add_float32(key, value)
    elif isinstance(value, str):
        writer.add_string(key, value)
    else:
        writer.add_array(key, value)


def write_draft(path: Path, header: bytes, tensors: Headers, first: bytes) -> None:
    """Write the file with zeros for numbers to ``path``, where it takes almost no room on the disk, whatever its
    length. ``first``: what is written of the first tensor."""
    with path.open("wb") as file:
        file.write(header + first)
        sizes = [_nbytes(dtype, shape) for dtype, shape in tensors.values()]
        file.truncate(len(header) + sum(-(-size // ALIGNMENT) * ALIGNMENT for size in sizes))


def _nbytes(dtype: str, shape: tuple[int, ...]) -> int:
    _, elements, nbytes = TYPES[_NUMBERS[dtype]]
    count = 1
    for extent in shape:
        count *= extent
    return count // elements * nbytes


def _rope(config: Mapping[str, Any]) -> tuple[Mapping[str, Any], Mapping[str, Any]]:
    """Theta and scaling in either spelling: of layers with full attention, and of those with a window."""
    new = config.get("rope_parameters") or {}
    if any(isinstance(value, Mapping) for value in new.values()):
        return new.get("full_attention") or {}, new.get("sliding_attention") or {}
    local = {"rope_theta": config.get("rope_local_base_freq")}
    theta = {"rope_theta": config.get("rope_theta")}
    if new:
        return (new if new.get("rope_theta") is not None else {**new, **theta}), local
    return {**theta, **(config.get("rope_scaling") or {})}, local


def _scaling(settings: Mapping[str, Any]) -> str:
    return str(settings.get("rope_type", settings.get("type", "default")))


def _pattern(config: Mapping[str, Any]) -> int:
    """Which layers of Gemma 3 have full attention: every so many-th."""
    kinds = config.get("layer_types")
    if kinds:
        return int([*kinds, "full_attention"].index("full_attention")) + 1
    said = config.get("sliding_window_pattern")
    return int(config["_sliding_window_pattern"] if said is None else said)
