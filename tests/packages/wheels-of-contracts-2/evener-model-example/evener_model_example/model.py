"""The architecture: its layers, the names of their weights, and the state of each layer. It computes nothing."""

from evener.layers import AttentionConfig, CausalLM, MLPConfig, RotaryConfig
from evener.layers.config_json import activation, require


class ExampleForCausalLM(CausalLM):
    """Llama with a norm on each query and key head: say here what your architecture does differently."""

    oracle = "transformers"

    def attention(self, config):
        dim = require(config, "head_dim")
        layer = AttentionConfig(
            heads=require(config, "num_attention_heads"),
            kv_heads=require(config, "num_key_value_heads"),
            head_dim=dim,
            rotary=RotaryConfig.from_config(config, dim),
            qk_norm=True,
        )
        return [layer] * require(config, "num_hidden_layers")

    def mlp(self, config, layer):
        return MLPConfig(inner=require(config, "intermediate_size"), activation=activation(config))

    @classmethod
    def tiny_config(cls):
        """Odd sizes on purpose: they find errors that round sizes hide."""
        return {
            "architectures": ["ExampleForCausalLM"], "model_type": "example", "hidden_act": "silu",
            "vocab_size": 97, "hidden_size": 48, "intermediate_size": 80, "num_hidden_layers": 3,
            "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 12, "rope_theta": 10000.0,
            "rms_norm_eps": 1e-6, "max_position_embeddings": 128, "tie_word_embeddings": False,
        }  # fmt: skip
