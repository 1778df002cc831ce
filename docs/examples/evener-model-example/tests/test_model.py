"""The model gives the same numbers as another implementation, here Qwen3 of transformers."""

import json

import pytest
import torch
from evener import LLM, SamplingParams
from evener_conformance.naive.model import NaiveModel
from evener_conformance.oracle import Comparison, compare_greedy
from evener_model_example.model import ExampleForCausalLM
from transformers import Qwen3Config, Qwen3ForCausalLM


@pytest.fixture
def oracle(tmp_path):
    config = ExampleForCausalLM.tiny_config()
    torch.manual_seed(0)
    model = Qwen3ForCausalLM(Qwen3Config(**config)).eval()
    for parameter in model.parameters():  # the default initial values are too small to show a difference
        torch.nn.init.normal_(parameter, std=0.2)
    model.save_pretrained(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps(config))
    return model


PROMPT = [7 * i % 97 for i in range(40)]


def logits_of(oracle):
    """A function from n token ids to the oracle's logits, [n, vocab]."""
    return torch.inference_mode()(lambda ids: oracle(torch.tensor([ids])).logits[0])


def test_the_logits_equal_the_oracle(oracle, tmp_path):
    expected = logits_of(oracle)(PROMPT)
    torch.testing.assert_close(NaiveModel(tmp_path).logits(PROMPT), expected, atol=1e-4, rtol=1e-4)


def test_the_greedy_tokens_equal_the_oracle(oracle, tmp_path):
    result = Comparison()
    with LLM(tmp_path, dtype="float32") as llm:

        def answer(prompt, count):  # also continues after a tie, from the oracle's token
            greedy = SamplingParams(temperature=0, max_tokens=count, ignore_eos=True, detokenize=False)
            return llm.generate(list(prompt), greedy)[0].outputs[0].token_ids

        compare_greedy(logits_of(oracle), [PROMPT], [answer(PROMPT, 32)], resume=answer, result=result)
    result.check()  # allows ties: two logits closer than 1e-4, whose order depends on rounding
