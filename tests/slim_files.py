"""Layers as ModelSlim saves them, written from its documentation in plain arithmetic, with the values that they stand
for. Nothing here is shared with the reader."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

Stored = tuple[dict[str, torch.Tensor], torch.Tensor]


def paired(numbers: torch.Tensor, axis: int) -> torch.Tensor:
    """Signed numbers of four bits, two in a byte along an axis: the even one in the low half."""
    numbers = numbers if axis else numbers.T
    flat = numbers.reshape(-1, 2).tolist()
    made = [((high & 15) << 4 | low & 15) for low, high in flat]
    packed = torch.tensor(made, dtype=torch.uint8).reshape(numbers.shape[0], -1).view(torch.int8)
    return (packed if axis else packed.T).contiguous()


def layer(
    kind: str, name: str, rows: int, columns: int, *, groups: int = 1, shifted: bool = False,
    dtype: torch.dtype = torch.float32, packed: bool = True, second: int = 0, product: str = "",
    input_offset: float = -5.0,
) -> Stored:  # fmt: skip
    """The tensors of one layer, and its values.

    Args:
        packed: whether four bits are two in a byte.
        second: groups of a second scale; 0: there is one.
        input_offset: of activations with a fixed scale.
        product: "float32" or "bits": only the product with the scale of activations is stored, so or as an int64.
    """
    random, stem = torch.Generator().manual_seed(len(name) + rows), name.removesuffix(".weight")
    four = kind.startswith("W4")
    low, high = (-8, 8) if four else (-128, 128)
    numbers = torch.randint(low, high, (rows, columns), generator=random)
    scales = ((torch.rand(rows, groups, generator=random) + 0.5) / (high * columns**0.5)).to(dtype)
    offsets = (torch.randint(-3, 4, (rows, groups), generator=random) * int(shifted)).to(dtype)
    size = columns // groups
    if kind == "WFP8AFP8_DYNAMIC":
        numbers = numbers.float().to(torch.float8_e4m3fn)
    spread = [each.float().repeat_interleave(size, 1) for each in (offsets, scales)]
    values = (numbers.float() - spread[0]) * spread[1]
    half = 1 if kind == "W4A16" and groups == 1 else 0
    bytes_ = numbers if kind == "WFP8AFP8_DYNAMIC" else numbers.to(torch.int8)
    tensors = {name: paired(numbers, half) if four and packed else bytes_}
    if not product:
        tensors |= {f"{name}_scale": scales, f"{name}_offset": offsets}
    if second:
        more = torch.rand(rows, second, generator=random) + 0.5
        values = values * more.repeat_interleave(columns // second, 1)
        tensors |= {f"{name}_scale_second": more, f"{name}_offset_second": torch.zeros(rows, second)}
    if four and packed:
        tensors[f"{stem}.scale_bias"] = 8 * values.sum(1, keepdim=True)
    if kind in ("W8A8", "W8A8_MIX"):
        scale, offset = torch.tensor([0.015625]), torch.tensor([input_offset])
        both = (scales.float() * scale).flatten()
        bias = (-numbers.sum(1) * offset).round().int()
        both = both.view(torch.int32).long() if product == "bits" else both
        tensors |= {
            f"{stem}.input_scale": scale, f"{stem}.input_offset": offset, f"{stem}.deq_scale": both,
            f"{stem}.quant_bias": bias,
        }  # fmt: skip
    return tensors, values


def description(tensors: dict[str, torch.Tensor], kinds: dict[str, str], packed: bool = True) -> dict[str, Any]:
    """``quant_model_description.json``.

    Args:
        kinds: of weights; the others are "FLOAT".
    """
    stems = {name.removesuffix("weight"): kind for name, kind in kinds.items()}
    of = {name: next((kind for stem, kind in stems.items() if name.startswith(stem)), "FLOAT") for name in tensors}
    return {"model_quant_type": "W8A8", **of, **({"version": "1.0.0", "group_size": 0} if packed else {})}


def write_folder(folder: Path, tensors: dict[str, torch.Tensor], about: dict[str, Any], files: int = 1) -> None:
    """Replace the weights in a model's folder: in one file, or in several with an index."""
    (folder / "model.safetensors").unlink()
    (folder / "quant_model_description.json").write_text(json.dumps(about))
    names = sorted(tensors)
    if files == 1:
        save_file(tensors, folder / "quant_model_weights.safetensors")
        return
    where = {}
    for number in range(files):
        file = f"quant_model_weight_w8a8-{number + 1:05}-of-{files:05}.safetensors"
        part = {name: tensors[name] for name in names[number::files]}
        save_file(part, folder / file)
        where |= dict.fromkeys(part, file)
    index = {"metadata": {}, "weight_map": where}
    (folder / "quant_model_weight_w8a8.safetensors.index.json").write_text(json.dumps(index))


def plain_tensors(folder: Path) -> dict[str, torch.Tensor]:
    """Those of an unquantized folder."""
    return load_file(folder / "model.safetensors")
