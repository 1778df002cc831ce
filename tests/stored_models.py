"""What tests of models with stored quantized weights share: sizes that every format divides, and greedy tokens."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from family_runner import SMALL, prompt_of

from evener.config import from_overrides
from evener.engine.processes.start import build_controller
from evener.engine.wire.messages import NewRequest, Sampling
from evener_conformance.naive.model import find_architecture
from evener_conformance.reference.engine import play

SIZES: dict[str, dict[str, Any]] = {
    "Qwen3": {"hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 4, "num_key_value_heads": 2,
              "head_dim": 16},
    "Qwen3Moe": {"hidden_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16,
                 "moe_intermediate_size": 64},
    "Mixtral": {"hidden_size": 64, "intermediate_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2,
                "head_dim": 16},
    "DeepseekV3": {"hidden_size": 64, "intermediate_size": 128, "moe_intermediate_size": 64, "q_lora_rank": 32,
                   "kv_lora_rank": 32, "v_head_dim": 32, "qk_nope_head_dim": 32, "qk_rope_head_dim": 32},
}  # fmt: skip
#: Weights that such checkpoints leave as they are.
KEPT = ("embed_tokens", "lm_head", "norm", "mlp.gate.", "moe.gate.")


def greedy(folder: Path, ids: list[int], count: int, **more: Any) -> list[int]:
    """The next ``count`` tokens after ``ids``, on one rank; ``more``: keys of the configuration."""
    controller, _ = build_controller(from_overrides(str(folder), {**SMALL, **more}))
    request = NewRequest(id="a", prompt=list(ids), max_tokens=count, sampling=Sampling(temperature=0.0))
    return play(controller, [request]).tokens["a"]


def prompt(family: str) -> list[int]:
    """Ids of a family's tiny vocabulary."""
    return prompt_of(find_architecture(f"{family}ForCausalLM").tiny_config()["vocab_size"])
