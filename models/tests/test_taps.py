"""What layers read, for drafters that go on from it, beside transformers' hidden states."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from family_runner import prompt_of
from family_table import NEXT, Row

from evener_conformance.naive.model import NaiveModel


@pytest.mark.parametrize("family", ["LlamaForCausalLM", "Gemma2ForCausalLM", NEXT])
def test_the_kept_streams_are_what_the_layers_of_transformers_read(
    family: str, tiny_model: Any, one_thread: None
) -> None:
    model, folder = tiny_model(Row(family))
    ids = prompt_of(model.config.vocab_size)
    with torch.no_grad():
        states = model.model(torch.tensor([ids]), output_hidden_states=True).hidden_states
    naive = NaiveModel(folder)
    stack = naive.model.stack  # type: ignore[attr-defined]
    stack.taps |= dict.fromkeys(range(len(stack.layers)))
    naive.feed(ids)
    for number, found in stack.taps.items():
        torch.testing.assert_close(found, states[number][0], atol=2e-4, rtol=2e-4)
