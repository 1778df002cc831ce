"""Model families in GGUF: from GGUF's keys and tensor names to those of a model folder. Torch-free.

To add a family, add a subclass of ``Llama`` and an entry in ``FAMILIES``. Its architecture must be registered, too.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from evener.contracts.quant import BLOCKS
from evener.errors import ArchitectureError, CheckpointError
from evener_formats.gguf.header import MXFP4, GgufHeader, GgufTensor
from evener_formats.gguf.made import ExpertStack, KeysAndValues, Made, OneRow

#: Llama 3's frequency bounds and pre-training context. The file holds only the resulting divisors,
#: ``rope_freqs.weight``.
_LLAMA3 = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}

#: Names, in a layer, of gpt-oss's tensors of all experts that a folder has in another form.
_STACKS = r"ffn_(?:(?:gate|up)_exps\.(?:weight|bias)|down_exps\.weight)"

#: Names of experts that are numbered in a folder, and of what chooses them.
_NUMBERED: Mapping[str, str] = {
    "ffn_gate_inp": "mlp.gate", "ffn_gate_exps": "mlp.experts.{}.gate_proj", "ffn_up_exps": "mlp.experts.{}.up_proj",
    "ffn_down_exps": "mlp.experts.{}.down_proj",
}  # fmt: skip
#: The name, in a layer, of the gate of a shared expert, which a file has as a vector.
_SHARED_GATE = r"ffn_gate_inp_shexp\.weight"


class Llama:
    """Llama, and the names and keys that most families share.

    Args:
        header: of the file.
        floats: reads a float32 tensor of the file.

    Attributes:
        architecture, model_type: as in ``config.json``.
        permuted: whether the rows of q and k are stored in the order of interleaved rotary pairs.
        norm_offset: what the file has added to the weights of norms.
        activation: the key and value of the activation in ``config.json``.
        top: from GGUF's names of the tensors outside layers to a model folder's, without ``.weight`` or ``.bias``.
        names: the same for a layer's tensors. A name with ``{}``, in place of an expert's number, is that of a matrix
            in a stack of all experts.
        others: tensors, in a layer, whose names follow no such rule: GGUF's whole name, and a model folder's.
        experts: the key of their number in ``config.json``; empty for a family without experts.
        inner: the file's key of what ``config.json`` calls ``intermediate_size``.
    """

    architecture, model_type = "LlamaForCausalLM", "llama"
    permuted = True
    norm_offset = 0.0
    others: Mapping[str, str] = {}
    experts = ""
    inner = "feed_forward_length"
    activation: Mapping[str, str] = {"hidden_act": "silu"}
    top: Mapping[str, str] = {
        "token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head",
    }  # fmt: skip
    names: Mapping[str, str] = {
        "attn_norm": "input_layernorm", "attn_q": "self_attn.q_proj", "attn_k": "self_attn.k_proj",
        "attn_v": "self_attn.v_proj", "attn_output": "self_attn.o_proj", "attn_q_norm": "self_attn.q_norm",
        "attn_k_norm": "self_attn.k_norm", "ffn_norm": "post_attention_layernorm", "ffn_gate": "mlp.gate_proj",
        "ffn_up": "mlp.up_proj", "ffn_down": "mlp.down_proj",
    }  # fmt: skip

    def __init__(self, header: GgufHeader, floats: Callable[[GgufTensor], list[float]]) -> None:
        self.metadata, self.tensors, self._read_floats = header.metadata, header.tensors, floats
        self._prefix = str(self.metadata["general.architecture"])

    def config(self) -> dict[str, Any]:
        """The ``config.json`` that the file implies.

        Raises:
            CheckpointError: a key is missing or has a wrong value.
            ArchitectureError: the file asks for a variant that is not implemented.
        """
        if self.get("expert_count", 0) and not self.experts:
            raise ArchitectureError(
                f"the GGUF file is a {self._prefix} with {self.get('expert_count')} experts, which is not implemented "
                "for GGUF; use the model's safetensors"
            )
        heads = self.count("attention.head_count")
        config = {
            "architectures": [self.architecture], "model_type": self.model_type,
            "vocab_size": self._vocabulary(), "hidden_size": self.count("embedding_length"),
            "intermediate_size": self.count(self.inner), "num_hidden_layers": self.count("block_count"),
            "num_attention_heads": heads, "num_key_value_heads": self.count("attention.head_count_kv", heads),
            "head_dim": self._head_dim(heads), "max_position_embeddings": self.count("context_length"),
            "rms_norm_eps": self.number("attention.layer_norm_rms_epsilon"), **self.activation,
            "tie_word_embeddings": "output.weight" not in self.tensors, "dtype": self._dtype(), **self.rope(),
        }  # fmt: skip
        if any(tensor.dtype in (*BLOCKS, MXFP4) for tensor in self.tensors.values()):
            config["quantization_config"] = {"quant_method": "gguf"}
        if self.experts:
            config |= {self.experts: self.expert_count(), "num_experts_per_tok": self.count("expert_used_count")}
        return config | self.more(config)

    def expert_count(self) -> int:
        """How many experts a layer has; 0 if the family has none.

        Raises:
            CheckpointError: the file does not say it.
        """
        return self.count("expert_count") if self.experts else 0

    def more(self, config: Mapping[str, Any]) -> dict[str, Any]:
        """(optional) The family's further entries of ``config``."""
        biases = [part for part in ("attn_q", "attn_output") if f"blk.0.{part}.bias" in self.tensors]
        return {"attention_bias": bool(biases), "mlp_bias": "blk.0.ffn_up.bias" in self.tensors}

    def rope(self) -> dict[str, Any]:
        """``rope_theta`` and ``rope_scaling``."""
        theta = self.number("rope.freq_base", 10000.0)
        kind = self.get("rope.scaling.type", "none")
        if "rope_freqs.weight" in self.tensors:
            return {"rope_theta": theta, "rope_scaling": self._llama3(theta)}
        factor = self.get("rope.scaling.factor", self.get("rope.scale_linear"))
        if kind == "none" or (kind == "linear" and factor in (None, 0.0, 1.0)):
            return {"rope_theta": theta}
        scaling = {"rope_type": kind, "factor": factor}
        original = self.get("rope.scaling.original_context_length")
        if original is not None:
            scaling["original_max_position_embeddings"] = original
        return {"rope_theta": theta, "rope_scaling": scaling}

    def name(self, stored: str) -> str | None:
        """A tensor's name in a model folder; None if it is not a weight. Unknown names are returned unchanged."""
        if stored == "rope_freqs.weight":
            return None
        stem, dot, kind = stored.rpartition(".")
        if (whole := re.fullmatch(r"blk\.(\d+)\.(.+)", stored)) and whole[2] in self.others:
            return f"model.layers.{whole[1]}.{self.others[whole[2]]}"
        layer = re.fullmatch(r"blk\.(\d+)\.(\w+)", stem)
        if layer is not None and layer[2] in self.names:
            return f"model.layers.{layer[1]}.{self.names[layer[2]]}{dot}{kind}"
        return f"{self.top[stem]}{dot}{kind}" if stem in self.top else stored

    def made(self) -> Sequence[Made]:
        """(optional) Tensors of a model folder that the file has in another form. Default: none.

        Raises:
            CheckpointError: tensors of the file are missing or do not fit together.
        """
        return ()

    def found(self, *names: str) -> list[GgufTensor]:
        """The tensors of the file with these names.

        Raises:
            CheckpointError: one is missing.
        """
        if missing := [name for name in names if name not in self.tensors]:
            file = next(iter(self.tensors.values())).file
            raise CheckpointError(f"{file} lacks the tensor {missing[0]}; fetch the file again")
        return [self.tensors[name] for name in names]

    def layers_with(self, pattern: str) -> list[str]:
        """Numbers of the layers with a tensor whose name in its layer matches a regular expression."""
        found = (re.fullmatch(rf"blk\.(\d+)\.(?:{pattern})", name) for name in self.tensors)
        return list(dict.fromkeys(layer[1] for layer in found if layer is not None))

    def permuted_heads(self, stored: str) -> int:
        """The number of heads within which this tensor's rows are permuted; 0 if they are not."""
        part = re.fullmatch(r"blk\.\d+\.attn_([qk])\.(?:weight|bias)", stored)
        if part is None or not self.permuted:
            return 0
        heads = self.count("attention.head_count")
        return heads if part[1] == "q" else self.count("attention.head_count_kv", heads)

    def get(self, key: str, default: Any = None) -> Any:
        """The value of ``<architecture>.<key>``; of a list of equal values (one per layer), that value."""
        value = self.metadata.get(f"{self._prefix}.{key}", default)
        if isinstance(value, (str, bytes)) or not hasattr(value, "__len__"):
            return value
        if len(value) == 0 or any(item != value[0] for item in value):
            raise ArchitectureError(f"in the GGUF file, {self._prefix}.{key} differs between layers, which is not "
                                    "implemented; use the model's safetensors")  # fmt: skip
        return value[0]

    def count(self, key: str, default: int | None = None) -> int:
        """The value of a key that must be a whole number of at least 1."""
        value = self.get(key, default)
        if type(value) is not int or not 1 <= value < 1 << 32:
            raise self._wrong(key, value)
        return value

    def number(self, key: str, default: float | None = None) -> float:
        """The value of a key that must be a finite number."""
        value = self.get(key, default)
        if type(value) not in (int, float) or not math.isfinite(value):
            raise self._wrong(key, value)
        # The file has float32. The shortest decimal number that rounds to it is the one in the original config.
        return float(f"{value:.7g}")

    def _wrong(self, key: str, value: object) -> CheckpointError:
        what = "lacks" if value is None else f"has {value!r} for"
        return CheckpointError(f"the GGUF file {what} {self._prefix}.{key}; fetch the file again")

    def _vocabulary(self) -> int:
        embedding = self.tensors.get("token_embd.weight")
        if embedding is None or len(embedding.shape) != 2:
            raise CheckpointError(
                "the GGUF file has no token_embd.weight: it holds no model, or a part; open the first of its files"
            )
        return embedding.shape[0]

    def _head_dim(self, heads: int) -> int:
        dim = self.get("attention.key_length")
        dim = self.count("embedding_length") // heads if dim is None else self.count("attention.key_length")
        for key in ("attention.value_length", "rope.dimension_count"):
            if self.get(key, dim) != dim:
                raise ArchitectureError(
                    f"the GGUF file has {self._prefix}.{key} = {self.get(key)} for heads of {dim}, which is not "
                    "implemented"
                )
        return dim

    def _dtype(self) -> str:
        """The dtype of most bytes. For quantized blocks bfloat16, which has the range of the weights they were made
        from."""
        held: dict[str, int] = {}
        for tensor in self.tensors.values():
            held[tensor.dtype] = held.get(tensor.dtype, 0) + tensor.end - tensor.begin
        most = max(held, key=lambda dtype: held[dtype])
        return most if most in ("float32", "float16", "bfloat16") else "bfloat16"

    def _llama3(self, theta: float) -> dict[str, Any]:
        """Llama 3's rope scaling, found from the divisors in the file."""
        stored = self._read_floats(self.tensors["rope_freqs.weight"])
        factor = float(f"{max(stored, default=0.0):.7g}")
        scaling = {"rope_type": "llama3", "factor": factor, **_LLAMA3}
        if not stored or any(
            not math.isclose(found, llama3_divisor(theta, i / len(stored), scaling), rel_tol=1e-4)
            for i, found in enumerate(stored)
        ):
            raise ArchitectureError(
                "the GGUF file's rope_freqs.weight is not Llama 3's scaling, and no other is implemented for GGUF; use "
                "the model's safetensors"
            )
        return scaling


def llama3_divisor(theta: float, exponent: float, scaling: Mapping[str, Any]) -> float:
    wavelength, original = 2 * math.pi * theta**exponent, scaling["original_max_position_embeddings"]
    low, high, factor = scaling["low_freq_factor"], scaling["high_freq_factor"], scaling["factor"]
    if wavelength < original / high:
        return 1.0
    if wavelength > original / low:
        return float(factor)
    smooth = (original / wavelength - low) / (high - low)
    return float(1 / ((1 - smooth) / factor + smooth))


class Qwen2(Llama):
    """Qwen 2 and 2.5."""

    architecture, model_type = "Qwen2ForCausalLM", "qwen2"
    permuted = False

    def more(self, config: Mapping[str, Any]) -> dict[str, Any]:
        return {"use_sliding_window": False}


class Qwen3(Qwen2):
    """Qwen 3."""

    architecture, model_type = "Qwen3ForCausalLM", "qwen3"

    def more(self, config: Mapping[str, Any]) -> dict[str, Any]:
        return {"use_sliding_window": False, "attention_bias": "blk.0.attn_q.bias" in self.tensors}


class Gemma3(Llama):
    """Gemma 3, text."""

    architecture, model_type = "Gemma3ForCausalLM", "gemma3_text"
    permuted = False
    norm_offset = 1.0
    activation: Mapping[str, str] = {"hidden_activation": "gelu_pytorch_tanh"}
    names: Mapping[str, str] = {
        **Llama.names, "post_attention_norm": "post_attention_layernorm", "ffn_norm": "pre_feedforward_layernorm",
        "post_ffw_norm": "post_feedforward_layernorm",
    }  # fmt: skip

    def more(self, config: Mapping[str, Any]) -> dict[str, Any]:
        # The file lacks query_pre_attn_scalar. In the 27B model (62 layers) it is hidden size / heads, else head_dim.
        by_width = config["num_hidden_layers"] == 62
        scale = config["hidden_size"] // config["num_attention_heads"] if by_width else config["head_dim"]
        return {
            "query_pre_attn_scalar": scale, "sliding_window": self.count("attention.sliding_window"),
            "sliding_window_pattern": self.count("attention.sliding_window_pattern", 6),
            "rope_local_base_freq": self.number("rope.freq_base_swa", 10000.0),
            "final_logit_softcapping": self.get("final_logit_softcapping"), "attention_bias": False,
        }  # fmt: skip

    def rope(self) -> dict[str, Any]:
        return {**super().rope(), "rope_theta": self.number("rope.freq_base", 1000000.0)}


class Mixtral(Llama):
    """Mixtral, whose files are Llama's with experts."""

    architecture, model_type = "MixtralForCausalLM", "mixtral"
    experts = "num_local_experts"
    names: Mapping[str, str] = {
        **Llama.names, "ffn_gate_inp": "block_sparse_moe.gate", "ffn_gate_exps": "block_sparse_moe.experts.{}.w1",
        "ffn_up_exps": "block_sparse_moe.experts.{}.w3", "ffn_down_exps": "block_sparse_moe.experts.{}.w2",
    }  # fmt: skip

    def more(self, config: Mapping[str, Any]) -> dict[str, Any]:
        return {"sliding_window": None}


class Qwen2Moe(Qwen2):
    """Qwen 1.5 and Qwen 2 with experts, and a shared expert with a gate, in all layers."""

    architecture, model_type = "Qwen2MoeForCausalLM", "qwen2_moe"
    experts = "num_experts"
    names: Mapping[str, str] = {
        **Llama.names, **_NUMBERED, "ffn_gate_inp_shexp": "mlp.shared_expert_gate",
        "ffn_gate_shexp": "mlp.shared_expert.gate_proj", "ffn_up_shexp": "mlp.shared_expert.up_proj",
        "ffn_down_shexp": "mlp.shared_expert.down_proj",
    }  # fmt: skip

    def name(self, stored: str) -> str | None:
        return None if re.fullmatch(rf"blk\.\d+\.{_SHARED_GATE}", stored) else super().name(stored)

    def made(self) -> Sequence[Made]:
        return [
            OneRow(f"model.layers.{n}.mlp.shared_expert_gate.weight", *self.found(f"blk.{n}.ffn_gate_inp_shexp.weight"))
            for n in self.layers_with(_SHARED_GATE)
        ]

    def more(self, config: Mapping[str, Any]) -> dict[str, Any]:
        # llama.cpp never divides the weights of the chosen experts by their sum, and has experts in every layer.
        return super().more(config) | {
            "moe_intermediate_size": self.count("expert_feed_forward_length"), "norm_topk_prob": False,
            "shared_expert_intermediate_size": self.count("expert_shared_feed_forward_length"),
            "qkv_bias": "blk.0.attn_q.bias" in self.tensors, "decoder_sparse_step": 1, "mlp_only_layers": [],
        }  # fmt: skip


class Qwen3Moe(Qwen3):
    """Qwen 3 with experts in all layers."""

    architecture, model_type = "Qwen3MoeForCausalLM", "qwen3_moe"
    experts = "num_experts"
    names: Mapping[str, str] = {**Llama.names, **_NUMBERED}

    def more(self, config: Mapping[str, Any]) -> dict[str, Any]:
        # llama.cpp always divides the weights of the chosen experts by their sum, and has experts in every layer.
        return super().more(config) | {
            "moe_intermediate_size": self.count("expert_feed_forward_length"), "norm_topk_prob": True,
            "decoder_sparse_step": 1, "mlp_only_layers": [],
        }  # fmt: skip


class Deepseek2(Llama):
    """DeepSeek V2 and V3, R1 and their like. Files since 2025 have the up-projection of keys and values in two."""

    architecture, model_type = "DeepseekV3ForCausalLM", "deepseek_v3"
    permuted = False
    experts = "n_routed_experts"
    names: Mapping[str, str] = {
        **Llama.names, "attn_q_a": "self_attn.q_a_proj", "attn_q_a_norm": "self_attn.q_a_layernorm",
        "attn_q_b": "self_attn.q_b_proj", "attn_kv_a_mqa": "self_attn.kv_a_proj_with_mqa",
        "attn_kv_a_norm": "self_attn.kv_a_layernorm", "attn_kv_b": "self_attn.kv_b_proj", **_NUMBERED,
        "ffn_gate_shexp": "mlp.shared_experts.gate_proj",
        "ffn_up_shexp": "mlp.shared_experts.up_proj", "ffn_down_shexp": "mlp.shared_experts.down_proj",
    }  # fmt: skip

    others: Mapping[str, str] = {"exp_probs_b.bias": "mlp.gate.e_score_correction_bias"}

    def name(self, stored: str) -> str | None:
        return None if re.fullmatch(r"blk\.\d+\.attn_[kv]_b\.weight", stored) else super().name(stored)

    def made(self) -> Sequence[Made]:
        return [
            KeysAndValues(
                f"model.layers.{n}.self_attn.kv_b_proj.weight",
                *self.found(f"blk.{n}.attn_k_b.weight", f"blk.{n}.attn_v_b.weight"),
            )
            for n in self.layers_with(r"attn_k_b\.weight")
        ]

    def more(self, config: Mapping[str, Any]) -> dict[str, Any]:
        rotated = self.count("rope.dimension_count")
        key = self.count("attention.key_length_mla", self.get("attention.key_length"))
        if key <= rotated:
            raise self._wrong("attention.key_length_mla", key)
        sigmoid, groups = self.get("expert_gating_func", 1) == 2, self.get("expert_group_count", 1)
        found = {
            "num_key_value_heads": config["num_attention_heads"], "kv_lora_rank": self.count("attention.kv_lora_rank"),
            "q_lora_rank": self.get("attention.q_lora_rank"), "qk_rope_head_dim": rotated,
            "qk_nope_head_dim": key - rotated, "attention_bias": False, "num_nextn_predict_layers": 0,
            "v_head_dim": self.count("attention.value_length_mla", self.get("attention.value_length")),
            "first_k_dense_replace": self.get("leading_dense_block_count", 0), "moe_layer_freq": 1,
            "moe_intermediate_size": self.count("expert_feed_forward_length"),
            "n_shared_experts": self.get("expert_shared_count", 0),
            "routed_scaling_factor": self.number("expert_weights_scale", 1.0),
            "norm_topk_prob": bool(self.get("expert_weights_norm", False)), "n_group": groups,
            "topk_group": self.get("expert_group_used_count", 1),
        }  # fmt: skip
        if sigmoid:
            return found | {"topk_method": "noaux_tc", "scoring_func": "sigmoid"}
        method = "greedy" if groups == 1 else "group_limited_greedy"
        return found | {
            "architectures": ["DeepseekV2ForCausalLM"], "model_type": "deepseek_v2", "topk_method": method,
            "scoring_func": "softmax",
        }  # fmt: skip

    def rope(self) -> dict[str, Any]:
        found = super().rope()
        if "rope_scaling" in found and self.get("rope.scaling.yarn_log_multiplier") is not None:
            # The file has a tenth of it. In all published models both numbers are the same.
            both = float(f"{10 * self.number('rope.scaling.yarn_log_multiplier'):.6g}")
            found["rope_scaling"] |= {"mscale": both, "mscale_all_dim": both}
        return found

    def _head_dim(self, heads: int) -> int:
        return self.count("rope.dimension_count")


class GptOss(Llama):
    """gpt-oss. Rows of gate and up alternate in a folder, and are two stacks in a file."""

    architecture, model_type = "GptOssForCausalLM", "gpt_oss"
    permuted = False
    experts = "num_local_experts"
    inner = "expert_feed_forward_length"
    names: Mapping[str, str] = {
        "attn_norm": "input_layernorm", "attn_q": "self_attn.q_proj", "attn_k": "self_attn.k_proj",
        "attn_v": "self_attn.v_proj", "attn_output": "self_attn.o_proj",
        "post_attention_norm": "post_attention_layernorm", "ffn_gate_inp": "mlp.router",
    }  # fmt: skip

    others: Mapping[str, str] = {
        "attn_sinks.weight": "self_attn.sinks", "ffn_down_exps.bias": "mlp.experts.down_proj_bias",
    }  # fmt: skip

    def name(self, stored: str) -> str | None:
        return None if re.fullmatch(rf"blk\.\d+\.{_STACKS}", stored) else super().name(stored)

    def made(self) -> Sequence[Made]:
        found: list[Made] = []
        for n in self.layers_with(_STACKS):
            for name, kind, parts in (
                ("gate_up_proj", "weight", ("gate", "up")), ("gate_up_proj_bias", "bias", ("gate", "up")),
                ("down_proj", "weight", ("down",)),
            ):  # fmt: skip
                entries = self.found(*(f"blk.{n}.ffn_{part}_exps.{kind}" for part in parts))
                found.append(ExpertStack(f"model.layers.{n}.mlp.experts.{name}", entries))
        return found

    def more(self, config: Mapping[str, Any]) -> dict[str, Any]:
        # Every other layer has a window, beginning with the first: the file does not say it, nor the clamp of the
        # activation, and llama.cpp has the numbers of the published models, too.
        return {
            "attention_bias": "blk.0.attn_q.bias" in self.tensors,
            "sliding_window": self.count("attention.sliding_window"),
        }

    def rope(self) -> dict[str, Any]:
        found = super().rope()
        if found.get("rope_scaling", {}).get("rope_type") == "yarn":
            # The published config does not round the bounds between scaled and unscaled dimensions. llama.cpp does.
            found["rope_scaling"] |= {
                "truncate": False, "beta_fast": self.number("rope.scaling.yarn_beta_fast", 32.0),
                "beta_slow": self.number("rope.scaling.yarn_beta_slow", 1.0),
            }  # fmt: skip
        return found


#: The supported families, by ``general.architecture``.
FAMILIES: Mapping[str, type[Llama]] = {
    "llama": Llama, "qwen2": Qwen2, "qwen3": Qwen3, "qwen2moe": Qwen2Moe, "qwen3moe": Qwen3Moe,
    "gemma3": Gemma3, "deepseek2": Deepseek2, "gpt-oss": GptOss,
}  # fmt: skip


def family_of_file(header: GgufHeader) -> type[Llama] | None:
    """The family of a file; None if it is not supported."""
    name = str(header.metadata.get("general.architecture"))
    return Mixtral if name == "llama" and header.metadata.get("llama.expert_count", 0) else FAMILIES.get(name)
