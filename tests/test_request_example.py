"""The example of request plugins: installed from its wheel, one adds the perplexity of a prompt to its answer, and one
puts a picture's rows of embeddings into a prompt."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from docs_blocks import DOCS, python, wheel_site
from served import tiny_model

EXAMPLE = DOCS / "examples/evener-request-example"
RUN = """
import json, math, sys
import numpy as np
from evener import LLM, SamplingParams

keys = {"load": "dummy", "dtype": "float32", "infer.kv_memory": "4MiB", "infer.threads": 1, "seed": 3,
        "cpu.native": "off", "infer.max_seq_len": 64, "infer.max_reqs": 2, "infer.step_tokens": 64}
greedy = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)

def answer(llm, prompt, **more):
    return llm.generate(prompt, SamplingParams(temperature=0, max_tokens=6, ignore_eos=True, **more))[0]

with LLM("model", **keys) as llm:
    plain = answer(llm, "hello", prompt_logprobs=0)
    ids = plain.prompt_token_ids
    # A picture whose rows are the embeddings of a part of the prompt changes nothing.
    weight = llm._client.controller.executor.worker.assembly.model.embedding.weight.value
    np.save("pictures/part.npy", weight[ids[1:3]].float().numpy())
    np.save("pictures/other.npy", np.ones((2, weight.shape[1]), dtype=np.float32))
    tokenizer = llm.tokenizer
    before, after = "h", tokenizer.decode(ids[3:])
    values = [next(iter(each.values())) for each in plain.prompt_logprobs if each is not None]

both = {"request.plugins": ["pictures", "perplexity"], "request-example.pictures": "pictures"}
found = {"plain": plain.outputs[0].token_ids, "perplexity": math.exp(-sum(values) / len(values)), "ids": ids}
with LLM("model", **keys, **both) as llm:
    told = answer(llm, "hello")
    found["text"], found["text tokens"] = told.outputs[0].text, told.outputs[0].token_ids
    found["same"] = answer(llm, f"{before}<picture part>{after}").outputs[0].token_ids
    found["other"] = answer(llm, f"{before}<picture other>{after}").outputs[0].token_ids
    found["errors"] = []
    for prompt in ("<picture gone>", "<picture part>" * 17):
        try:
            answer(llm, prompt)
        except Exception as error:
            found["errors"].append(f"{type(error).__name__}: {error}")
    found["kept"] = [len(p._found) for _, p in llm._frontend.plugins._plugins if hasattr(p, "_found")]
json.dump(found, sys.stdout)
"""


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Its wheel, built and unpacked into a folder for PYTHONPATH."""
    return wheel_site(EXAMPLE, tmp_path_factory.mktemp("request"))


def test_both_plugins_do_what_they_say(site: Path, tmp_path: Path) -> None:
    tiny_model(tmp_path / "model")
    (tmp_path / "pictures").mkdir()
    done = python(site, tmp_path, "-c", RUN)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["text"].endswith(f" perplexity {found['perplexity']:.4f}")
    assert found["text tokens"] == found["same"] == found["plain"] != found["other"]
    assert found["errors"] == [
        "RequestError: there is no picture gone",
        "RequestError: there are 17 pictures in the prompt, and at most 16 are allowed",
    ]
    assert found["kept"] == [0]
