"""A server with adapters, from its processes to its answers: those of merged weights."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from lora_files import merge, write_adapter, write_model
from served import Served

from evener import LLM, SamplingParams
from evener_conformance.tiny_tokenizer import VOCAB_SIZE, write_tiny_tokenizer

SIZES = {"hidden_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16,
         "vocab_size": VOCAB_SIZE}  # fmt: skip
KEYS = {"dtype": "float32", "infer.kv_memory": 2**22, "infer.max_seq_len": 128, "infer.max_reqs": 4, "infer.threads": 1}
PROMPT = "Adapters of three kinds"


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The model, below ``adapters`` those of different ranks, and the model with each of them."""
    root = tmp_path_factory.mktemp("served")
    found = {"model": write_model(root / "model", changes=SIZES), "adapters": root / "adapters"}
    for name, rank in (("one", 2), ("two", 7)):
        adapter = write_adapter(root / "adapters" / name, found["model"], rank, seed=rank)
        found[name] = merge(root / f"{name}-merged", found["model"], adapter)
    for folder in (found["model"], found["one"], found["two"]):
        write_tiny_tokenizer(folder)
    return found


@pytest.fixture(scope="module")
def expected(folders: dict[str, Path]) -> dict[str, str]:
    """What the models say, by the name under which the server has them."""
    texts = {}
    for name, folder in (("base", "model"), ("one", "one"), ("two", "two")):
        with LLM(folders[folder], **KEYS) as llm:
            texts[name] = llm.generate(PROMPT, SamplingParams(temperature=0, max_tokens=12))[0].outputs[0].text
    assert len(set(texts.values())) == 3
    return texts


@pytest.fixture(scope="module")
def served(folders: dict[str, Path]) -> Iterator[Served]:
    settings = [f"{key}={value}" for key, value in KEYS.items()]
    settings += ["infer.max_loras=1", f"infer.lora_modules=one={folders['adapters'] / 'one'}"]
    settings += [f"server.lora_folder={folders['adapters']}", "serve.served_model_name=base"]
    server = Served.warm(folders["model"], *settings)
    with server:
        yield server


def ask(served: Served, model: str, **fields: Any) -> Any:
    body = {"model": model, "prompt": PROMPT, "max_tokens": 12, "temperature": 0, **fields}
    return served.http.post("/v1/completions", json=body)


def test_a_server_answers_with_adapters_that_share_one_place(served: Served, expected: dict[str, str]) -> None:
    body = {"lora_name": "two", "lora_path": "two"}
    assert served.http.post("/v1/load_lora_adapter", json=body).status_code == 200
    names = [card["id"] for card in served.get("/v1/models").json()["data"]]
    assert names == ["base", "one", "two"]
    for name in ("one", "two", "base", "one", "two"):
        answer = ask(served, name).json()
        assert (answer["model"], answer["choices"][0]["text"]) == (name, expected[name])
    streamed = ask(served, "two", stream=True).text
    events = [json.loads(line[6:]) for line in streamed.split("\n\n") if line.startswith("data: {")]
    assert "".join(event["choices"][0]["text"] for event in events if event["choices"]) == expected["two"]
    assert served.http.post("/v1/unload_lora_adapter", json={"lora_name": "two"}).status_code == 200
    refused = ask(served, "two")
    assert refused.status_code == 404 and "this server has 'base', 'one'" in refused.json()["error"]["message"]
    assert ask(served, "one").json()["choices"][0]["text"] == expected["one"]
