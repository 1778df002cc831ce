"""Model folders that nobody should publish, made from those that somebody would. A seed always gives the same ones."""

from __future__ import annotations

import copy
import json
import random
import struct
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save

from evener.contracts.architecture import Architecture
from evener.contracts.declared import LinearWeight, StackedWeight, Weight
from evener.layers import Builder
from evener_conformance.naive.model import find_architecture
from evener_conformance.tiny_tokenizer import write_tiny_tokenizer
from evener_models import descriptor

Files = dict[str, bytes]

#: Values for any key of a JSON file.
VALUES: tuple[Any, ...] = (
    None, True, False, 0, 1, -1, 2, 3, 5, 7, 16, 64, 1000, 4096, 65536, 2**20, 2**24, 2**24 + 1, 2**31, -(2**31), 2**63,
    2**64, 10**30, 0.5, 0.25, -0.5, 0.1, 1.5, 2.0, 1e-300, 1e-8, 1e8, 1e38, 1e300, -1e300, float("nan"), float("inf"),
    float("-inf"), "", "a", "1", "\u0000", "\ud800", "x" * 3000, [], [0], [1, 2], [None], ["a"], [[]], [1.0] * 5,
    ["full_attention"] * 3, ["sliding_attention"] * 4, ["full_attention", 7, None], [1e300] * 5, [float("nan")] * 5,
    {}, {"a": 1}, {"": None}, {"type": "linear"}, {"rope_type": "yarn", "factor": 0}, [[[[[[]]]]]],
)  # fmt: skip
#: Keys that some model's ``config.json`` has, with a value that somewhere is valid.
KEYS: Mapping[str, Sequence[Any]] = {
    "partial_rotary_factor": (0.5, 1, 2, 1000, 0.01, 0.3),
    "rope_theta": (10000, 1, 1.0000001, 0, -1, 1e-5, float("nan"), float("inf")),
    "rope_scaling": (
        {"type": "linear", "factor": 2}, {"type": "dynamic", "factor": 4}, {"type": "dynamic", "alpha": 1e9},
        {"type": "yarn", "factor": 4, "original_max_position_embeddings": 32, "beta_fast": 32, "mscale": 1,
         "mscale_all_dim": 0.5, "attention_factor": 1.0, "truncate": False},
        {"rope_type": "llama3", "factor": 8, "low_freq_factor": 1, "high_freq_factor": 4,
         "original_max_position_embeddings": 32},
        {"type": "longrope", "short_factor": [1.0] * 5, "long_factor": [2.0] * 5,
         "original_max_position_embeddings": 16}, "linear", 3, [], {"type": ["linear"]}, {"type": None},
    ),
    "rope_parameters": (
        {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5},
        {"full_attention": {"rope_theta": 1e4}, "sliding_attention": 3}, {"full_attention": None}, "default",
    ),
    "head_dim": (2, 6, 7, 16, 32, 1024, 1040), "index_head_dim": (2, 6, 16), "index_topk": (0, 1), "qk_rope_head_dim":
    (2, 7, 16), "rotary_pct": (0.5, 2, 0.2), "rotary_emb_base": (0, 2, 1e9), "kv_channels": (2, 7, 16), "rope_ratio":
    (0, -1, 2, "a"), "num_key_value_heads": (1, 2, 3, 0, "a"), "num_attention_heads": (1, 2, 3, 6),
    "sliding_window": (1, 4, 0), "use_sliding_window": (True,), "layer_types": (["sliding_attention"] * 3,),
    "quantization_config": ({"quant_method": "mxfp4"}, {"quant_method": "gptq", "bits": 4}, "fp8", {"quant_method": 3}),
    "torch_dtype": ("float16", "int8", "complex64", "cuda", 3), "dtype": ("bfloat16", "float64", "x"),
    "architectures": (*([name] for name in descriptor.architectures), [], "Llama", [None], [["a"]], {"a": 1}),
    "text_config": ({}, {"hidden_size": 7}), "vision_config": ({},), "visual": ({}, {"image_size": 28}),
    "max_position_embeddings": (1, 2, 16, 2**24), "original_max_position_embeddings": (0, 1, 16, "a"),
    "eos_token_id": (-1, [2, "a"], 10**12), "attn_logit_softcapping": (0, -1, "a", 1e-300), "hidden_act": ("gelu",
    "relu", ["silu"]), "num_experts_per_tok": (0, 1, 100), "n_group": (3, 0, 5), "topk_group": (0, 9), "attn_config":
    ({"softmax_scale": "a"}, [1], {"softmax_scale": float("nan")}), "no_rope_layers": ([1, 0], "ab", [1] * 4),
    "mlp_only_layers": ("ab", 3, [None]), "moe_layers": (3, ["a"]), "attention_bias": ("no", 1),
    "tie_word_embeddings": ("no", True, False), "sliding_window_pattern": (-1, 0, "a", 2), "mrope_section": ([1],),
}  # fmt: skip
JSON_FILES = ("config.json", "generation_config.json", "tokenizer_config.json", "tokenizer.json")
TEXTS = (b"", b"{", b"[]", b"null", b"\xff\xfe", b"[" * 50_000, b"{}", b'{"a":' * 20_000, b"\x00" * 64, b"NaN")


@dataclass(frozen=True)
class Folder:
    """A model folder as it would be published, and what was done to it."""

    files: Files
    changes: tuple[str, ...]

    def write(self, path: Path) -> None:
        """Write the files into the empty folder ``path``."""
        for name, data in self.files.items():
            (path / name).write_bytes(data)


class Folders:
    """Mutated folders by number; ``seed`` and number decide everything.

    Args:
        scratch: an empty folder, for the tokenizer.
    """

    def __init__(self, scratch: Path, seed: int = 0) -> None:
        self._seed = seed
        texts = write_tiny_tokenizer(scratch / "tokenizer")
        self._texts: Files = {path.name: path.read_bytes() for path in sorted(texts.iterdir())}

    def sound(self) -> Folder:
        """A folder without a change."""
        name = "LlamaForCausalLM"
        config = dump(_family(name).tiny_config())
        return Folder({**self._texts, "config.json": config, **weight_files(name, sharded=False)}, ())

    def make(self, number: int) -> Folder:
        """Folder ``number``: that of a family, with one to three changes."""
        rng = random.Random(f"{self._seed} {number}")
        name = rng.choice(sorted(descriptor.architectures))
        files = {**self._texts, "config.json": dump(_family(name).tiny_config())}
        files.update(weight_files(name, sharded=rng.random() < 0.5))
        changes = [name]
        for _ in range(rng.choice((1, 1, 1, 2, 3))):
            change = rng.choice(_CONFIG_CHANGES if rng.random() < 0.6 else _FILE_CHANGES)
            changes.append(change(rng, files))
        return Folder(files, tuple(changes))


def dump(value: Any) -> bytes:
    return json.dumps(value).encode("utf-8")


@cache
def _family(name: str) -> type[Architecture]:
    return find_architecture(name)


@cache
def weight_files(name: str, sharded: bool) -> Mapping[str, bytes]:
    """The weights of the tiny model of this architecture: one file, or two with an index."""
    tensors = dict(_tensors(name))
    if not sharded:
        return {"model.safetensors": save(tensors)}
    names = sorted(tensors)
    shards = {f"model-{i}.safetensors": names[i::2] for i in range(2)}
    index = {"metadata": {}, "weight_map": {tensor: file for file, own in shards.items() for tensor in own}}
    files = {file: save({tensor: tensors[tensor] for tensor in own}) for file, own in shards.items()}
    return {**files, "model.safetensors.index.json": dump(index)}


def _tensors(name: str) -> Iterator[tuple[str, np.ndarray]]:
    """Random float32 tensors with the names and shapes that the model declares."""
    build, draw = Builder("float32", 64), np.random.default_rng(0)
    _family(name)(_family(name).tiny_config(), build)
    rows = {p.name: p.rows for w in build.weights if isinstance(w, LinearWeight) for p in w.parts}
    for item in build.weights:
        if isinstance(item, StackedWeight):
            for part in item.parts:
                shape = (part.columns, part.rows) if item.transposed else (part.rows, part.columns)
                whole = "{}" not in part.name
                for expert in range(1 if whole else item.experts):
                    yield part.name.format(expert), _noise(draw, (item.experts, *shape) if whole else shape)
        elif isinstance(item, LinearWeight):
            for part in item.parts:
                yield part.name, _noise(draw, (part.rows, part.columns))
        elif isinstance(item, Weight):
            even = item.shape[0] // len(item.sources), *item.shape[1:]
            for number, source in enumerate(item.sources):
                linear = source.removesuffix("bias") + "weight"
                own = (rows[linear],) if source.endswith(".bias") and linear in rows else even
                yield source, _noise(draw, item.shapes[number] if item.shapes else own)


def _noise(draw: np.random.Generator, shape: Sequence[int]) -> np.ndarray:
    return (draw.standard_normal(shape) * 0.05).astype(np.float32)


def _places(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """The path of every value below ``value``."""
    items = value.items() if isinstance(value, dict) else enumerate(value[:8]) if isinstance(value, list) else ()
    for key, inner in items:
        yield (*path, key)
        yield from _places(inner, (*path, key))


def _other(rng: random.Random, value: Any) -> Any:
    """Another value: one near to ``value``, or any."""
    if type(value) in (int, float) and rng.random() < 0.4:
        return rng.choice((value + 1, value - 1, value * 2, value * 1000, -value, value / 2, str(value), [value], 0))
    if isinstance(value, str) and rng.random() < 0.3:
        return rng.choice((value[:-1], value + "x", value.upper(), [value], {value: value}))
    if isinstance(value, list) and value and rng.random() < 0.5:
        return rng.choice((value[1:], value * 2, value[0], [*value, None], value[::-1]))
    return copy.deepcopy(rng.choice(VALUES))


def _change_json(rng: random.Random, files: Files, name: str) -> str:
    """Change, add or remove a value of a JSON file."""
    try:
        tree = json.loads(files.get(name, b"{}"))
        places = list(_places(tree))
    except (ValueError, RecursionError):
        return f"{name} is broken already"
    if not places:
        return f"{name} is empty already"
    *outer, key = rng.choice(places)
    at = tree
    for step in outer:
        at = at[step]
    if rng.random() < 0.12:
        del at[key]
        changed = "absent"
    else:
        at[key] = _other(rng, at[key])
        changed = repr(at[key])[:60]
    files[name] = dump(tree)
    return f"{name} {'.'.join(map(str, (*outer, key)))} = {changed}"


def _change_config(rng: random.Random, files: Files) -> str:
    return _change_json(rng, files, "config.json")


def _set_known_key(rng: random.Random, files: Files) -> str:
    """Give ``config.json`` a key that some models have."""
    try:
        tree = json.loads(files.get("config.json", b"{}"))
    except (ValueError, RecursionError):
        tree = {}
    if not isinstance(tree, dict):
        return "config.json is no object already"
    key = rng.choice(sorted(KEYS))
    target = tree["text_config"] if isinstance(tree.get("text_config"), dict) and rng.random() < 0.7 else tree
    value = copy.deepcopy(rng.choice(KEYS[key])) if rng.random() < 0.7 else _other(rng, target.get(key))
    if isinstance(value, dict) and value and rng.random() < 0.5:
        value[rng.choice(sorted(value))] = copy.deepcopy(rng.choice(VALUES))
    target[key] = value
    files["config.json"] = dump(tree)
    return f"config.json {key} = {repr(value)[:80]}"


def _change_any_json(rng: random.Random, files: Files) -> str:
    return _change_json(rng, files, rng.choice([n for n in files if n.endswith(".json")] or ["config.json"]))


def _break_bytes(rng: random.Random, files: Files) -> str:
    """Cut, overwrite or replace a file."""
    name = rng.choice(sorted(files))
    data, how = bytearray(files[name]), rng.randrange(5)
    at = rng.randrange(max(1, min(len(data), rng.choice((16, 400, 1 << 30)))))
    if how == 0:
        data = data[:at]
    elif how == 1 and data:
        data[at] ^= 1 << rng.randrange(8)
    elif how == 2:
        data[at : at + rng.randrange(9)] = rng.randbytes(rng.randrange(9))
    elif how == 3:
        data = bytearray(rng.choice(TEXTS))
    else:
        data += rng.randbytes(rng.randrange(1, 99))
    files[name] = bytes(data)
    return f"{name}: bytes ({how} at {at})"


def _remove_file(rng: random.Random, files: Files) -> str:
    name = rng.choice(sorted(files))
    del files[name]
    if not files:
        files["config.json"] = b"{}"
    return f"without {name}"


def _change_header(rng: random.Random, files: Files) -> str:
    """Change the header of a safetensors file, and keep its data."""
    names = [name for name in files if name.endswith(".safetensors") and len(files[name]) > 8]
    if not names:
        return "no header to change"
    name = rng.choice(names)
    (length,) = struct.unpack("<Q", files[name][:8])
    try:
        header = json.loads(files[name][8 : 8 + length])
        tensor = rng.choice(sorted(header))
        entry = header[tensor]
        key = rng.choice(sorted(entry))
    except (ValueError, TypeError, AttributeError, IndexError, RecursionError):
        return f"{name} is broken already"
    data, how = files[name][8 + length :], rng.randrange(6)
    if how == 0:
        entry[key] = copy.deepcopy(rng.choice(VALUES))
    elif how == 1:
        entry["dtype"] = rng.choice(("F16", "F64", "I32", "BOOL", "F8_E4M3", "F4", "C64", "x"))
    elif how == 2 and isinstance(entry.get("shape"), list):
        entry["shape"] = rng.choice((entry["shape"][::-1], [*entry["shape"], 1], [], [0], [2**62, 4], [1] * 99))
    elif how == 3:
        del header[tensor]
    elif how == 4:
        header[rng.choice(("", "x", tensor + ".x", "\u0000", "a" * 2000))] = header.pop(tensor)
    else:
        header["__metadata__"] = copy.deepcopy(rng.choice(VALUES))
    made = dump(header)
    files[name] = struct.pack("<Q", rng.choice((len(made),) * 6 + (2**63, 0, len(made) + 8))) + made + data
    return f"{name} {tensor[:60]}: header ({how})"


def _poison(rng: random.Random, files: Files) -> str:
    """Put a number that is not finite into a tensor."""
    names = [name for name in files if name.endswith(".safetensors") and len(files[name]) > 64]
    if not names:
        return "no tensor to poison"
    name = rng.choice(names)
    value = struct.pack("<f", rng.choice((float("nan"), float("inf"), float("-inf"))))
    files[name] = files[name][:-4] + value
    return f"{name}: its last number is {struct.unpack('<f', value)[0]}"


Change = Callable[[random.Random, Files], str]
_CONFIG_CHANGES: tuple[Change, ...] = (_change_config, _change_config, _set_known_key, _set_known_key, _change_any_json)
_FILE_CHANGES: tuple[Change, ...] = (
    _break_bytes,
    _remove_file,
    _change_header,
    _change_header,
    _change_any_json,
    _poison,
)
