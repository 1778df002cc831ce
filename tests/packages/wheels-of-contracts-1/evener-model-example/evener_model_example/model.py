"""The family: which layers it has, what their weights are called, what each layer remembers. It computes nothing."""

from evener.layers import AttentionConfig, CausalLM, MLPConfig, RotaryConfig
from evener.layers.settings import activation, need


class ExampleForCausalLM(CausalLM):
    """Llama with normalized heads of queries and keys: say here what your family does otherwise."""

    oracle = "transformers"

    def attention(self, config):
        dim = need(config, "head_dim")
        layer = AttentionConfig(
            heads=need(config, "num_attention_heads"),
            kv_heads=need(config, "num_key_value_heads"),
            head_dim=dim,
            rotary=RotaryConfig.from_config(config, dim),
            qk_norm=True,
        )
        return [layer] * need(config, "num_hidden_layers")

    def mlp(self, config, layer):
        return MLPConfig(inner=need(config, "intermediate_size"), activation=activation(config))

    @classmethod
    def tiny_config(cls):
        """Odd sizes on purpose: they find what round ones hide."""
        return {
            "architectures": ["ExampleForCausalLM"],
            "model_type": "example",
            "hidden_act": "silu",
            "vocab_size": 97,
            "hidden_size": 48,
            "intermediate_size": 80,
            "num_hidden_layers": 3,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "head_dim": 12,
            "rope_theta": 10000.0,
            "rms_norm_eps": 1e-6,
            "max_position_embeddings": 128,
            "tie_word_embeddings": False,
        }
