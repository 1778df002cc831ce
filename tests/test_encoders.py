"""Encoders of texts equal transformers': vectors, scores of pairs, texts alone and in company."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, cast

import httpx
import pytest
import torch
from family_oracles import randomise
from wordpiece import write_wordpiece

from evener import LLM
from evener.async_llm import AsyncLLM
from evener.config import from_overrides
from evener_conformance.naive.model import find_architecture
from evener_server.app import create_app

SMALL = {"dtype": "float32", "infer.max_reqs": 4, "infer.threads": 1}
#: One of one token, one that fills the context, and between; as many as run at a time, and more.
TEXTS = [[5], [7 * i % 190 + 3 for i in range(128)], [3, 4, 5, 9, 6], [7, 8, 3, 8, 9, 8, 4, 5, 9], [9, 9], [8] * 77]
FAMILIES = ("Bert", "DistilBert", "XLMRoberta", "Roberta", "ModernBert")
POOLED: Mapping[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "mean": lambda rows: rows.mean(0), "cls": lambda rows: rows[0], "last": lambda rows: rows[-1],
}  # fmt: skip


def make(folder: Path, architecture: str, **changes: Any) -> Any:
    """transformers' model of an architecture's tiny config, random and saved in ``folder``."""
    import transformers

    config = {**find_architecture(architecture).tiny_config(), "architectures": [architecture], **changes}
    made = transformers.AutoConfig.for_model(**config)
    model = cast("Any", getattr(transformers, architecture))(made).eval()
    randomise(model)
    noise = torch.Generator().manual_seed(3)
    for module in model.modules():
        if isinstance(module, torch.nn.LayerNorm):
            torch.nn.init.normal_(module.weight, 1, 0.2, noise)
    model.save_pretrained(folder)
    return model


def rows_of(model: Any, ids: Sequence[int]) -> torch.Tensor:
    with torch.inference_mode():
        found: torch.Tensor = model(torch.tensor([list(ids)])).last_hidden_state[0]
    return found


def unit(rows: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.normalize(rows, dim=-1)


@pytest.mark.parametrize("pooling", POOLED)
@pytest.mark.parametrize("family", FAMILIES)
def test_vectors_are_transformers_last_rows_pooled(family: str, pooling: str, tmp_path: Path) -> None:
    model = make(tmp_path, f"{family}Model")
    with LLM(tmp_path, **SMALL, **{"infer.pooling": pooling}) as llm:
        found = llm.embed(TEXTS)
    for each, ids in zip(found, TEXTS, strict=True):
        wanted = unit(POOLED[pooling](rows_of(model, ids)))
        torch.testing.assert_close(torch.tensor(each.vector), wanted, atol=3e-6, rtol=1e-4)
        assert each.num_cached_tokens == 0


@pytest.mark.parametrize("family", ["Bert", "ModernBert"])
def test_a_text_has_the_same_vector_alone_and_in_company(family: str, tmp_path: Path) -> None:
    make(tmp_path, f"{family}Model")
    with LLM(tmp_path, **SMALL) as llm:
        together, alone = llm.embed(TEXTS), [llm.embed(ids)[0] for ids in TEXTS]
    for one, other in zip(together, alone, strict=True):
        torch.testing.assert_close(torch.tensor(one.vector), torch.tensor(other.vector), atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize("family", ["Bert", "ModernBert"])
def test_ranks_that_share_an_encoder_make_the_same_vectors(family: str, tmp_path: Path) -> None:
    heads = {"num_attention_heads": 6}
    model = make(tmp_path, f"{family}Model", **heads)
    with LLM(tmp_path, **SMALL, **{"infer.tp_size": 2, "executor": "inline"}) as llm:
        found = llm.embed(TEXTS)
    for each, ids in zip(found, TEXTS, strict=True):
        torch.testing.assert_close(torch.tensor(each.vector), unit(rows_of(model, ids).mean(0)), atol=3e-6, rtol=1e-4)


@pytest.mark.parametrize("family", ["Bert", "ModernBert"])
def test_vectors_in_bfloat16_point_where_those_in_float32_do(family: str, tmp_path: Path) -> None:
    model = make(tmp_path, f"{family}Model")
    with LLM(tmp_path, **{**SMALL, "dtype": "bfloat16"}) as llm:
        found = llm.embed(TEXTS)
    for each, ids in zip(found, TEXTS, strict=True):
        assert float(torch.tensor(each.vector) @ unit(rows_of(model, ids).mean(0))) > 0.995


@pytest.mark.parametrize("family", ["Bert", "DistilBert", "XLMRoberta", "ModernBert"])
def test_checkpoints_with_other_heads_or_names_with_their_prefix_embed(family: str, tmp_path: Path) -> None:
    model = make(tmp_path, f"{family}ForMaskedLM")
    with LLM(tmp_path, **SMALL) as llm:
        (found,) = llm.embed(TEXTS[3])
    wanted = unit(rows_of(model.base_model, TEXTS[3]).mean(0))
    torch.testing.assert_close(torch.tensor(found.vector), wanted, atol=3e-6, rtol=1e-4)


PAIRS = [("who are you?", "me"), ("who?", "the quick brown fox"), ("the fox", "!")]


@pytest.mark.parametrize("changes", [
    {"family": "Bert"}, {"family": "DistilBert"}, {"family": "XLMRoberta"}, {"family": "ModernBert"},
    {"family": "ModernBert", "classifier_pooling": "mean", "norm_bias": True, "classifier_bias": True},
])  # fmt: skip
def test_pairs_have_transformers_scores(changes: dict[str, Any], tmp_path: Path) -> None:
    changes = dict(changes)
    family = changes.pop("family")
    model = make(tmp_path, f"{family}ForSequenceClassification", num_labels=1, **changes)
    roberta = family == "XLMRoberta"
    tokenizer = write_wordpiece(tmp_path, ("<s>", "</s>") if roberta else ("[CLS]", "[SEP]"), roberta)
    read = ("input_ids", "token_type_ids") if family == "Bert" else ("input_ids",)
    with torch.inference_mode():
        encoded = [tokenizer(*pair, return_tensors="pt", return_token_type_ids=True) for pair in PAIRS]
        odds = [float(model(**{name: each[name] for name in read}).logits[0, 0]) for each in encoded]
    assert max(odds) - min(odds) > 0.05, "the model is too flat to show a difference"
    queries, documents = zip(*PAIRS, strict=True)
    ranked, scored, embedded, chatted, completed = asked(tmp_path, [
        ("/v1/rerank", {"query": queries[0], "documents": documents}),
        ("/v1/score", {"text_1": queries, "text_2": documents}),
        ("/v1/embeddings", {"input": "a"}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "a"}]}),
        ("/v1/completions", {"prompt": "a"}),
    ])  # fmt: skip
    assert scored.status_code == 200, scored.text
    wanted = torch.tensor(odds).sigmoid().tolist()
    assert [each["score"] for each in scored.json()["data"]] == pytest.approx(wanted, abs=2e-6)
    assert scored.json()["usage"]["prompt_tokens"] == sum(each["input_ids"].shape[1] for each in encoded)
    assert sorted(each["index"] for each in ranked.json()["results"]) == [0, 1, 2]
    first = next(each for each in ranked.json()["results"] if each["index"] == 0)
    assert first["relevance_score"] == pytest.approx(wanted[0], abs=2e-6)
    for answer in (embedded, chatted, completed):
        assert answer.status_code == 400 and "this model scores texts" in answer.json()["error"]["message"]


def asked(folder: Path, calls: Sequence[tuple[str, dict[str, Any]]], **keys: Any) -> list[httpx.Response]:
    """What a server of the model answers, in one process."""

    async def run() -> list[httpx.Response]:
        llm = await AsyncLLM.start(from_overrides(str(folder), {**SMALL, **keys}), "thread")
        try:
            transport = httpx.ASGITransport(create_app(llm))
            async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
                return [await client.post(path, json=body) for path, body in calls]
        finally:
            await llm.close()

    return asyncio.run(run())
