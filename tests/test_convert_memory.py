"""``evener convert`` reads, changes and writes one tensor after another: its memory holds at most about one layer,
however many there are."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from test_convert_gguf import byte_level, config_of
from test_convert_gguf_experts import tiny

LAYERS, HIDDEN, INNER, EXPERTS = 10, 512, 4096, 16
#: In a process of its own, whose allocator keeps nothing of other tests: converts a model of two layers first, so that
#: everything is imported, and prints by how much the bytes that are no pages of files grew at most.
CHILD = """
import json, sys, threading
import torch
from evener_convert.command import convert, read_arguments
torch.set_num_threads(1)

def anonymous():
    with open("/proc/self/status") as file:
        return int(next(line.split()[1] for line in file if line.startswith("RssAnon"))) * 1024

def watch():
    while not ended.wait(0.001):
        found[:] = [found[0] + 1, max(found[1], anonymous())]

(first, result), (model, large), keys, merge = json.loads(sys.argv[1])
convert(*read_arguments([first, result, *keys]), merge=merge)
before, found, ended = anonymous(), [0, 0], threading.Event()
watching = threading.Thread(target=watch)
watching.start()
convert(*read_arguments([model, large, *keys]), merge=merge)
ended.set()
watching.join()
print(json.dumps([found[0], found[1] - before]))
"""


def model(folder: Path, layers: int, family: str) -> tuple[Path, int]:
    """A model of random numbers, and the bytes of one of its layers."""
    folder.mkdir()
    config = config_of(family) if family == "Llama" else tiny(family)
    config |= {"hidden_size": HIDDEN, "intermediate_size": INNER, "num_hidden_layers": layers,
               "num_attention_heads": 8, "num_key_value_heads": 8, "head_dim": 64}  # fmt: skip
    shapes: dict[str, tuple[int, ...]] = {f"self_attn.{each}_proj": (HIDDEN, HIDDEN) for each in "qkvo"}
    shapes |= {"input_layernorm": (HIDDEN,), "post_attention_layernorm": (HIDDEN,)}
    inner, parts = INNER, ["mlp"]
    if family == "Qwen3Moe":
        inner, parts = INNER // EXPERTS, [f"mlp.experts.{n}" for n in range(EXPERTS)]
        config |= {"architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe", "num_experts": EXPERTS,
                   "moe_intermediate_size": inner}  # fmt: skip
        shapes |= {"mlp.gate": (EXPERTS, HIDDEN), "self_attn.q_norm": (64,), "self_attn.k_norm": (64,)}
    for part in parts:
        shapes |= {f"{part}.gate_proj": (inner, HIDDEN), f"{part}.up_proj": (inner, HIDDEN),
                   f"{part}.down_proj": (HIDDEN, inner)}  # fmt: skip
    noise = torch.Generator().manual_seed(3)
    layer = {name: torch.randn(shape, generator=noise).bfloat16() for name, shape in shapes.items()}
    whole = torch.randn(config["vocab_size"], HIDDEN, generator=noise).bfloat16()
    tensors = {"model.embed_tokens.weight": whole, "lm_head.weight": whole.clone(),
               "model.norm.weight": torch.ones(HIDDEN, dtype=torch.bfloat16)}  # fmt: skip
    tensors |= {f"model.layers.{i}.{n}.weight": t.clone() for i in range(layers) for n, t in layer.items()}
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "tokenizer.json").write_text(json.dumps(byte_level("Llama" if family == "Llama" else "Qwen3")))
    return folder, sum(each.nbytes for each in layer.values())


@pytest.mark.parametrize(
    ("family", "keys", "end", "merge"),
    [("Llama", ["quant=int8", "infer.tp_size=2"], "", False), ("Llama", ["quant=q8_0"], ".gguf", False),
     *(pytest.param("Llama", *case, False, marks=pytest.mark.slow) for case in (
         ([], ""), (["infer.tp_size=2"], ""), (["infer.tp_size=2", "infer.pp_size=2"], ""), ([], ".gguf"),
         (["quant=q4_k_m"], ".gguf"), (["quant=q8_0"], ""), (["quant=q4_k"], ""), (["quant=int4"], ""),
         (["quant=fp8"], ""))),
     *(pytest.param(family, keys, "", True, marks=pytest.mark.slow) for family, keys in (
         ("Llama", []), ("Llama", ["infer.tp_size=2"]), ("Llama", ["quant=q8_0"]), ("Qwen3Moe", []))),
     # The experts of a layer are one tensor in a GGUF file.
     *(pytest.param("Qwen3Moe", keys, end, False, marks=pytest.mark.slow) for keys, end in (
         ([], ".gguf"), (["quant=q8_0"], ".gguf"), (["quant=fp8"], ""), (["infer.tp_size=2"], "")))],
)  # fmt: skip
def test_a_conversion_holds_one_layer_and_not_the_model(
    family: str, keys: list[str], end: str, merge: bool, tmp_path: Path
) -> None:
    first, _ = model(tmp_path / "first", 2, family)
    source, layer = model(tmp_path / "model", LAYERS, family)
    asked = json.dumps([[str(first), f"{first}-made{end}"], [str(source), f"{source}-made{end}"], keys, merge])
    done = subprocess.run(
        [sys.executable, "-c", CHILD, asked], check=True, capture_output=True, text=True, env=os.environ
    )
    samples, grew = json.loads(done.stdout.splitlines()[-1])
    assert samples > 20
    # What is being quantized is there in float32 too, a matrix at a time.
    assert grew < 1.5 * layer, f"{grew / layer:.1f} layers of {LAYERS}"
