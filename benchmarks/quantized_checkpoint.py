"""Write a model folder of random weights in an 8-bit format, to time loading and steps without a real checkpoint.

    python benchmarks/quantized_checkpoint.py qwen3-8b fp8-block FOLDER [num_hidden_layers=4]

Formats: ``fp8`` (a scale a row, as llm-compressor writes), ``fp8-block`` (a scale for 128 x 128, as DeepSeek and Qwen
publish), ``int8`` (a scale a row). Models: Qwen3 of ``model_configs``, with and without experts. The head and the
embedding stay bfloat16.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
from model_configs import CONFIGS
from safetensors.torch import save_file

#: Files that are written at the same time.
WRITERS = 6
#: Columns and rows that share a scale in ``fp8-block``.
BLOCK = 128
Tensors = dict[str, torch.Tensor]


def _channels(bits: str, kind: str) -> dict[str, Any]:
    weights = {"num_bits": 8, "type": kind, "strategy": "channel", "symmetric": True, "dynamic": False}
    group = {"targets": ["Linear"], "weights": weights, "input_activations": None}
    return {"quant_method": "compressed-tensors", "format": bits, "ignore": ["lm_head"], "config_groups": {"a": group}}


#: The ``quantization_config`` of each format.
QUANTIZATION: Mapping[str, dict[str, Any]] = {
    "fp8": _channels("float-quantized", "float"),
    "fp8-block": {
        "quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic", "weight_block_size": [BLOCK, BLOCK],
    },
    "int8": _channels("int-quantized", "int"),
}  # fmt: skip


def write(name: str, form: str, folder: Path, **changes: int) -> Path:
    """Write the folder; ``changes`` replace numbers of the config.

    Raises:
        KeyError: an unknown model or format, or a key that the model's config does not have.
    """
    if unknown := sorted(changes.keys() - CONFIGS[name].keys()):
        raise KeyError(f"{name} has no {', '.join(unknown)}: its config has {', '.join(sorted(CONFIGS[name]))}")
    config = {**CONFIGS[name], **changes, "quantization_config": QUANTIZATION[form]}
    folder.mkdir(parents=True, exist_ok=True)
    add, files = _writer(form), 1 + config["num_hidden_layers"]
    with ThreadPoolExecutor(WRITERS) as pool:
        list(pool.map(lambda number: save_file(_shard(config, add, number), folder / _file(number)), range(files)))
    names = {key: path.name for path in sorted(folder.glob("*.safetensors")) for key in _keys(path)}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": names}))
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def _file(number: int) -> str:
    return f"model-{number:05d}.safetensors"


def _keys(path: Path) -> Sequence[str]:
    with path.open("rb") as file:
        header = json.loads(file.read(int.from_bytes(file.read(8), "little")))
    return [key for key in header if key != "__metadata__"]


def _writer(form: str) -> Callable[[Tensors, str, int, int], None]:
    """Adds one quantized linear weight ``[rows, columns]`` to a shard."""
    noise = torch.randn(1 << 22, generator=torch.Generator().manual_seed(0))
    stored = (noise * 32).clamp(-127, 127).to(torch.int8) if form == "int8" else noise.to(torch.float8_e4m3fn)
    suffix, size = ("weight_scale_inv", 0.02) if form == "fp8-block" else ("weight_scale", 0.02)

    def add(shard: Tensors, name: str, rows: int, columns: int) -> None:
        values = stored.view(torch.uint8).repeat(-(-rows * columns // len(stored)))[: rows * columns]
        shard[f"{name}.weight"] = values.view(stored.dtype).reshape(rows, columns).clone()
        shape = (-(-rows // BLOCK), -(-columns // BLOCK)) if form == "fp8-block" else (rows, 1)
        scale = size / (32 if form == "int8" else 1)
        shard[f"{name}.{suffix}"] = torch.full(shape, scale, dtype=torch.float32)

    return add


def _shard(config: Mapping[str, Any], add: Callable[[Tensors, str, int, int], None], number: int) -> Tensors:
    """The tensors of a file: embedding, norm and head, then those of one layer after another."""
    hidden, dim, vocab = config["hidden_size"], config["head_dim"], config["vocab_size"]
    query, key = config["num_attention_heads"] * dim, config["num_key_value_heads"] * dim

    def plain(*shape: int) -> torch.Tensor:
        return torch.randn(*shape).mul_(0.02).to(torch.bfloat16)

    if not number:
        ends: Tensors = {"model.embed_tokens.weight": plain(vocab, hidden), "model.norm.weight": torch.ones(hidden)}
        return ends if config["tie_word_embeddings"] else {**ends, "lm_head.weight": plain(vocab, hidden)}
    at, shard = f"model.layers.{number - 1}", Tensors()
    for norm, size in (("input_layernorm", hidden), ("post_attention_layernorm", hidden),
                       ("self_attn.q_norm", dim), ("self_attn.k_norm", dim)):  # fmt: skip
        shard[f"{at}.{norm}.weight"] = torch.ones(size, dtype=torch.bfloat16)
    for part, rows, columns in (("q", query, hidden), ("k", key, hidden), ("v", key, hidden), ("o", hidden, query)):
        add(shard, f"{at}.self_attn.{part}_proj", rows, columns)
    experts = config.get("num_experts", 0)
    if experts:
        shard[f"{at}.mlp.gate.weight"] = plain(experts, hidden)
    inner = config["moe_intermediate_size"] if experts else config["intermediate_size"]
    for module in [f"{at}.mlp.experts.{i}" for i in range(experts)] or [f"{at}.mlp"]:
        add(shard, f"{module}.gate_proj", inner, hidden)
        add(shard, f"{module}.up_proj", inner, hidden)
        add(shard, f"{module}.down_proj", hidden, inner)
    return shard


if __name__ == "__main__":
    model, asked, target = sys.argv[1:4]
    began = time.perf_counter()
    given = {key: int(value) for key, value in (pair.split("=", 1) for pair in sys.argv[4:])}
    made = write(model, asked, Path(target), **given)
    total = sum(path.stat().st_size for path in made.iterdir())
    print(f"{made}: {total / 1e9:.2f} GB in {time.perf_counter() - began:.1f} s")
