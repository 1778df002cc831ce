"""Checkpoints in NVFP4 and NF4, from their files to tokens, with Triton's kernels under its interpreter: they stay
packed, also in the plan of two ranks, and the tokens are those of the CPU's kernels."""

from __future__ import annotations

from pathlib import Path

import interpreted  # noqa: F401  (repairs the interpreter)
import pytest
from family_runner import SMALL
from stored_models import greedy, prompt
from test_integers_end_to_end import checkpoint

from evener.config import from_overrides
from evener.engine.processes.start import build_controller
from evener.engine.wire.messages import NewRequest, Sampling
from evener_conformance.reference.engine import play
from evener_inspection.explanation import explain

COUNT = 4


@pytest.mark.parametrize(
    ("family", "kind"),
    [("Qwen3", "nvfp4"),
     *(pytest.param(*case, marks=pytest.mark.slow)
       for case in (("Qwen3", "nf4"), ("Qwen3Moe", "nvfp4"), ("Qwen3Moe", "nf4")))],
)  # fmt: skip
def test_tables_stay_packed_and_give_the_same_tokens(
    family: str, kind: str, tmp_path: Path, interpreted_backend: None
) -> None:
    _, folder = checkpoint(tmp_path, family, kind)
    ids, keys = prompt(family)[:6], {**SMALL, "backend": "interpreted"}
    request = NewRequest(id="a", prompt=ids, max_tokens=COUNT, sampling=Sampling(temperature=0.0))
    config = from_overrides(str(folder), keys)
    controller, ready = build_controller(config)
    assert play(controller, [request]).tokens["a"] == greedy(folder, ids, COUNT)
    planned, memory = explain(config)["memory"]["weights"], ready.info.memory
    assert memory.weights == memory.measured_weights == planned
    for ranks in (1, 2):
        found = explain(from_overrides(str(folder), {**keys, "infer.tp_size": ranks}))
        # QKV, output, gate and up, and down of two layers.
        assert found["packings"]["triton.packed"] == 8 and not found["dequantized"]
