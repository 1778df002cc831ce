"""Tiny families of which most are experts, and runs of them on the CPU."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from harsh_traffic import LIMITS, traffic

from evener.config.schema import Config
from evener.engine.controller.controller import Controller
from evener.engine.processes.start import build_controller
from evener.engine.worker.inline_executor import InlineExecutor
from evener.engine.worker.worker import Worker
from evener_conformance.reference.engine import RunResult, play, small_config

#: ``configured("Qwen3Moe", **keys)``: the family on the simulated chip.
Configured = Callable[..., Config]
HEADS = {"num_attention_heads": 4, "num_key_value_heads": 4}
#: Families with so many experts that they are most of the model, and how many of their layers have experts.
FAMILIES: dict[str, tuple[dict[str, Any], int]] = {
    "Qwen3Moe": ({**HEADS, "num_experts": 96, "moe_intermediate_size": 64, "num_hidden_layers": 3}, 3),
    "DeepseekV3": ({**HEADS, "n_routed_experts": 160, "moe_intermediate_size": 64, "num_hidden_layers": 4,
                    "first_k_dense_replace": 2}, 2),
    "GptOss": ({**HEADS, "num_local_experts": 64, "intermediate_size": 64}, 4),
    "Mixtral": ({**HEADS, "num_local_experts": 64, "intermediate_size": 128, "num_hidden_layers": 3}, 3),
}  # fmt: skip


#: Blocks of state that two long requests do not fit: gpt-oss needs some for its windows.
FEW_BLOCKS = {"Qwen3Moe": 3, "DeepseekV3": 3, "GptOss": 5, "Mixtral": 3}


# Most tests compare with it.
@cache
def on_the_cpu(family: str = "Qwen3Moe") -> RunResult:
    """The answers to ``traffic`` of the family on the CPU. Its weights are the same each time."""
    with TemporaryDirectory() as folder:
        keys = {**LIMITS, "backend": "cpu", "infer.block_size": 128}
        config = small_config(Path(folder) / "model", family, FAMILIES[family][0], **keys)
        return play(build_controller(config)[0], **traffic())


def worker_of(controller: Controller) -> Worker:
    assert isinstance(controller.executor, InlineExecutor)
    return controller.executor.worker
