"""Tiny families of which most are experts, and runs of them on the CPU."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
import torch
from harsh_traffic import LIMITS, traffic

from evener.config.schema import Config
from evener.contracts.declared import CallSite
from evener.contracts.device import Device
from evener.engine.controller.controller import Controller
from evener.engine.processes.start import build_controller
from evener.engine.worker.inline_executor import InlineExecutor
from evener.engine.worker.worker import Worker
from evener.layers.builder import Builder
from evener_backend_cpu import experts
from evener_conformance.graph.record import RecordedReplay
from evener_conformance.reference.engine import RunResult, play, small_config
from evener_inspection.explanation import explain

#: ``configured("Qwen3Moe", **keys)``: the family on the simulated chip.
Configured = Callable[..., Config]
#: The call site of a block of experts, and the values of its weights.
Block = tuple[CallSite, Any]
HEADS = {"num_attention_heads": 4, "num_key_value_heads": 4}
#: Families with so many experts that they are most of the model, and how many of their layers have experts.
FAMILIES: dict[str, tuple[dict[str, Any], int]] = {
    "Qwen3Moe": ({**HEADS, "num_experts": 96, "moe_intermediate_size": 64, "num_hidden_layers": 3}, 3),
    "DeepseekV3": ({**HEADS, "n_routed_experts": 80, "moe_intermediate_size": 128, "num_hidden_layers": 4,
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


def capture_prompts(controller: Controller) -> None:
    """State of the simulated chip gets all lengths with each update of a replay, so it can be captured in prompts, too.
    It does not say so, because it is for updates only."""
    for group in worker_of(controller).assembly.geometry.groups:
        group.provider.graph = "any"


def refuse_in_replays(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the CPU's experts fail while a replay runs."""
    real, bind, replaying = RecordedReplay.__call__, experts._Stacks.bind, threading.Event()

    def replay(self: RecordedReplay) -> None:
        replaying.set()
        real(self)
        replaying.clear()

    def refused(*arguments: Any) -> Any:
        if replaying.is_set():
            raise ValueError("a wrong tensor")
        return bind(*arguments)

    monkeypatch.setattr(RecordedReplay, "__call__", replay)
    monkeypatch.setattr(experts._Stacks, "bind", refused)


def assert_auto_leaves_room_for_slots(configured: Configured, key: str, value: str) -> None:
    """Of a device that lacks nine tenths of a layer's experts, ``infer.cpu_layer_num=auto`` puts one layer on the host,
    and two where slots have to fit as well, because of ``value`` of ``key``."""
    roomy = {"infer.max_reqs": 16}
    every, three = explain(configured(**roomy))["memory"], configured(**roomy, **{"infer.cpu_layer_num": 3})
    taken, lacking = 2**30 - every["free"], (every["weights"] - explain(three)["memory"]["weights"]) // 3 * 9 // 10
    memory = int((every["total"] - lacking) / 0.94) + taken
    for how, layers in (("off", 1), (value, 2)):
        keys = {"infer.cpu_layer_num": "auto", "simulated.memory": memory, key: how}
        found = explain(configured(**roomy, **keys))
        assert found["memory"]["host_layers"] == layers and found["memory"]["problem"] is None


def blocks_of(build: Builder) -> list[Block]:
    """The blocks of experts."""
    groups = {id(group.fields["router"]): group.values for group in build.groups if group.fields.get("router")}
    return [(site, groups[id(site.static["router"])]) for site in build.sites if site.op == "moe_block"]


def draw_biases(blocks: Sequence[Block], generator: torch.Generator) -> None:
    """Give these blocks the same random biases, if the family has any: random weights have none."""
    for name in ("gate_up_bias", "down_bias"):
        first, *others = (getattr(weights, name) for _, weights in blocks)
        if first is not None:
            first.copy_(torch.randn(first.shape, generator=generator))
            for bias in others:
                bias.copy_(first)


def results_of(blocks: Sequence[Block], tokens: int, generator: torch.Generator, device: Device) -> list[torch.Tensor]:
    """What these blocks, on the simulated ``device``, make of the same random rows."""
    shape = tokens, blocks[0][0].static["hidden"]
    x, residual = (torch.randn(shape, generator=generator).to("simulated") for _ in range(2))
    with torch.inference_mode():
        rows = [site.at(tokens)(x, residual, weights)[0] for site, weights in blocks]
    return [device.readback(each).wait() for each in rows]
