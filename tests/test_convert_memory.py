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

LAYERS, HIDDEN, INNER = 10, 512, 4096
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

(first, result), (model, large), keys = json.loads(sys.argv[1])
convert(*read_arguments([first, result, *keys]))
before, found, ended = anonymous(), [0, 0], threading.Event()
watching = threading.Thread(target=watch)
watching.start()
convert(*read_arguments([model, large, *keys]))
ended.set()
watching.join()
print(json.dumps([found[0], found[1] - before]))
"""


def model(folder: Path, layers: int) -> tuple[Path, int]:
    """A model of random numbers, and the bytes of one of its layers."""
    folder.mkdir()
    config = {**config_of("Llama"), "hidden_size": HIDDEN, "intermediate_size": INNER, "num_hidden_layers": layers,
              "num_attention_heads": 8, "num_key_value_heads": 8, "head_dim": 64}  # fmt: skip
    square, wide = (HIDDEN, HIDDEN), (INNER, HIDDEN)
    shapes = {f"self_attn.{each}_proj": square for each in "qkvo"} | {"mlp.gate_proj": wide, "mlp.up_proj": wide}
    shapes |= {"mlp.down_proj": wide[::-1], "input_layernorm": (HIDDEN,), "post_attention_layernorm": (HIDDEN,)}
    noise = torch.Generator().manual_seed(3)
    layer = {name: torch.randn(shape, generator=noise).bfloat16() for name, shape in shapes.items()}
    whole = torch.randn(config["vocab_size"], HIDDEN, generator=noise).bfloat16()
    tensors = {"model.embed_tokens.weight": whole, "lm_head.weight": whole.clone(),
               "model.norm.weight": torch.ones(HIDDEN, dtype=torch.bfloat16)}  # fmt: skip
    tensors |= {f"model.layers.{i}.{n}.weight": t.clone() for i in range(layers) for n, t in layer.items()}
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "tokenizer.json").write_text(json.dumps(byte_level("Llama")))
    return folder, sum(each.nbytes for each in layer.values())


@pytest.mark.parametrize(
    ("keys", "end"),
    [(["quant=int8", "infer.tp_size=2"], ""), (["quant=q8_0"], ".gguf"),
     *(pytest.param(*case, marks=pytest.mark.slow) for case in (
         ([], ""), (["infer.tp_size=2"], ""), (["infer.tp_size=2", "infer.pp_size=2"], ""), ([], ".gguf"),
         (["quant=q4_k_m"], ".gguf"), (["quant=q8_0"], ""), (["quant=q4_k"], ""), (["quant=int4"], ""),
         (["quant=fp8"], "")))],
)  # fmt: skip
def test_a_conversion_holds_one_layer_and_not_the_model(keys: list[str], end: str, tmp_path: Path) -> None:
    first, _ = model(tmp_path / "first", 2)
    source, layer = model(tmp_path / "model", LAYERS)
    asked = json.dumps([[str(first), f"{first}-made{end}"], [str(source), f"{source}-made{end}"], keys])
    done = subprocess.run(
        [sys.executable, "-c", CHILD, asked], check=True, capture_output=True, text=True, env=os.environ
    )
    samples, grew = json.loads(done.stdout.splitlines()[-1])
    assert samples > 20
    # What is being quantized is there in float32 too, a matrix at a time.
    assert grew < 1.5 * layer, f"{grew / layer:.1f} layers of {LAYERS}"
