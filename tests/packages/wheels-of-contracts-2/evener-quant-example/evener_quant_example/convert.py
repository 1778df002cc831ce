"""Make such a checkpoint: ``python -m evener_quant_example.convert FOLDER NEW_FOLDER [GROUP]``.

Rounding to the nearest code (absmax): a scale is the largest magnitude of its group, divided by 127.
"""

import json
import shutil
import sys
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file


def quantize(weight, group):
    """Codes int8 [rows, columns] and scales float32 [rows, columns / group] of ``weight`` [rows, columns]."""
    groups = weight.float().unflatten(1, (-1, group))
    scales = groups.abs().amax(-1).clamp(min=1e-12) / 127
    codes = (groups / scales[..., None]).round().to(torch.int8)
    return codes.flatten(1), scales


def convert(source, target, group=32):
    """Copy the model folder ``source``, with the projections of all layers quantized."""
    shutil.copytree(source, target)
    for file in Path(target).glob("*.safetensors"):
        tensors = load_file(file)
        for name in [name for name in tensors if name.endswith("_proj.weight")]:
            tensors[name], tensors[f"{name}_scale"] = quantize(tensors[name], group)
        save_file(tensors, file)
    path = Path(target) / "config.json"
    config = json.loads(path.read_text()) | {"quantization_config": {"quant_method": "int8-groups"}}
    path.write_text(json.dumps(config))
    # The index, if there is one, names no scales; without it evener reads the headers of all files.
    (Path(target) / "model.safetensors.index.json").unlink(missing_ok=True)


if __name__ == "__main__":
    convert(sys.argv[1], sys.argv[2], *map(int, sys.argv[3:]))
