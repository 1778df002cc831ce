"""Scores of pairs equal transformers', by a head for one label and by the logits of yes and no."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from asgi_calls import answers
from family_oracles import make_transformers, randomise

from evener import LLM
from evener.errors import CheckpointError, RequestError
from evener_conformance.naive.model import find_architecture
from evener_conformance.tiny_tokenizer import write_tiny_tokenizer

SMALL = {"dtype": "float32", "infer.max_reqs": 4, "infer.max_seq_len": 512, "infer.step_tokens": 64,
         "infer.threads": 1, "infer.kv_memory": 2**22}  # fmt: skip
TINY = {**find_architecture("Qwen3ForCausalLM").tiny_config(), "vocab_size": 270, "max_position_embeddings": 512}
QUERY, DOCUMENTS = "who?", ["me", "the quick brown fox", "you"]
#: As sentence-transformers saves the templates of rerankers.
ROLES = "{% for m in messages if m['role'] == 'query' %}Q {{ m.content }} {% endfor %}" + (
    "{% for m in messages if m['role'] == \"document\" %}D {{ m.content }}{% endfor %} A"
)
QWEN3 = (
    "<|im_start|>system\nJudge whether the Document meets the requirements based on the Query and the Instruct "
    'provided. Note that the answer can only be "yes" or "no".<|im_end|>\n<|im_start|>user\n'
    "<Instruct>: {}\n<Query>: {}\n<Document>: {}<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n"
)

#: The log-odds of ids.
Oracle = Callable[[Sequence[int]], float]


def causal(folder: Path, yes: int, no: int) -> Oracle:
    model = make_transformers(TINY, folder)

    def odds(ids: Sequence[int]) -> float:
        with torch.inference_mode():
            last = model(torch.tensor([list(ids)])).logits[0, -1]
        return float(last[yes] - last[no])

    return odds


def classifier(folder: Path) -> Oracle:
    from transformers import AutoConfig, AutoModelForSequenceClassification

    made = AutoConfig.for_model(**{**TINY, "num_labels": 1, "pad_token_id": 0})
    model = cast("Any", AutoModelForSequenceClassification).from_config(made, dtype=torch.float32).eval()
    randomise(model)
    model.save_pretrained(folder)

    def odds(ids: Sequence[int]) -> float:
        with torch.inference_mode():
            return float(model(torch.tensor([list(ids)])).logits[0, 0])

    return odds


def sigmoid(odds: float) -> float:
    return float(torch.tensor(odds, dtype=torch.float64).sigmoid())


def test_a_reranker_of_qwens_kind_reads_its_own_template_and_scores_by_yes_and_no(tmp_path: Path) -> None:
    odds = causal(tmp_path, 261, 262)
    write_tiny_tokenizer(tmp_path)
    tokenizer = json.loads((tmp_path / "tokenizer.json").read_text())
    tokenizer["model"]["vocab"] |= {"yes": 261, "no": 262}
    (tmp_path / "tokenizer.json").write_text(json.dumps(tokenizer))

    def wanted(instruction: str) -> list[float]:
        texts = [QWEN3.format(instruction, QUERY, each) for each in DOCUMENTS]
        return [sigmoid(odds(encode(text))) for text in texts]

    def encode(text: str) -> list[int]:
        # The two new entries move the marks.
        marks = {"<|im_start|>": "\x01", "<|im_end|>": "\x02"}
        for mark, sign in marks.items():
            text = text.replace(mark, sign)
        return [{1: 259, 2: 260}.get(byte, byte) for byte in text.encode()]

    whole, best, own = answers(
        tmp_path,
        [
            ("/v1/rerank", {"query": QUERY, "documents": DOCUMENTS}),
            ("/rerank", {"query": QUERY, "documents": [{"text": each} for each in DOCUMENTS], "top_n": 1,
                         "return_documents": False}),
            ("/v1/score", {"text_1": QUERY, "text_2": DOCUMENTS, "instruction": "be kind"}),
        ], **SMALL, **{"infer.task": "score"},
    )  # fmt: skip
    assert whole.status_code == 200, whole.text
    body, usual = whole.json(), wanted("Given a web search query, retrieve relevant passages that answer the query")
    assert body.keys() == {"id", "model", "usage", "results"}
    order = sorted(range(3), key=lambda place: -usual[place])
    assert [each["index"] for each in body["results"]] == order
    assert [each["document"]["text"] for each in body["results"]] == [DOCUMENTS[place] for place in order]
    assert [each["relevance_score"] for each in body["results"]] == pytest.approx([usual[i] for i in order], abs=1e-5)
    assert body["usage"]["prompt_tokens"] == body["usage"]["total_tokens"] > 3 * 100
    [first] = best.json()["results"]  # alone in its batch, so that its sums may round otherwise
    score = pytest.approx(body["results"][0]["relevance_score"], abs=1e-5)
    assert first == {"index": order[0], "relevance_score": score}
    assert [each["score"] for each in own.json()["data"]] == pytest.approx(wanted("be kind"), abs=1e-5)
    assert {each["object"] for each in own.json()["data"]} == {"score"}


def test_a_reranker_of_sentence_transformers_is_recognized_and_reads_its_folders_template(tmp_path: Path) -> None:
    odds = causal(tmp_path, 5, 9)
    write_tiny_tokenizer(tmp_path, ROLES)
    kinds = ("Transformer", "LogitScore")
    modules = [{"type": f"sentence_transformers.x.{kind}", "path": f"{i}_{kind}"} for i, kind in enumerate(kinds)]
    (tmp_path / "modules.json").write_text(json.dumps(modules))
    (tmp_path / "1_LogitScore").mkdir()
    (tmp_path / "1_LogitScore/config.json").write_text(json.dumps({"true_token_id": 5, "false_token_id": 9}))
    activation = {"activation_fn": "torch.nn.modules.linear.Identity"}
    (tmp_path / "config_sentence_transformers.json").write_text(json.dumps(activation))
    scored, refused, generated, embedded = answers(
        tmp_path,
        [
            ("/score", {"queries": [QUERY, "a"], "documents": DOCUMENTS[:2]}),
            ("/score", {"text_1": QUERY, "text_2": "b", "instruction": "be kind"}),
            ("/v1/completions", {"prompt": "a"}),
            ("/v1/embeddings", {"input": "a"}),
        ],
        **SMALL,
    )
    wanted = [odds(f"Q {q} D {d} A".encode()) for q, d in zip([QUERY, "a"], DOCUMENTS, strict=False)]
    assert [each["score"] for each in scored.json()["data"]] == pytest.approx(wanted, abs=1e-4)
    assert refused.status_code == 400 and "reads no instruction" in refused.json()["error"]["message"]
    for answer in (generated, embedded):
        assert answer.status_code == 400 and "this model scores texts" in answer.json()["error"]["message"]


def test_a_model_with_a_head_for_one_label_scores_as_transformers_does(tmp_path: Path) -> None:
    odds = classifier(tmp_path)
    write_tiny_tokenizer(tmp_path, ROLES)
    (scored,) = answers(tmp_path, [("/score", {"text_1": QUERY, "text_2": DOCUMENTS})], **SMALL)
    wanted = [sigmoid(odds(f"Q {QUERY} D {each} A".encode())) for each in DOCUMENTS]
    assert [each["score"] for each in scored.json()["data"]] == pytest.approx(wanted, abs=1e-5)
    with LLM(tmp_path, **SMALL) as llm, pytest.raises(RequestError, match=r"scores texts .* infer\.task=embed"):
        llm.embed([1, 2])


@pytest.mark.parametrize(
    ("config", "files", "match"),
    [
        ({"architectures": ["Qwen3ForSequenceClassification"]}, {}, "has 2 labels"),
        ({"architectures": ["Qwen3ForSequenceClassification"], "id2label": 7}, {}, "has 2 labels"),
        ({"sentence_transformers": {"activation_fn": "torch.nn.Tanh"}}, {}, "'Tanh'"),
        ({}, {}, "has no two tokens of the model for yes and no"),
        ({}, {"tokenizer.json": {"model": [{"vocab": {}}]}}, "has no two tokens"),
        ({}, {"tokenizer.json": {"model": {"vocab": {"yes": 270, "no": 1}}}}, "has no two tokens"),
        ({}, {"tokenizer.json": {"model": {"vocab": {"yes": True, "no": -1}}}}, "has no two tokens"),
        ({}, {"modules.json": [{"type": "x.LogitScore", "path": "a/../b"}]}, r"names the folder 'a/\.\./b'"),
        ({}, {"modules.json": [{"type": "x.Pooling", "path": "a"}]}, "'Pooling'; with infer.task=score"),
    ],
)
def test_a_folder_that_cannot_score_is_refused(
    tmp_path: Path, config: dict[str, Any], files: dict[str, Any], match: str
) -> None:
    for name, value in {"config.json": {**TINY, **config}, **files}.items():
        (tmp_path / name).write_text(json.dumps(value))
    with pytest.raises(CheckpointError, match=match):
        LLM(tmp_path, load="dummy", **SMALL, **{"infer.task": "score"})
