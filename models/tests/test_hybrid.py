"""Hybrid models: recurrent layers and gated attention give transformers' logits, however the prompt is cut."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from evener.testing.naive import NaiveModel, find_architecture

NEXT = "Qwen3NextForCausalLM"
CASES: dict[str, dict[str, Any]] = {
    "Qwen3-Next": {},
    "with biases, and as many value heads as key heads": {"attention_bias": True, "linear_num_value_heads": 2},
    "by layer type, with a short convolution": {
        "layer_types": ["full_attention", "linear_attention", "linear_attention", "full_attention"],
        "linear_conv_kernel_dim": 2, "num_key_value_heads": 3,
    },
}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
@pytest.mark.filterwarnings("ignore::UserWarning")
def test_logits_equal_transformers_in_one_piece_in_chunks_and_token_by_token(case: str, tiny_model: Any) -> None:
    model, folder = tiny_model({**find_architecture(NEXT).tiny_config(), **CASES[case]})
    ids = torch.randint(0, model.config.vocab_size, (41,), generator=torch.Generator().manual_seed(1)).tolist()
    with torch.inference_mode():
        theirs = model(torch.tensor([ids])).logits[0]
    assert theirs.std() > 0.5, "the model is too flat to show a difference"
    ours = NaiveModel(folder)
    for chunk in (None, 7, 1):
        torch.testing.assert_close(ours.logits(ids, chunk), theirs, atol=5e-4, rtol=1e-4)
