"""Encoders of texts equal transformers': vectors, scores of pairs, texts alone and in company."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import openai
import pytest
import torch
from asgi_calls import answers
from evener_pooling.limits import whole_texts
from random_encoders import FAMILIES, TEXTS, make, rows_of, unit
from served import Served
from wordpiece import write_wordpiece

from evener import LLM, SamplingParams
from evener.config import from_overrides
from evener.engine.processes.start import build_controller
from evener.engine.wire.messages import Finished, NewRequest, Sampling, Tokens
from evener.errors import ArchitectureError, CheckpointError, ConfigError, ContextLengthError, RequestError
from evener.loading.checkpoint import open_checkpoint
from evener_conformance.kit.subject import open_subject
from evener_conformance.naive.model import NaiveModel, find_architecture
from evener_inspection.explanation import explain
from evener_models.pooling.pairs import pair_separator

SMALL = {"dtype": "float32", "infer.max_reqs": 4, "infer.threads": 1}
POOLED: Mapping[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "mean": lambda rows: rows.mean(0), "cls": lambda rows: rows[0], "last": lambda rows: rows[-1],
}  # fmt: skip


@pytest.mark.parametrize(
    ("family", "pooling"),
    [pytest.param(family, pooling, marks=[] if pooling == "mean" or family == "ModernBert" else pytest.mark.slow)
     for family in FAMILIES for pooling in POOLED],
)  # fmt: skip
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
    ranked, scored, embedded, chatted, completed = answers(tmp_path, [
        ("/v1/rerank", {"query": queries[0], "documents": documents}),
        ("/v1/score", {"text_1": queries, "text_2": documents}),
        ("/v1/embeddings", {"input": "a"}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "a"}]}),
        ("/v1/completions", {"prompt": "a"}),
    ], **SMALL)  # fmt: skip
    assert scored.status_code == 200, scored.text
    wanted = torch.tensor(odds).sigmoid().tolist()
    assert [each["score"] for each in scored.json()["data"]] == pytest.approx(wanted, abs=2e-6)
    assert scored.json()["usage"]["prompt_tokens"] == sum(each["input_ids"].shape[1] for each in encoded)
    assert sorted(each["index"] for each in ranked.json()["results"]) == [0, 1, 2]
    first = next(each for each in ranked.json()["results"] if each["index"] == 0)
    assert first["relevance_score"] == pytest.approx(wanted[0], abs=2e-6)
    for answer in (embedded, chatted, completed):
        assert answer.status_code == 400 and "this model scores texts" in answer.json()["error"]["message"]


def config_of(folder: Path, **changes: Any) -> Path:
    """A folder with only the config of a tiny BERT, for ``load=dummy``."""
    config = {**find_architecture("BertModel").tiny_config(), **changes}
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def test_a_text_that_does_not_fit_the_rest_of_a_step_waits_for_the_next(tmp_path: Path) -> None:
    model = make(tmp_path, "BertModel")
    config = from_overrides(str(tmp_path), {**SMALL, "infer.max_seq_len": 40, "infer.step_tokens": 48})
    controller = build_controller(config)[0]
    texts = {str(n): [n + 3, *range(5, 34)] for n in range(4)}
    asked = [NewRequest(id=name, prompt=ids, max_tokens=1, sampling=Sampling()) for name, ids in texts.items()]
    events, steps = controller.handle(asked), 0
    while not controller.idle:
        events += controller.step()
        steps += 1
    found = {event.id: event.pooled for event in events if isinstance(event, Tokens)}
    assert steps >= 4 and controller.scheduler.stats.preemptions == 0
    assert controller.scheduler.stats.steps == 4
    for name, ids in texts.items():
        row = torch.frombuffer(bytearray(found[name]), dtype=torch.float32)
        torch.testing.assert_close(row, rows_of(model, ids).mean(0), atol=1e-5, rtol=1e-4)


def test_a_text_longer_than_a_step_ends_with_what_to_change(tmp_path: Path) -> None:
    config = from_overrides(str(config_of(tmp_path)), {**SMALL, "load": "dummy", "infer.step_tokens": 20})
    controller = build_controller(config)[0]
    (event,) = controller.handle([NewRequest(id="a", prompt=[5] * 21, max_tokens=1, sampling=Sampling())])
    assert isinstance(event, Finished) and event.error is not None and "raise infer.step_tokens" in event.error


@pytest.mark.parametrize("keys, found", [
    ({}, (128, 2048)), ({"infer.step_tokens": 48}, (48, 48)), ({"infer.max_seq_len": 64}, (64, 2048)),
    ({"infer.max_seq_len": 64, "infer.step_tokens": 100}, (64, 100)),
])  # fmt: skip
def test_a_step_holds_the_longest_text(keys: dict[str, int], found: tuple[int, int], tmp_path: Path) -> None:
    said = explain(from_overrides(str(config_of(tmp_path)), {"load": "dummy", **keys}))["config"]
    values = said["infer.max_seq_len"]["value"], said["infer.step_tokens"]["value"]
    assert values == found


def test_a_step_of_an_encoder_with_long_texts_is_as_long_as_they_are(tmp_path: Path) -> None:
    config = from_overrides(str(config_of(tmp_path, max_position_embeddings=4096)), {"load": "dummy"})
    fitted, reasons = whole_texts(config, 4096)
    assert (fitted.infer.max_seq_len, fitted.infer.step_tokens) == (4096, 4096)
    assert reasons["infer.step_tokens"] == "an encoder computes a text in one step"


@pytest.mark.parametrize("keys, changes, error, match", [
    ({"infer.max_seq_len": 129}, {}, ConfigError, "129 is more than the 128 tokens .* set at most 128"),
    ({"infer.max_seq_len": 64, "infer.step_tokens": 63}, {}, ConfigError, "set infer.step_tokens to at least 64"),
    ({"infer.task": "generate"}, {}, ArchitectureError, "encoder of texts and generates none: leave out infer.task"),
    ({"infer.pp_size": 3, "executor": "inline"}, {}, ArchitectureError, "does not divide its layers: set"),
    ({"infer.task": "score"}, {}, CheckpointError, "has no head for a label"),
    ({}, {"is_decoder": True}, ArchitectureError, "is_decoder"),
    ({}, {"position_embedding_type": "relative_key"}, ArchitectureError, "only absolute"),
    ({}, {"num_attention_heads": 7}, ArchitectureError, "must divide hidden_size = 60"),
    ({}, {"architectures": ["BertForSequenceClassification"]}, CheckpointError, "has 2 labels"),
    ({}, {"architectures": ["XLMRobertaModel"], "pad_token_id": 500}, ArchitectureError, "pad_token_id"),
    ({}, {"architectures": ["ModernBertForSequenceClassification"], "num_labels": 1, "classifier_pooling": "max"},
     CheckpointError, "classifier_pooling 'max'"),
    ({}, {"architectures": ["ModernBertModel"], "layer_types": ["chunked"] * 3}, ArchitectureError, "layer_types"),
])  # fmt: skip
def test_unsupported_encoders_and_settings_are_refused_with_the_reason(
    keys: dict[str, Any], changes: dict[str, Any], error: type[Exception], match: str, tmp_path: Path
) -> None:
    base = find_architecture(changes.get("architectures", ["BertModel"])[0]).tiny_config()
    (tmp_path / "config.json").write_text(json.dumps({**base, **changes}))
    with pytest.raises(error, match=match):
        LLM(tmp_path, load="dummy", **{**SMALL, **keys})


def test_an_encoder_needs_no_memory_for_state(tmp_path: Path) -> None:
    found = explain(from_overrides(str(config_of(tmp_path)), {"load": "dummy"}))
    assert found["memory"]["problem"] is None and found["memory"]["state"] < 4096
    assert "encoders.whole" in json.dumps(found)


def test_a_roberta_text_has_as_many_tokens_as_there_are_positions_behind_the_padding(tmp_path: Path) -> None:
    model = make(tmp_path, "XLMRobertaModel")
    with LLM(tmp_path, **SMALL) as llm:
        (found,) = llm.embed([7] * 128)
        with pytest.raises(ContextLengthError, match="129 tokens, which do not fit the context of 128"):
            llm.embed([7] * 129)
        with pytest.raises(RequestError, match="this model embeds texts"):
            llm.generate([[5, 6]], SamplingParams(detokenize=False))
    wanted = unit(rows_of(model, [7] * 128).mean(0))
    torch.testing.assert_close(torch.tensor(found.vector), wanted, atol=3e-6, rtol=1e-4)


@pytest.mark.parametrize("step, token", [
    ({"type": "BertProcessing", "sep": ["[SEP]", 3], "cls": ["[CLS]", 2]}, 3),
    ({"type": "Sequence", "processors": [{"type": "ByteLevel"}, {"type": "RobertaProcessing", "sep": ["</s>", 5]}]}, 5),
    ({"type": "TemplateProcessing", "pair": [{"Sequence": {"id": "A"}}, {"Sequence": {"id": "B"}}]}, None),
    ({"type": "TemplateProcessing", "pair": 7}, None), ({"type": "Sequence", "processors": 7}, None), (None, None),
    ({"type": "BertProcessing", "sep": ["[SEP]", "3"]}, None), ([], None),
])  # fmt: skip
def test_the_token_between_two_texts_is_read_from_any_tokenizer(step: Any, token: int | None, tmp_path: Path) -> None:
    config_of(tmp_path)
    (tmp_path / "tokenizer.json").write_text(json.dumps({"post_processor": step}))
    assert pair_separator(open_checkpoint(str(tmp_path))) == token


def test_openais_client_gets_the_vectors_of_a_served_folder_of_sentence_transformers(tmp_path: Path) -> None:
    model = make(tmp_path, "BertModel")
    tokenizer = write_wordpiece(tmp_path)
    modules = [{"idx": 0, "path": "", "type": "sentence_transformers.models.Transformer"},
               {"idx": 1, "path": "1_Pooling", "type": "sentence_transformers.models.Pooling"},
               {"idx": 2, "path": "2_Normalize", "type": "sentence_transformers.models.Normalize"}]  # fmt: skip
    (tmp_path / "modules.json").write_text(json.dumps(modules))
    (tmp_path / "1_Pooling").mkdir()
    (tmp_path / "1_Pooling/config.json").write_text(json.dumps({"pooling_mode_cls_token": True}))
    texts = ["Who are you?", "the quick brown fox", "fox"]
    with Served.warm(tmp_path, "dtype=float32", "infer.threads=1", "infer.max_reqs=4") as server:
        client = openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0)
        found = client.embeddings.create(model=server.name, input=texts)
        with pytest.raises(openai.BadRequestError, match="this model embeds texts"):
            client.chat.completions.create(model=server.name, messages=[{"role": "user", "content": "hi"}])
    for text, each in zip(texts, found.data, strict=True):
        wanted = unit(rows_of(model, tokenizer(text)["input_ids"])[0])
        torch.testing.assert_close(torch.tensor(each.embedding), wanted, atol=3e-6, rtol=1e-4)


def test_a_pair_of_a_cross_encoder_takes_no_instruction_and_has_to_fit(tmp_path: Path) -> None:
    make(tmp_path, "BertForSequenceClassification", num_labels=1)
    write_wordpiece(tmp_path)
    told, long, both = answers(tmp_path, [
        ("/v1/score", {"text_1": "a", "text_2": "b", "instruction": "be kind"}),
        ("/v1/score", {"text_1": "a", "text_2": "fox " * 200}),
        ("/v1/score", {"text_1": "fox " * 70, "text_2": "fox " * 70}),
    ], **SMALL)  # fmt: skip
    assert told.status_code == 400 and told.json()["error"]["param"] == "instruction"
    for answer in (long, both):
        assert answer.status_code == 400 and answer.json()["error"]["param"] == "text_2"
    assert "pair 0 has 143 tokens" in both.json()["error"]["message"]


def test_an_encoder_s_rows_are_not_read_as_logits(tmp_path: Path) -> None:
    with pytest.raises(ArchitectureError, match="generates no text: embed with it, or score"):
        NaiveModel(json.loads((config_of(tmp_path) / "config.json").read_text())).logits([1, 2])


def test_the_kit_leaves_a_package_s_own_kind_of_state_to_the_package_s_tests() -> None:
    assert {provided.value.name for provided in open_subject("cpu").states} == {"cpu.paged", "cpu.latent"}
