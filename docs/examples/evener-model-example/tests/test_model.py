"""The same numbers as somebody else's implementation: here transformers' Qwen3, which this family starts as."""

import json

import pytest
import torch
from evener import LLM, SamplingParams
from evener.testing.naive import NaiveModel
from evener_model_example.model import ExampleForCausalLM
from transformers import Qwen3Config, Qwen3ForCausalLM


@pytest.fixture
def oracle(tmp_path):
    config = ExampleForCausalLM.tiny_config()
    torch.manual_seed(0)
    model = Qwen3ForCausalLM(Qwen3Config(**config)).eval()
    for parameter in model.parameters():  # the usual start is too flat to show a difference
        torch.nn.init.normal_(parameter, std=0.2)
    model.save_pretrained(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps(config))
    return model


PROMPT = [7 * i % 97 for i in range(40)]


def test_the_logits_are_the_oracle_s(oracle, tmp_path):
    with torch.inference_mode():
        expected = oracle(torch.tensor([PROMPT])).logits[0]
    torch.testing.assert_close(NaiveModel(tmp_path).logits(PROMPT), expected, atol=1e-4, rtol=1e-4)


def test_the_engine_s_greedy_tokens_are_the_oracle_s(oracle, tmp_path):
    greedy = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True, detokenize=False)
    with LLM(tmp_path, dtype="float32") as llm:
        ours = llm.generate(PROMPT, greedy)[0].outputs[0].token_ids
    everything = torch.ones(1, len(PROMPT), dtype=torch.long)  # else a token that is pad_token_id is masked
    theirs = oracle.generate(
        torch.tensor([PROMPT]), attention_mask=everything, max_new_tokens=8, do_sample=False, eos_token_id=None
    )
    assert ours == theirs[0, 40:].tolist()
