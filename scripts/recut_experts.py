"""Convert a dense Llama folder to an expert model that gives the same text: ``python scripts/recut_experts.py DENSE
OUT``.

Each MLP is split into slices, and each slice becomes two equal experts, with router rows r and -r. So a token chooses
exactly one expert of every slice. Down projections are scaled by the number of slices, because the chosen experts'
weights are almost equal. Routing is real and depends on the token, and the answer is that of the dense model.
"""

from __future__ import annotations

import argparse
import json
import shutil
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

SLICES = 8
#: Small, so that softmax over the chosen experts is almost uniform, but large enough to decide the routing.
ROUTER_SCALE = 2e-4


def experts_of(name: str, tensor: torch.Tensor) -> dict[str, torch.Tensor]:
    """The experts' tensors from one MLP weight, ``model.layers.<i>.mlp.<part>_proj.weight``."""
    at, _, part = name.removesuffix("_proj.weight").rpartition(".")
    at = at.removesuffix("mlp") + "block_sparse_moe.experts"
    pieces = tensor.chunk(SLICES, 1 if part == "down" else 0)
    short = {"gate": "w1", "up": "w3", "down": "w2"}[part]
    scale = SLICES if part == "down" else 1
    return {
        f"{at}.{2 * s + copy}.{short}.weight": (piece * scale).clone()
        for s, piece in enumerate(pieces)
        for copy in (0, 1)
    }


def recut(dense: Path, out: Path, seed: int = 0) -> None:
    """Write the folder ``out``; both hold one ``model.safetensors``."""
    out.mkdir(parents=True, exist_ok=True)
    for file in dense.iterdir():
        if file.suffix in (".json", ".jinja") and file.name != "config.json":
            shutil.copy(file, out)
    config = json.loads((dense / "config.json").read_text())
    config.update(
        architectures=["MixtralForCausalLM"], model_type="mixtral", num_local_experts=2 * SLICES,
        num_experts_per_tok=SLICES, intermediate_size=config["intermediate_size"] // SLICES, sliding_window=None,
    )  # fmt: skip
    (out / "config.json").write_text(json.dumps(config, indent=2))
    generator, tensors = torch.Generator().manual_seed(seed), {}
    for name, tensor in load_file(dense / "model.safetensors").items():
        tensors.update(experts_of(name, tensor) if ".mlp." in name else {name: tensor})
    for layer in range(config["num_hidden_layers"]):
        rows = torch.randn(SLICES, config["hidden_size"], generator=generator)
        rows = rows / rows.norm(dim=1, keepdim=True) * ROUTER_SCALE
        both = torch.stack((rows, -rows), 1).flatten(0, 1).to(torch.bfloat16)
        tensors[f"model.layers.{layer}.block_sparse_moe.gate.weight"] = both
    save_file(tensors, out / "model.safetensors", metadata={"format": "pt"})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("dense", type=Path, help="the folder of the dense model")
    parser.add_argument("out", type=Path, help="the folder to make")
    arguments = parser.parse_args()
    recut(arguments.dense, arguments.out)


if __name__ == "__main__":
    main()
