"""Experts of host layers that pass through the device in captured steps of the simulated chip, while the host computes
the others."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from expert_families import FAMILIES, FEW_BLOCKS, Configured, draw_biases, on_the_cpu, worker_of
from harsh_traffic import LIMITS, assert_same, assert_some, shrink, some, traffic
from test_captured_experts import Asking, chip, placed
from test_packed_host_experts import q4_k_m_experts

from evener.config import from_overrides
from evener.engine.controller.controller import Controller
from evener.engine.processes.start import build_controller
from evener.engine.wire.messages import NewRequest, Sampling
from evener.errors import ConfigError
from evener_conformance.reference.engine import play
from evener_inspection.explanation import explain
from evener_offload import captured_passing
from evener_offload.captured_passing import CapturedPassing, parse_part, part_for, slots_of
from evener_offload.expert_slots import ExpertSlots, room_bytes


def keys(family: str = "Qwen3Moe", part: str = "12", rows: int = 2, **more: Any) -> dict[str, Any]:
    return {"infer.cpu_layer_num": FAMILIES[family][1], "offload.pass_experts": part,
            "offload.pass_experts_rows": rows, **more}  # fmt: skip


def passing(controller: Controller) -> CapturedPassing:
    found = placed(controller)._passing
    assert found is not None
    return found


@pytest.mark.parametrize("sets", [1, 2, 3])
@pytest.mark.parametrize(
    ("family", "part"),
    [("Qwen3Moe", "12"), ("GptOss", "40"), *(pytest.param(each, "25", marks=pytest.mark.slow)
                                             for each in ("Mixtral", "DeepseekV3"))],
)  # fmt: skip
def test_passing_experts_give_the_tokens_of_a_device_that_holds_all(
    configured: Configured, monkeypatch: pytest.MonkeyPatch, family: str, part: str, sets: int
) -> None:
    """With chunks, preemption, prefix hits and aborts together, in steps of two rows or more."""
    if (family, sets) in (("GptOss", 1), ("GptOss", 3), ("Qwen3Moe", 3)):
        sets += 10  # more sets than layers
    monkeypatch.setattr(captured_passing, "SETS", sets)
    want = on_the_cpu(family)
    controller, ready = build_controller(configured(family, **keys(family, part)))
    shrink(controller, FEW_BLOCKS[family])
    assert_same(play(controller, **traffic()), want)
    stats, layers = controller.scheduler.stats, FAMILIES[family][1]
    assert stats.preemptions and stats.counters["host_expert_captured_steps"] > 10
    step = sum(each.nbytes * each.count for each in passing(controller)._order)
    passed = stats.counters["host_expert_passed_bytes"]
    assert passed > 5 * step and passed % step == 0, "each such step moves the same bytes"
    assert passed < stats.counters["host_expert_captured_steps"] * step, "steps of one row move none"
    notes = "\n".join(ready.info.manifest.notes)
    assert f"in captured steps of 2 rows or more: {part}%, in {min(sets, layers)} sets of slots" in notes
