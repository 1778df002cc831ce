"""Folders of Baichuan, ChatGLM, Llama and Gemma with ``tokenizer.model`` alone are served: text in, text out."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import httpx
import pytest
import sentencepiece_models

from evener import LLM, SamplingParams
from evener.async_llm import AsyncLLM
from evener.config import from_overrides
from evener.engine.processes.start import start_engine
from evener.frontend.settings import FrontendSettings
from evener_conformance.naive.model import find_architecture
from evener_server.app import create_app

LIMITS = {
    "backend": "cpu", "dtype": "float32", "load": "dummy", "infer.threads": 1, "infer.kv_memory": 2**23,
    "infer.max_seq_len": 128, "infer.max_reqs": 4,
}  # fmt: skip
#: Ids of the roles' pieces are found by their text.
ROLES = ("<reserved_0>", "<reserved_1>")
GREEDY = SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True)
TEXT = "你好，the thunder\n  12 👋"


def write_folder(path: Path, kind: str) -> tuple[Path, Any]:
    """What the hub has of a model, without the code; and SentencePiece's own library."""
    model = sentencepiece_models.train(
        **sentencepiece_models.OPTIONS["Baichuan 1" if kind == "Baichuan" else "ChatGLM"]
    )
    library = sentencepiece_models.library(model)
    (path / "tokenizer.model").write_bytes(model)
    architecture = "BaichuanForCausalLM" if kind == "Baichuan" else "ChatGLMModel"
    size = library.vocab_size() + 20
    config = {**find_architecture(architecture).tiny_config(), "vocab_size": size}
    tokenizer: dict[str, Any] = {"tokenizer_class": f"{kind}Tokenizer"}
    code = f"tokenization_{kind.lower()}.{kind}Tokenizer"
    tokenizer["auto_map"] = {"AutoTokenizer": [code, None]}
    generation: dict[str, Any] = {"eos_token_id": 2}
    if kind == "Baichuan":
        tokenizer |= {"add_bos_token": False, "add_eos_token": False}
        user, assistant = (library.piece_to_id(role) for role in ROLES)
        generation |= {"user_token_id": user, "assistant_token_id": assistant}
    else:
        config |= {"padded_vocab_size": size, "_name_or_path": "THUDM/chatglm3-6b"}
    for name, content in (
        ("config", config), ("tokenizer_config", tokenizer), ("generation_config", generation),
    ):  # fmt: skip
        (path / f"{name}.json").write_text(json.dumps(content))
    return path, library


def same(ours: str, theirs: str) -> bool:
    """Equal, but for how many signs stand for bytes that are no character."""
    return re.sub("\ufffd+", "\ufffd", ours) == re.sub("\ufffd+", "\ufffd", theirs)


@pytest.mark.parametrize("kind", ["Baichuan", pytest.param("ChatGLM", marks=pytest.mark.slow)])
def test_text_goes_in_and_out_as_the_librarys(kind: str, tmp_path: Path) -> None:
    folder, library = write_folder(tmp_path, kind)
    count = library.vocab_size()
    before = [] if kind == "Baichuan" else [count + 1, count + 3]
    with LLM(folder, **LIMITS) as llm:
        (output,) = llm.generate(TEXT, GREEDY)
        assert output.prompt_token_ids == [*before, *library.encode(TEXT)]
        sample = output.outputs[0]
        assert len(sample.token_ids) == 24
        assert same(sample.text, library.decode([i for i in sample.token_ids if i < count])), sample.token_ids
        (answer,) = llm.chat([{"role": "user", "content": TEXT}], GREEDY)
        if kind == "Baichuan":
            user, assistant = (library.piece_to_id(role) for role in ROLES)
            assert answer.prompt_token_ids == [user, *library.encode(TEXT), assistant]
        else:
            said = [count + 6, *library.encode("\n"), *library.encode(TEXT), count + 7, *library.encode("\n")]
            assert answer.prompt_token_ids == [*before, *said]


TEMPLATE = "{{ bos_token }}{% for m in messages %}<start>{{ m.role }}\n{{ m.content }}<end>\n{% endfor %}"


@pytest.mark.parametrize("kind", ["Llama", pytest.param("Gemma", marks=pytest.mark.slow)])
def test_a_model_without_code_of_its_own_takes_text_and_chats(kind: str, tmp_path: Path) -> None:
    model = sentencepiece_models.train(**sentencepiece_models.OPTIONS[kind])
    library = sentencepiece_models.library(model)
    count, bos = library.vocab_size(), library.bos_id()
    config = {**find_architecture(f"{kind}ForCausalLM").tiny_config(), "vocab_size": count + 2}
    tokenizer = {"tokenizer_class": f"{kind}Tokenizer", "chat_template": TEMPLATE, "added_tokens_decoder": {
        str(count + n): {"content": text, "special": True} for n, text in enumerate(("<start>", "<end>"))}}  # fmt: skip
    (tmp_path / "tokenizer.model").write_bytes(model)
    for name, content in (("config", config), ("tokenizer_config", tokenizer)):
        (tmp_path / f"{name}.json").write_text(json.dumps(content))
    with LLM(tmp_path, **LIMITS) as llm:
        (output,) = llm.generate(TEXT, GREEDY)
        assert output.prompt_token_ids == [bos, *library.encode(TEXT)]
        ids = output.outputs[0].token_ids
        assert len(ids) == 24 and same(output.outputs[0].text, library.decode([i for i in ids if i < count])), ids
        (answer,) = llm.chat([{"role": "user", "content": TEXT}], GREEDY)
        said = [count, *library.encode(f"user\n{TEXT}"), count + 1, *library.encode("\n")]
        assert answer.prompt_token_ids == [bos, *said]


@pytest.mark.slow
async def test_a_chat_over_http_streams_the_text_that_it_gives_at_once(tmp_path: Path) -> None:
    folder, library = write_folder(tmp_path, "Baichuan")
    config = from_overrides(str(folder), LIMITS)
    llm = AsyncLLM(start_engine(config, "thread"), settings=FrontendSettings.from_config(config))
    await llm.wait_ready()
    try:
        transport = httpx.ASGITransport(create_app(llm))
        async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
            name = (await client.get("/v1/models")).json()["data"][0]["id"]
            body = {
                "model": name, "messages": [{"role": "user", "content": TEXT}], "temperature": 0, "max_tokens": 24,
                "ignore_eos": True,
            }  # fmt: skip
            whole = (await client.post("/v1/chat/completions", json=body)).json()
            streamed = (await client.post("/v1/chat/completions", json={**body, "stream": True})).text
    finally:
        await llm.close()
    chunks = [json.loads(line[6:]) for line in streamed.splitlines() if line.startswith("data: {")]
    text = "".join(choice["delta"].get("content") or "" for chunk in chunks for choice in chunk["choices"])
    assert text == whole["choices"][0]["message"]["content"] and len(text) > 3
    assert whole["usage"]["prompt_tokens"] == len(library.encode(TEXT)) + 2
