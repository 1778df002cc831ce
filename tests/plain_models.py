"""Models in plain torch, written from their reports and the descriptions of their checkpoints, for families that
transformers does not have: one sequence at a time, no cache. Parameters have the checkpoints' names."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

Config = Mapping[str, Any]


def rotated(x: torch.Tensor, dim: int, base: float) -> torch.Tensor:
    """Heads [n, heads, size] of tokens 0 to n - 1: elements i and i + dim / 2 are a complex number that is turned by
    position * base ** (-2i / dim) (Su et al. 2021)."""
    half = dim // 2
    speed = torch.tensor([base ** (-2 * i / dim) for i in range(half)], dtype=torch.float64)
    turn = torch.outer(torch.arange(len(x), dtype=torch.float64), speed)[:, None]
    turned = torch.complex(x[..., :half].double(), x[..., half:dim].double()) * torch.polar(torch.ones_like(turn), turn)
    return torch.cat((turned.real.float(), turned.imag.float(), x[..., dim:]), dim=-1)


def attended(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """Causal attention of [n, heads, size], one query after another."""
    rows = []
    for at in range(len(q)):
        scores = (q[at] * k[: at + 1]).sum(-1) / math.sqrt(q.shape[-1])  # [at + 1, heads]
        rows.append((scores.softmax(0)[..., None] * v[: at + 1]).sum(0).flatten())
    return torch.stack(rows)


class RootMeanSquare(nn.Module):
    """x over the root of its mean square, times a weight."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight, self.eps = nn.Parameter(torch.ones(size)), eps

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x / (x.pow(2).mean(-1, keepdim=True) + self.eps).sqrt() * self.weight


class Baichuan(nn.Module):
    """Baichuan 7B; 2 if ``z_loss_weight`` is there, whose report describes NormHead: logits by angles alone."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        hidden, eps, self.heads = config["hidden_size"], config["rms_norm_eps"], config["num_attention_heads"]
        layer = {
            "input_layernorm": lambda: RootMeanSquare(hidden, eps),
            "post_attention_layernorm": lambda: RootMeanSquare(hidden, eps),
            "self_attn": lambda: nn.ModuleDict(
                {"W_pack": nn.Linear(hidden, 3 * hidden, bias=False), "o_proj": nn.Linear(hidden, hidden, bias=False)}
            ),
            "mlp": lambda: nn.ModuleDict({
                "gate_proj": nn.Linear(hidden, config["intermediate_size"], bias=False),
                "up_proj": nn.Linear(hidden, config["intermediate_size"], bias=False),
                "down_proj": nn.Linear(config["intermediate_size"], hidden, bias=False),
            }),
        }  # fmt: skip
        layers = [nn.ModuleDict({k: make() for k, make in layer.items()}) for _ in range(config["num_hidden_layers"])]
        self.model = nn.ModuleDict({
            "embed_tokens": nn.Embedding(config["vocab_size"], hidden), "layers": nn.ModuleList(layers),
            "norm": RootMeanSquare(hidden, eps),
        })  # fmt: skip
        self.lm_head = nn.Linear(hidden, config["vocab_size"], bias=False)
        self.by_angle = "z_loss_weight" in config

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.model["embed_tokens"](ids[0])
        for layer in self.model["layers"]:
            parts = layer["self_attn"]["W_pack"](layer["input_layernorm"](x)).chunk(3, dim=-1)
            q, k, v = (part.unflatten(-1, (self.heads, -1)) for part in parts)
            q, k = (rotated(part, part.shape[-1], 10000.0) for part in (q, k))
            x = x + layer["self_attn"]["o_proj"](attended(q, k, v))
            y, mlp = layer["post_attention_layernorm"](x), layer["mlp"]
            x = x + mlp["down_proj"](F.silu(mlp["gate_proj"](y)) * mlp["up_proj"](y))
        head = self.lm_head.weight
        if self.by_angle:
            head = head / head.pow(2).sum(1, keepdim=True).sqrt()
        return (self.model["norm"](x) @ head.T)[None]


class Qwen(nn.Module):
    """Qwen 1 up to ``seq_length`` tokens: RMS norms, rotary positions, biases on query, key and value, and an MLP
    whose second projection is the gate."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        hidden, eps, bias = config["hidden_size"], config["layer_norm_epsilon"], not config["no_bias"]
        self.heads, size, inner = config["num_attention_heads"], config["kv_channels"], config["intermediate_size"] // 2
        self.dim, self.base = int(size * config["rotary_pct"]), config["rotary_emb_base"]
        wide = self.heads * size
        layers = [
            nn.ModuleDict({
                "ln_1": RootMeanSquare(hidden, eps), "ln_2": RootMeanSquare(hidden, eps),
                "attn": nn.ModuleDict(
                    {"c_attn": nn.Linear(hidden, 3 * wide), "c_proj": nn.Linear(wide, hidden, bias=bias)}
                ),
                "mlp": nn.ModuleDict({
                    "w1": nn.Linear(hidden, inner, bias=bias), "w2": nn.Linear(hidden, inner, bias=bias),
                    "c_proj": nn.Linear(inner, hidden, bias=bias),
                }),
            })
            for _ in range(config["num_hidden_layers"])
        ]  # fmt: skip
        self.transformer = nn.ModuleDict({
            "wte": nn.Embedding(config["vocab_size"], hidden), "h": nn.ModuleList(layers),
            "ln_f": RootMeanSquare(hidden, eps),
        })  # fmt: skip
        self.lm_head = nn.Linear(hidden, config["vocab_size"], bias=False)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.transformer["wte"](ids[0])
        for layer in self.transformer["h"]:
            parts = layer["attn"]["c_attn"](layer["ln_1"](x)).chunk(3, dim=-1)
            q, k, v = (part.unflatten(-1, (self.heads, -1)) for part in parts)
            q, k = (rotated(part, self.dim, self.base) for part in (q, k))
            x = x + layer["attn"]["c_proj"](attended(q, k, v))
            y, mlp = layer["ln_2"](x), layer["mlp"]
            x = x + mlp["c_proj"](mlp["w1"](y) * F.silu(mlp["w2"](y)))
        return self.lm_head(self.transformer["ln_f"](x))[None]  # type: ignore[no-any-return]


class ChatGLM(nn.Module):
    """ChatGLM 2 and 3: the first half of a head is rotated in neighbouring pairs; heads share keys in groups."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        hidden, eps, inner = config["hidden_size"], config["layernorm_epsilon"], config["ffn_hidden_size"]
        self.heads, self.groups = config["num_attention_heads"], config["multi_query_group_num"]
        self.size, self.base = config["kv_channels"], 10000.0 * config.get("rope_ratio", 1.0)
        wide = (self.heads + 2 * self.groups) * self.size
        layers = [
            nn.ModuleDict({
                "input_layernorm": RootMeanSquare(hidden, eps), "post_attention_layernorm": RootMeanSquare(hidden, eps),
                "self_attention": nn.ModuleDict({
                    "query_key_value": nn.Linear(hidden, wide, bias=config["add_qkv_bias"]),
                    "dense": nn.Linear(self.heads * self.size, hidden, bias=False),
                }),
                "mlp": nn.ModuleDict({
                    "dense_h_to_4h": nn.Linear(hidden, 2 * inner, bias=False),
                    "dense_4h_to_h": nn.Linear(inner, hidden, bias=False),
                }),
            })
            for _ in range(config["num_layers"])
        ]  # fmt: skip
        self.transformer = nn.ModuleDict({
            "embedding": nn.ModuleDict({"word_embeddings": nn.Embedding(config["padded_vocab_size"], hidden)}),
            "encoder": nn.ModuleDict({"layers": nn.ModuleList(layers), "final_layernorm": RootMeanSquare(hidden, eps)}),
            "output_layer": nn.Linear(hidden, config["padded_vocab_size"], bias=False),
        })  # fmt: skip

    def _rotated(self, x: torch.Tensor) -> torch.Tensor:
        """Pairs (2i, 2i + 1) of the first half: as ``rotated`` has it once the pairs' parts lie apart, and back."""
        half = self.size // 2
        apart = torch.cat((x[..., 0:half:2], x[..., 1:half:2], x[..., half:]), dim=-1)
        turned = rotated(apart, half, self.base)
        pairs = torch.stack((turned[..., : half // 2], turned[..., half // 2 : half]), dim=-1).flatten(-2)
        return torch.cat((pairs, turned[..., half:]), dim=-1)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.transformer["embedding"]["word_embeddings"](ids[0])
        for layer in self.transformer["encoder"]["layers"]:
            attention, mlp = layer["self_attention"], layer["mlp"]
            rows = attention["query_key_value"](layer["input_layernorm"](x)).unflatten(-1, (-1, self.size))
            q, k, v = rows.split([self.heads, self.groups, self.groups], dim=1)
            k, v = (part.repeat_interleave(self.heads // self.groups, dim=1) for part in (self._rotated(k), v))
            x = x + attention["dense"](attended(self._rotated(q), k, v))
            gate, up = mlp["dense_h_to_4h"](layer["post_attention_layernorm"](x)).chunk(2, dim=-1)
            x = x + mlp["dense_4h_to_h"](F.silu(gate) * up)
        return self.transformer["output_layer"](self.transformer["encoder"]["final_layernorm"](x))[None]  # type: ignore[no-any-return]
