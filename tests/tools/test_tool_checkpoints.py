"""Checkpoints that quantization tools themselves wrote: each layer has the tool's values, and the engine gives the
tokens of transformers with these values."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from family_oracles import logits_of
from family_runner import ANSWER, assert_naive_logits, prompt_of
from safetensors.torch import load_file
from stored_models import greedy

from evener.loading.checkpoint import open_checkpoint
from evener.loading.scheme import pick_scheme
from evener_conformance.naive.model import NaiveModel
from evener_conformance.oracle import Comparison, compare_greedy
from evener_formats.plugin import evener_quant_schemes

SCHEMES = evener_quant_schemes()
pytestmark = pytest.mark.tools
#: Where ``make test-tools`` wrote them: TOOL/CASE/checkpoint and, with the tool's values, TOOL/CASE/plain.
ROOT = Path(os.environ.get("EVENER_TOOL_CHECKPOINTS", "none"))


def written() -> list[tuple[str, str]]:
    """(tool, case) of everything that was written or failed to be."""
    found = []
    for file in sorted(ROOT.glob("*/written.json")):
        found += [(file.parent.name, case) for case in json.loads(file.read_text())["cases"]]
    return found


@pytest.mark.parametrize(("tool", "case"), written())
def test_values_and_tokens_are_those_of_the_tool(
    tool: str, case: str, record_property: Callable[[str, object], None], one_thread: None
) -> None:
    from transformers import AutoModelForCausalLM

    facts, folder = json.loads((ROOT / tool / "written.json").read_text()), ROOT / tool / case
    for key, value in (("tool", tool), ("version", facts["version"]), ("case", case)):
        record_property(key, value)
    assert not facts["cases"][case], f"{tool} did not write {case}: {facts['cases'][case]}"
    plain, checkpoint = load_file(folder / "plain/model.safetensors"), open_checkpoint(folder / "checkpoint")
    scheme = pick_scheme(checkpoint.config, SCHEMES, checkpoint=checkpoint)
    for name in json.loads((folder / "plain/quantized.json").read_text()):
        part = scheme.part(name, checkpoint.headers)
        assert part is not None and not part.format.plain, name
        roles = scheme.tensors(name, checkpoint.headers)
        stored = {role: checkpoint.tensor(each) for role, each in roles.items()}
        ours = scheme.dequantize(replace(part, tensors=stored), "float32")
        # Some tools multiply in another order.
        torch.testing.assert_close(ours, plain[name], rtol=1e-6, atol=1e-9)
    model = AutoModelForCausalLM.from_pretrained(folder / "plain", dtype=torch.float32, attn_implementation="eager")
    oracle, ids = logits_of(model.eval()), prompt_of(256)
    assert_naive_logits(NaiveModel(folder / "checkpoint", schemes=SCHEMES), oracle(ids), ids, 1e-3)
    result = Comparison()

    def answer(tokens: Sequence[int], count: int) -> list[int]:
        return greedy(folder / "checkpoint", list(tokens), count, **{"infer.quant_activations": "keep"})

    compare_greedy(oracle, [ids], [answer(ids, ANSWER)], answer, result)
    result.check()
