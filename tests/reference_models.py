"""Plain oracles of three language-model families: Baichuan 1/2, Qwen 1, ChatGLM 2/3.

Written from published facts only, each named where it is used, and meant to be read rather than to be fast: one
sequence at a time, every position computed anew, no cache, float32, one attention head after the other.  Each class is
built from the family's own ``config.json`` as a mapping, and its ``state_dict`` has the names of the published
checkpoints (less rotary buffers such as ``inv_freq``, which are computed here).

Sources, by the short names used below:

* *baichuan modeling*: ``modeling_baichuan.py`` of baichuan-inc/Baichuan-7B and baichuan-inc/Baichuan2-7B-*.
* *qwen modeling*: ``modeling_qwen.py`` of Qwen/Qwen-7B.
* *chatglm modeling*: ``modeling_chatglm.py`` of THUDM/chatglm2-6b, THUDM/chatglm3-6b and THUDM/chatglm3-6b-32k.
* *chatglm2-32k modeling*: ``modeling_chatglm.py`` of THUDM/chatglm2-6b-32k.
* *vLLM*: ``vllm/model_executor/models/{baichuan,qwen,chatglm}.py`` of vllm-project/vllm.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

__all__ = ["Baichuan", "ChatGLM", "Qwen"]


class _RMSNorm(nn.Module):
    """Root-mean-square norm: ``x / sqrt(mean(x^2) + eps) * weight``, with neither mean removal nor bias.

    The same formula stands in the class RMSNorm of all three modeling files.
    """

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.ones(size))

    def forward(self, x: Tensor) -> Tensor:
        mean_square = (x * x).mean(dim=-1, keepdim=True)
        return x / torch.sqrt(mean_square + self.eps) * self.weight


def _silu(x: Tensor) -> Tensor:
    """SiLU, the gate's activation in all three families (``hidden_act: silu``, ``F.silu`` in the modeling files)."""
    return x * torch.sigmoid(x)


def _angles(length: int, rotary_dim: int, base: float, ratio: float = 1.0) -> Tensor:
    """Rotary angles ``[length, rotary_dim / 2]``: position times ``base ** (-2 i / rotary_dim)``, positions from 0.

    RoFormer's formula, used so by the class RotaryEmbedding of all three modeling files; the divisor in the exponent is
    the number of *rotated* elements, which is less than the head where only a part of it is rotated.  Positions are
    divided by ``ratio`` (``seq_idx`` of the chatglm2-32k modeling).
    """
    exponents = torch.arange(0, rotary_dim, 2, dtype=torch.float32) / rotary_dim
    positions = torch.arange(length, dtype=torch.float32) / ratio
    return positions[:, None] * (1.0 / torch.pow(torch.tensor(float(base)), exponents))[None, :]


def _rotate_halves(x: Tensor, angles: Tensor) -> Tensor:
    """Rotate ``x`` ``[n, heads, dim]``, element ``i`` paired with ``i + r / 2`` among the first ``r`` of each head.

    ``rotate_half`` of the baichuan modeling and ``_rotate_half`` of the qwen modeling; the latter's
    ``apply_rotary_pos_emb`` hands the elements after the first ``r`` through unchanged.
    """
    half = angles.shape[-1]
    first, second, rest = x[..., :half], x[..., half : 2 * half], x[..., 2 * half :]
    cos, sin = angles.cos()[:, None, :], angles.sin()[:, None, :]
    return torch.cat((first * cos - second * sin, second * cos + first * sin, rest), dim=-1)


def _rotate_pairs(x: Tensor, angles: Tensor) -> Tensor:
    """Rotate ``x`` ``[n, heads, dim]``, element ``2 i`` paired with ``2 i + 1`` among the first ``r`` of each head.

    ``apply_rotary_pos_emb`` of the chatglm modeling (vLLM: ``is_neox_style=False``); the elements after the first
    ``r`` go through unchanged.
    """
    rotated_dim = 2 * angles.shape[-1]
    rotated, rest = x[..., :rotated_dim], x[..., rotated_dim:]
    even, odd = rotated[..., 0::2], rotated[..., 1::2]
    cos, sin = angles.cos()[:, None, :], angles.sin()[:, None, :]
    out = torch.empty_like(rotated)
    out[..., 0::2] = even * cos - odd * sin
    out[..., 1::2] = odd * cos + even * sin
    return torch.cat((out, rest), dim=-1)


def _causal_attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Causal softmax attention, scores scaled by ``1 / sqrt(head size)``: ``[n, heads, dim]`` to ``[n, heads * dim]``.

    Query head ``h`` reads key/value head ``h // (query heads / key heads)``: the chatglm modeling repeats each group's
    keys and values over *consecutive* query heads.  Its ``apply_query_key_layer_scaling`` divides the scores by the
    layer's number and multiplies them by it again, so it changes nothing but rounding.
    """
    length, heads, dim = q.shape
    per_group = heads // k.shape[1]
    future = torch.ones(length, length, dtype=torch.bool).triu(diagonal=1)
    outputs: list[Tensor] = []
    for head in range(heads):
        keys, values = k[:, head // per_group], v[:, head // per_group]
        scores = (q[:, head] @ keys.T) / dim**0.5
        weights = torch.softmax(scores.masked_fill(future, float("-inf")), dim=-1)
        outputs.append(weights @ values)
    return torch.cat(outputs, dim=-1)


def _single(ids: Tensor) -> Tensor:
    """The one sequence of a batch ``[1, n]``, as ``[n]``."""
    if ids.dim() != 2 or ids.shape[0] != 1:
        raise ValueError(f"one sequence at a time, ids of shape [1, n]; got {tuple(ids.shape)}")
    return ids[0]


# --- Baichuan 1 and 2 -------------------------------------------------------------------------------------------------


class _BaichuanAttention(nn.Module):
    """Full multi-head attention with one packed projection.

    ``W_pack`` (no bias) gives all queries, then all keys, then all values: ``unflatten(-1, (3, hidden_size))`` in the
    baichuan modeling, ``chunk(3)`` in vLLM.  Rotary over the whole head, in halves, base 10000 (the default of
    RotaryEmbedding there, which no config overrides); ``o_proj`` has no bias.
    """

    def __init__(self, config: Mapping[str, Any]) -> None:
        super().__init__()
        hidden = int(config["hidden_size"])
        self.heads = int(config["num_attention_heads"])
        self.dim = hidden // self.heads
        self.W_pack = nn.Linear(hidden, 3 * hidden, bias=False)
        self.o_proj = nn.Linear(hidden, hidden, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        length = x.shape[0]
        q, k, v = self.W_pack(x).reshape(length, 3, self.heads, self.dim).unbind(dim=1)
        angles = _angles(length, self.dim, 10000.0)
        out: Tensor = self.o_proj(_causal_attention(_rotate_halves(q, angles), _rotate_halves(k, angles), v))
        return out


class _BaichuanMLP(nn.Module):
    """``down(silu(gate(x)) * up(x))`` without biases: class MLP of the baichuan modeling."""

    def __init__(self, config: Mapping[str, Any]) -> None:
        super().__init__()
        hidden, inner = int(config["hidden_size"]), int(config["intermediate_size"])
        self.gate_proj = nn.Linear(hidden, inner, bias=False)
        self.up_proj = nn.Linear(hidden, inner, bias=False)
        self.down_proj = nn.Linear(inner, hidden, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.down_proj(_silu(self.gate_proj(x)) * self.up_proj(x))
        return out


class _BaichuanLayer(nn.Module):
    """Pre-norm residual block: class DecoderLayer of the baichuan modeling, BaiChuanDecoderLayer of vLLM."""

    def __init__(self, config: Mapping[str, Any], attention: nn.Module) -> None:
        super().__init__()
        hidden, eps = int(config["hidden_size"]), float(config["rms_norm_eps"])
        self.self_attn = attention
        self.mlp = _BaichuanMLP(config)
        self.input_layernorm = _RMSNorm(hidden, eps)
        self.post_attention_layernorm = _RMSNorm(hidden, eps)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.self_attn(self.input_layernorm(x))
        out: Tensor = x + self.mlp(self.post_attention_layernorm(x))
        return out


class _BaichuanModel(nn.Module):
    """Embedding (unscaled), layers, final norm: class BaichuanModel of the baichuan modeling."""

    def __init__(self, config: Mapping[str, Any], attention: type[nn.Module]) -> None:
        super().__init__()
        hidden = int(config["hidden_size"])
        self.embed_tokens = nn.Embedding(int(config["vocab_size"]), hidden)
        self.layers = nn.ModuleList(
            [_BaichuanLayer(config, attention(config)) for _ in range(int(config["num_hidden_layers"]))]
        )
        self.norm = _RMSNorm(hidden, float(config["rms_norm_eps"]))

    def forward(self, ids: Tensor) -> Tensor:
        x: Tensor = self.embed_tokens(ids)
        for layer in self.layers:
            x = layer(x)
        out: Tensor = self.norm(x)
        return out


class Baichuan(nn.Module):
    """Baichuan 1 and 2 of 7B, which have rotary positions; ``reference_baichuan`` has those of 13B.

    Baichuan 2, known by ``z_loss_weight`` in its config, has a NormHead (class NormHead of the Baichuan 2 modeling):
    ``torch.nn.functional.normalize`` on the head's rows, that is each row over its Euclidean length, which is taken as
    at least 1e-12.  The checkpoint holds the rows as trained; they are normalised here at every call and the stored
    weight is left alone.  Baichuan 1 has a plain head without bias.
    """

    attention: type[nn.Module] = _BaichuanAttention

    def __init__(self, config: Mapping[str, Any]) -> None:
        super().__init__()
        self.norm_head = "z_loss_weight" in config
        self.model = _BaichuanModel(config, self.attention)
        self.lm_head = nn.Linear(int(config["hidden_size"]), int(config["vocab_size"]), bias=False)

    def forward(self, ids: Tensor) -> Tensor:
        """Logits ``[1, n, vocab_size]`` of the one sequence ``ids`` ``[1, n]``."""
        x: Tensor = self.model(_single(ids))
        rows: Tensor = self.lm_head.weight
        if self.norm_head:
            lengths = (rows * rows).sum(dim=-1, keepdim=True).sqrt()
            rows = rows / lengths.clamp_min(1e-12)
        return (x @ rows.T)[None]


# --- Qwen 1 -----------------------------------------------------------------------------------------------------------


class _QwenAttention(nn.Module):
    """Full multi-head attention with one packed projection: class QWenAttention of the qwen modeling.

    ``c_attn`` always has a bias (it is made without a ``bias`` argument) and gives all queries, then all keys, then all
    values (``split(hidden_size)``; vLLM: ``chunk(3)``).  Rotary on the first ``int(kv_channels * rotary_pct)`` elements
    of a head, in halves, base ``rotary_emb_base`` (class QWenModel).  ``c_proj`` has a bias only if not ``no_bias``.

    With ``use_dynamic_ntk`` a sequence has the base ``base * alpha ** (r / (r - 2))`` (class RotaryEmbedding), where
    ``alpha = max(2 ** ceil(log2(length / seq_length) + 1) - 1, 1)`` (``get_ntk_alpha``).  The length is that of the
    prompt there; **here it is** ``max_position_embeddings``: this is what the original computes for a prompt so long.
    With ``use_logn_attn`` the query at position ``i``, counted from 0, is multiplied by ``log(i + 1)`` to the base
    ``seq_length`` if ``i + 1 > seq_length`` (``logn_tensor``).
    """

    def __init__(self, config: Mapping[str, Any]) -> None:
        super().__init__()
        hidden = int(config["hidden_size"])
        self.heads, self.dim = int(config["num_attention_heads"]), int(config["kv_channels"])
        if self.heads * self.dim != hidden:
            raise ValueError("the qwen modeling file only works for num_attention_heads * kv_channels == hidden_size")
        self.rotary_dim = int(self.dim * float(config["rotary_pct"]))
        self.base, self.trained = float(config["rotary_emb_base"]), int(config["seq_length"])
        if config.get("use_dynamic_ntk"):
            context_value = math.log(int(config["max_position_embeddings"]) / self.trained, 2) + 1
            alpha = max(2 ** math.ceil(context_value) - 1, 1)
            self.base *= alpha ** (self.rotary_dim / (self.rotary_dim - 2))
        self.logn = bool(config.get("use_logn_attn"))
        self.c_attn = nn.Linear(hidden, 3 * hidden, bias=True)
        self.c_proj = nn.Linear(hidden, hidden, bias=not config["no_bias"])

    def forward(self, x: Tensor) -> Tensor:
        length = x.shape[0]
        q, k, v = self.c_attn(x).reshape(length, 3, self.heads, self.dim).unbind(dim=1)
        angles = _angles(length, self.rotary_dim, self.base)
        q, k = _rotate_halves(q, angles), _rotate_halves(k, angles)
        if self.logn:
            factors = [math.log(i, self.trained) if i > self.trained else 1.0 for i in range(1, length + 1)]
            q = q * torch.tensor(factors)[:, None, None]
        out: Tensor = self.c_proj(_causal_attention(q, k, v))
        return out


class _QwenMLP(nn.Module):
    """``c_proj(w1(x) * silu(w2(x)))``: **w2 is the gate**, w1 the up projection.

    Class QWenMLP of the qwen modeling (``a1 * F.silu(a2)``); vLLM loads ``["w2", "w1"]`` as gate and up.  Both are
    ``intermediate_size // 2`` wide.
    """

    def __init__(self, config: Mapping[str, Any]) -> None:
        super().__init__()
        hidden, inner, bias = int(config["hidden_size"]), int(config["intermediate_size"]) // 2, not config["no_bias"]
        self.w1 = nn.Linear(hidden, inner, bias=bias)
        self.w2 = nn.Linear(hidden, inner, bias=bias)
        self.c_proj = nn.Linear(inner, hidden, bias=bias)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.c_proj(self.w1(x) * _silu(self.w2(x)))
        return out


class _QwenBlock(nn.Module):
    """Pre-norm residual block: class QWenBlock of the qwen modeling."""

    def __init__(self, config: Mapping[str, Any]) -> None:
        super().__init__()
        hidden, eps = int(config["hidden_size"]), float(config["layer_norm_epsilon"])
        self.ln_1 = _RMSNorm(hidden, eps)
        self.attn = _QwenAttention(config)
        self.ln_2 = _RMSNorm(hidden, eps)
        self.mlp = _QwenMLP(config)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attn(self.ln_1(x))
        out: Tensor = x + self.mlp(self.ln_2(x))
        return out


class _QwenModel(nn.Module):
    """Embedding (unscaled), blocks, final norm: class QWenModel of the qwen modeling."""

    def __init__(self, config: Mapping[str, Any]) -> None:
        super().__init__()
        hidden = int(config["hidden_size"])
        self.wte = nn.Embedding(int(config["vocab_size"]), hidden)
        self.h = nn.ModuleList([_QwenBlock(config) for _ in range(int(config["num_hidden_layers"]))])
        self.ln_f = _RMSNorm(hidden, float(config["layer_norm_epsilon"]))

    def forward(self, ids: Tensor) -> Tensor:
        x: Tensor = self.wte(ids)
        for block in self.h:
            x = block(x)
        out: Tensor = self.ln_f(x)
        return out


class Qwen(nn.Module):
    """Qwen 1 (QWenLMHeadModel of the qwen modeling). The head is a matrix of its own, without bias."""

    def __init__(self, config: Mapping[str, Any]) -> None:
        super().__init__()
        self.transformer = _QwenModel(config)
        self.lm_head = nn.Linear(int(config["hidden_size"]), int(config["vocab_size"]), bias=False)

    def forward(self, ids: Tensor) -> Tensor:
        """Logits ``[1, n, vocab_size]`` of the one sequence ``ids`` ``[1, n]``."""
        out: Tensor = self.lm_head(self.transformer(_single(ids)))
        return out[None]


# --- ChatGLM 2 and 3 --------------------------------------------------------------------------------------------------


class _ChatGLMAttention(nn.Module):
    """Grouped-query attention with one packed projection: class SelfAttention of the chatglm modeling.

    ``query_key_value`` gives all query heads, then the groups' keys, then the groups' values, each ``kv_channels``
    wide; its bias is there if ``add_bias_linear or add_qkv_bias``, that of ``dense`` if ``add_bias_linear``.  Rotary is
    on the first half of a head only (``RotaryEmbedding(rotary_dim // 2)`` in class ChatGLMModel), in interleaved pairs,
    with the exponent over ``kv_channels // 2``.  ``rope_ratio``, where present, multiplies the base 10000 (chatglm3-32k
    modeling, vLLM); the chatglm2-32k modeling divides the positions by it instead, which is done here for configs whose
    ``_name_or_path`` is that model's.
    """

    def __init__(self, config: Mapping[str, Any]) -> None:
        super().__init__()
        hidden = int(config["hidden_size"])
        self.heads, self.groups = int(config["num_attention_heads"]), int(config["multi_query_group_num"])
        self.dim = int(config["kv_channels"])
        ratio = float(config.get("rope_ratio", 1))
        divides = config.get("_name_or_path") == "THUDM/chatglm2-6b-32k"
        self.base, self.ratio = (10000.0, ratio) if divides else (10000.0 * ratio, 1.0)
        bias = bool(config.get("add_bias_linear", False))
        qkv_bias = bias or bool(config["add_qkv_bias"])
        self.query_key_value = nn.Linear(hidden, (self.heads + 2 * self.groups) * self.dim, bias=qkv_bias)
        self.dense = nn.Linear(self.heads * self.dim, hidden, bias=bias)

    def forward(self, x: Tensor) -> Tensor:
        length = x.shape[0]
        packed = self.query_key_value(x).reshape(length, self.heads + 2 * self.groups, self.dim)
        q = packed[:, : self.heads]
        k = packed[:, self.heads : self.heads + self.groups]
        v = packed[:, self.heads + self.groups :]
        angles = _angles(length, self.dim // 2, self.base, self.ratio)
        out: Tensor = self.dense(_causal_attention(_rotate_pairs(q, angles), _rotate_pairs(k, angles), v))
        return out


class _ChatGLMMLP(nn.Module):
    """SwiGLU on one packed projection: class MLP of the chatglm modeling.

    ``dense_h_to_4h`` is ``2 * ffn_hidden_size`` wide; ``swiglu`` there is ``silu(first half) * second half``, so the
    **gate comes first**, up second.
    """

    def __init__(self, config: Mapping[str, Any]) -> None:
        super().__init__()
        hidden, self.inner = int(config["hidden_size"]), int(config["ffn_hidden_size"])
        bias = bool(config.get("add_bias_linear", False))
        self.dense_h_to_4h = nn.Linear(hidden, 2 * self.inner, bias=bias)
        self.dense_4h_to_h = nn.Linear(self.inner, hidden, bias=bias)

    def forward(self, x: Tensor) -> Tensor:
        packed = self.dense_h_to_4h(x)
        out: Tensor = self.dense_4h_to_h(_silu(packed[..., : self.inner]) * packed[..., self.inner :])
        return out


class _ChatGLMBlock(nn.Module):
    """Pre-norm residual block: class GLMBlock, with ``apply_residual_connection_post_layernorm`` false."""

    def __init__(self, config: Mapping[str, Any]) -> None:
        super().__init__()
        hidden, eps = int(config["hidden_size"]), float(config["layernorm_epsilon"])
        self.input_layernorm = _RMSNorm(hidden, eps)
        self.self_attention = _ChatGLMAttention(config)
        self.post_attention_layernorm = _RMSNorm(hidden, eps)
        self.mlp = _ChatGLMMLP(config)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.self_attention(self.input_layernorm(x))
        out: Tensor = x + self.mlp(self.post_attention_layernorm(x))
        return out


class _ChatGLMEmbedding(nn.Module):
    """The embedding table under its published name: class Embedding of the chatglm modeling (unscaled)."""

    def __init__(self, config: Mapping[str, Any]) -> None:
        super().__init__()
        self.word_embeddings = nn.Embedding(int(config["padded_vocab_size"]), int(config["hidden_size"]))

    def forward(self, ids: Tensor) -> Tensor:
        out: Tensor = self.word_embeddings(ids)
        return out


class _ChatGLMEncoder(nn.Module):
    """Blocks and final norm (``post_layer_norm`` true): class GLMTransformer of the chatglm modeling."""

    def __init__(self, config: Mapping[str, Any]) -> None:
        super().__init__()
        self.layers = nn.ModuleList([_ChatGLMBlock(config) for _ in range(int(config["num_layers"]))])
        self.final_layernorm = _RMSNorm(int(config["hidden_size"]), float(config["layernorm_epsilon"]))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        out: Tensor = self.final_layernorm(x)
        return out


class _ChatGLMModel(nn.Module):
    """Embedding, encoder, output layer (a matrix of its own, no bias): class ChatGLMModel of the chatglm modeling."""

    def __init__(self, config: Mapping[str, Any]) -> None:
        super().__init__()
        self.embedding = _ChatGLMEmbedding(config)
        self.encoder = _ChatGLMEncoder(config)
        self.output_layer = nn.Linear(int(config["hidden_size"]), int(config["padded_vocab_size"]), bias=False)

    def forward(self, ids: Tensor) -> Tensor:
        out: Tensor = self.output_layer(self.encoder(self.embedding(ids)))
        return out


class ChatGLM(nn.Module):
    """ChatGLM 2 and 3 (ChatGLMModel, ChatGLMForConditionalGeneration), causal throughout.

    Unlike ChatGLM 1, the chatglm modeling attends causally over prompt and answer alike (``is_causal=True`` where no
    mask is given, a lower triangle in ``get_masks``), with positions counted from 0.  Switches that no published
    config of these two families sets are refused rather than guessed at.
    """

    def __init__(self, config: Mapping[str, Any]) -> None:
        super().__init__()
        expected = {
            "multi_query_attention": True,
            "rmsnorm": True,
            "post_layer_norm": True,
            "add_bias_linear": False,
            "apply_residual_connection_post_layernorm": False,
        }
        for key, value in expected.items():
            if bool(config.get(key, value)) != value:
                raise ValueError(f"{key} must be {value}")
        self.transformer = _ChatGLMModel(config)

    def forward(self, ids: Tensor) -> Tensor:
        """Logits ``[1, n, padded_vocab_size]`` of the one sequence ``ids`` ``[1, n]``."""
        out: Tensor = self.transformer(_single(ids))
        return out[None]
