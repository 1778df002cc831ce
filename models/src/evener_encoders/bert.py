"""BERT (Devlin et al. 2018), as bge, e5 and MiniLM have it; DistilBERT (Sanh et al. 2019): without token types."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from evener.layers import Builder
from evener.layers.config_json import activation, read_float, read_int, unsupported
from evener_encoders.encoder import TextEncoder
from evener_encoders.layers import EncoderLayerConfig, LabelHead


class Bert(TextEncoder):
    """Learned positions, token types, and a norm after each residual connection."""

    names = ("bert.embeddings.word_embeddings", "bert.encoder.layer")
    embedding_names = (
        "bert.embeddings.position_embeddings", "bert.embeddings.token_type_embeddings", "bert.embeddings.LayerNorm",
    )  # fmt: skip
    # The prefix is put before all names of a checkpoint that was saved without it.
    unread = (r"bert\.pooler\..*", r"(bert\.)?(cls|classifier)\..*")

    def __init__(self, config: Mapping[str, Any], build: Builder) -> None:
        if (kind := config.get("position_embedding_type") or "absolute") != "absolute":
            raise unsupported(config, "position_embedding_type", f"only absolute is implemented, not {str(kind)[:60]}")
        super().__init__(config, build)

    def layer(self, config: Mapping[str, Any], number: int) -> EncoderLayerConfig:
        return EncoderLayerConfig(
            hidden=read_int(config, "hidden_size"), heads=read_int(config, "num_attention_heads"),
            inner=read_int(config, "intermediate_size"), eps=read_float(config, "layer_norm_eps"),
            activation=activation(config),
        )  # fmt: skip

    def label_head(self, config: Mapping[str, Any], build: Builder) -> LabelHead:
        return LabelHead(build, ("bert.pooler.dense", "classifier"), self.hidden_size, "tanh")

    @classmethod
    def tiny_config(cls) -> dict[str, Any]:
        return {
            "architectures": ["BertModel"], "model_type": "bert", "vocab_size": 211, "hidden_size": 60,
            "num_hidden_layers": 3, "num_attention_heads": 5, "intermediate_size": 84, "hidden_act": "gelu",
            "max_position_embeddings": 128, "type_vocab_size": 2, "layer_norm_eps": 1e-12, "pad_token_id": 0,
        }  # fmt: skip


class DistilBert(TextEncoder):
    """Differs from BERT: no token types and no pooler, and other names in ``config.json`` and checkpoints."""

    names = ("distilbert.embeddings.word_embeddings", "distilbert.transformer.layer")
    embedding_names = ("distilbert.embeddings.position_embeddings", None, "distilbert.embeddings.LayerNorm")
    unread = (r"(distilbert\.)?(vocab_(transform|layer_norm|projector)|pre_classifier|classifier)\..*",)

    @classmethod
    def with_names(cls, config: Mapping[str, Any]) -> Mapping[str, Any]:
        names = {"hidden_size": "dim", "num_hidden_layers": "n_layers", "num_attention_heads": "n_heads",
                 "intermediate_size": "hidden_dim", "hidden_act": "activation"}  # fmt: skip
        return {**{name: config.get(theirs) for name, theirs in names.items()}, **config}

    def layer(self, config: Mapping[str, Any], number: int) -> EncoderLayerConfig:
        return EncoderLayerConfig(
            hidden=read_int(config, "hidden_size"), heads=read_int(config, "num_attention_heads"),
            inner=read_int(config, "intermediate_size"), eps=1e-12, activation=activation(config),
            qkv=("attention.q_lin", "attention.k_lin", "attention.v_lin"), o="attention.out_lin", up="ffn.lin1",
            down="ffn.lin2", norms=("sa_layer_norm", "output_layer_norm"),
        )  # fmt: skip

    def label_head(self, config: Mapping[str, Any], build: Builder) -> LabelHead:
        return LabelHead(build, ("pre_classifier", "classifier"), self.hidden_size, "relu")

    @classmethod
    def tiny_config(cls) -> dict[str, Any]:
        return {
            "architectures": ["DistilBertModel"], "model_type": "distilbert", "vocab_size": 211, "dim": 60,
            "n_layers": 3, "n_heads": 5, "hidden_dim": 84, "activation": "gelu", "max_position_embeddings": 128,
            "pad_token_id": 0,
        }  # fmt: skip
