"""A scheme for tests: int8 codes with one scale a row, with activations in int8, by scales of tokens or a fixed one, or
in their own type; and a writer of tiny Llama checkpoints in it. ``w`` has its scales float32 [rows, 1] in ``w_scale``,
and the fixed scale of activations, float32 [], in ``w_input_scale``.

The module of a descriptor imports no torch, so functions do."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from evener.contracts.checkpoint import Headers
from evener.contracts.descriptor import Descriptor
from evener.contracts.hooks import hookimpl
from evener.contracts.quant import QuantFormat, QuantScheme, Rounding, WeightPart, plain

if TYPE_CHECKING:
    import torch

descriptor = Descriptor(
    name="int8-rows", summary="For tests.", contracts={"quant": 3}, module="int8_rows",
    formats=("int8-rows", "int8-rows-w8a8", "int8-rows-w8a8-fixed"),
)  # fmt: skip


class Int8Rows(QuantScheme):
    """One of three: with the activations' own type, or with int8."""

    def __init__(self, name: str, activation: Rounding | None) -> None:
        self.name, self._activation = name, activation

    def detect(self, config: Mapping[str, Any]) -> bool:
        return bool((config.get("quantization_config") or {}).get("quant_method") == self.name)

    def tensors(self, name: str, headers: Headers) -> Mapping[str, str]:
        if f"{name}_scale" not in headers:
            return {"weight": name}
        fixed = self._activation is not None and self._activation.group < 0
        return {"weight": name, "scale": f"{name}_scale",
                **({"activation_scale": f"{name}_input_scale"} if fixed else {})}  # fmt: skip

    def part(self, name: str, headers: Headers) -> WeightPart | None:
        if name not in headers:
            return None
        dtype, shape = headers[name]
        rows, columns = shape[-2:] if len(shape) == 2 else (0, 0)
        if f"{name}_scale" not in headers:
            return WeightPart(name, rows, columns, plain(dtype))
        form = QuantFormat("int8", scale="float32", activation=self._activation, bits=8 + 32 / columns)
        return WeightPart(name, rows, columns, form)

    def dequantize(self, part: WeightPart, dtype: str) -> torch.Tensor:
        import torch

        wanted, codes = getattr(torch, dtype), part.tensors["weight"]
        return codes.to(wanted) if part.format.plain else (codes.float() * part.tensors["scale"]).to(wanted)

    def cut(self, part: WeightPart, axis: Literal["out", "in"], start: int, stop: int) -> WeightPart:
        tensors = dict(part.tensors)
        if axis == "out":
            tensors = {role: tensor[start:stop] if tensor.dim() else tensor for role, tensor in tensors.items()}
            return replace(part, rows=stop - start, tensors=tensors)
        if tensors:
            tensors["weight"] = tensors["weight"][:, start:stop]
        return replace(part, columns=stop - start, tensors=tensors)


@hookimpl
def evener_quant_schemes() -> list[QuantScheme]:
    """All."""
    return [
        Int8Rows("int8-rows", None), Int8Rows("int8-rows-w8a8", Rounding("int8")),
        Int8Rows("int8-rows-w8a8-fixed", Rounding("int8", -1)),
    ]  # fmt: skip


def write_llama(folder: Path) -> None:
    """Random weights for the ``config.json`` of a Llama, its projections in int8."""
    import torch
    from safetensors.torch import save_file

    config = json.loads((folder / "config.json").read_text())
    hidden, inner, vocab = (config[k] for k in ("hidden_size", "intermediate_size", "vocab_size"))
    query, kv = (config[k] * config["head_dim"] for k in ("num_attention_heads", "num_key_value_heads"))
    noise = torch.Generator().manual_seed(3)

    def drawn(rows: int, columns: int) -> torch.Tensor:
        return torch.randn(rows, columns, generator=noise) / columns**0.5

    tensors = {"model.embed_tokens.weight": drawn(vocab, hidden), "lm_head.weight": drawn(vocab, hidden) * 4,
               "model.norm.weight": torch.ones(hidden)}  # fmt: skip
    shapes = {"self_attn.q_proj": (query, hidden), "self_attn.k_proj": (kv, hidden), "self_attn.v_proj": (kv, hidden),
              "self_attn.o_proj": (hidden, query), "mlp.gate_proj": (inner, hidden), "mlp.up_proj": (inner, hidden),
              "mlp.down_proj": (hidden, inner)}  # fmt: skip
    for layer in (f"model.layers.{n}." for n in range(config["num_hidden_layers"])):
        for norm in ("input_layernorm", "post_attention_layernorm"):
            tensors[f"{layer}{norm}.weight"] = torch.ones(hidden)
        for name, shape in shapes.items():
            values = drawn(*shape)
            scales = values.abs().amax(1, keepdim=True) / 127
            tensors[f"{layer}{name}.weight"] = (values / scales).round().to(torch.int8)
            tensors[f"{layer}{name}.weight_scale"] = scales
            if config["quantization_config"]["quant_method"].endswith("-fixed"):
                # Three times the usual size of what follows a norm, so a few numbers are cut off.
                tensors[f"{layer}{name}.weight_input_scale"] = torch.tensor(3 / 127)
    save_file(tensors, folder / "model.safetensors")
