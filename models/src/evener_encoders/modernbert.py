"""ModernBERT (Warner et al. 2024): rotary positions, a gated MLP, and windows on all but each third layer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from evener.layers import Builder, RotaryConfig
from evener.layers.config_json import activation, read_flag, read_float, read_int, unsupported
from evener_encoders.encoder import TextEncoder
from evener_encoders.layers import EncoderLayerConfig, LabelHead, Norm
from evener_models.config_values import layer_count

_FULL, _WINDOW = "full_attention", "sliding_attention"


class ModernBert(TextEncoder):
    """Norms come before attention and MLP; the first layer has none before attention."""

    names = ("model.embeddings.tok_embeddings", "model.layers")
    embedding_names = (None, None, "model.embeddings.norm")
    last_norm = "model.final_norm"
    unread_by_head = (r"decoder\..*",)
    unread = (r"(model\.)?(head|decoder|classifier)\..*",)

    def layer(self, config: Mapping[str, Any], number: int) -> EncoderLayerConfig:
        kind = _layer_types(config)[number]
        hidden, heads = read_int(config, "hidden_size"), read_int(config, "num_attention_heads")
        # transformers 4 has the two bases apart.
        old = {_FULL: "global_rope_theta", _WINDOW: "local_rope_theta"}[kind]
        base = read_float(config, old) if config.get(old) is not None else None
        return EncoderLayerConfig(
            hidden=hidden, heads=heads, inner=read_int(config, "intermediate_size"),
            eps=read_float(config, "norm_eps", default=1e-5),
            activation=activation({"hidden_activation": "gelu", **config}, "hidden_activation"),
            window=None if kind == _FULL else read_int(config, "local_attention") // 2,
            rotary=RotaryConfig.from_config(config, hidden // heads, kind, base), norm_first=True, gated=True,
            attention_bias=read_flag(config, "attention_bias"), mlp_bias=read_flag(config, "mlp_bias"),
            norm_bias=read_flag(config, "norm_bias"), qkv=("attn.Wqkv",), o="attn.Wo", up="mlp.Wi",
            down="mlp.Wo", norms=("attn_norm" if number else None, "mlp_norm"),
        )  # fmt: skip

    def label_head(self, config: Mapping[str, Any], build: Builder) -> LabelHead:
        layer = self.layer(config, 0)
        act = activation({"classifier_activation": "gelu", **config}, "classifier_activation")
        norm = Norm(build, "head.norm", self.hidden_size, layer.eps, layer.norm_bias)
        bias = read_flag(config, "classifier_bias")
        return LabelHead(build, ("head.dense", "classifier"), self.hidden_size, act, bias, norm)

    @classmethod
    def tiny_config(cls) -> dict[str, Any]:
        return {
            "architectures": ["ModernBertModel"], "model_type": "modernbert", "vocab_size": 211, "hidden_size": 60,
            "num_hidden_layers": 4, "num_attention_heads": 5, "intermediate_size": 84, "hidden_activation": "gelu",
            "max_position_embeddings": 128, "norm_eps": 1e-5, "local_attention": 8, "global_attn_every_n_layers": 3,
            "global_rope_theta": 160000.0, "local_rope_theta": 10000.0, "pad_token_id": 0, "bos_token_id": 1,
            "eos_token_id": 2, "cls_token_id": 1, "sep_token_id": 2,
        }  # fmt: skip


def _layer_types(config: Mapping[str, Any]) -> Sequence[str]:
    count, types = layer_count(config), config.get("layer_types")
    if types is None:
        every = read_int(config, "global_attn_every_n_layers", default=3)
        return [_WINDOW if i % every else _FULL for i in range(count)]
    if not isinstance(types, list) or len(types) != count or not set(map(str, types)) <= {_FULL, _WINDOW}:
        raise unsupported(config, "layer_types", f"it must name {_FULL} or {_WINDOW} for each of {count} layers")
    return types
