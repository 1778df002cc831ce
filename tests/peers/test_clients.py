"""Programs that others wrote drive the server as their users would. ``make test-peers`` installs them and runs this."""

from __future__ import annotations

import csv
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from client_programs import run, version
from peer_sources import Places
from served import Served

pytestmark = pytest.mark.peers

CLIENTS = Path(__file__).parent / "clients"

Note = Callable[[str, str], None]


@pytest.fixture
def note(record_property: Callable[[str, object], None]) -> Note:
    """Say which client a test drives, by the name of its package, and what it does."""

    def say(package: str, what: str) -> None:
        record_property("client", f"{package} {version(package)}")
        record_property("what", what)

    return say


def samples(folder: Path, task: str) -> list[dict[str, Any]]:
    """What lm-eval logged of each question of a task, in the order of the file."""
    (path,) = (folder / "out").rglob(f"samples_{task}_*.jsonl")
    return sorted(map(json.loads, path.read_text("utf-8").splitlines()), key=lambda sample: sample["doc_id"])


def choice_scores(model_dir: Path) -> list[tuple[int, list[float]]]:
    """For each question the index of the right choice, and each choice's log-probability as transformers has it."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(model_dir)
    model = AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32)
    found = []
    for question in map(json.loads, (CLIENTS / "colours.jsonl").read_text("utf-8").splitlines()):
        start, scores = len(tokenizer(question["question"])["input_ids"]), []
        for choice in question["choices"]:
            ids = torch.tensor([tokenizer(f"{question['question']} {choice}")["input_ids"]])
            with torch.inference_mode():
                table = model(ids).logits[0, :-1].log_softmax(-1)
            scores.append(table.gather(1, ids[0, 1:, None])[start - 1 :].sum().item())
        found.append((question["answer"], scores))
    return found


def test_openais_python_client_gets_the_same_answer_by_every_way_of_asking(
    server: Served, places: Places, environ: dict[str, str], tmp_path: Path, note: Note
) -> None:
    note("openai", "models, chats and completions: whole, streamed, eight at once; an error")
    found = json.loads(run(places.python, CLIENTS / "openai_python.py", server.url, environ=environ, folder=tmp_path))
    assert found["whole"] and found["whole"] == found["streamed"] == found["raw"]
    assert found["parallel"] == [found["whole"]]
    assert found["usage"] == found["streamed_usage"] == 12
    assert found["completion"] and found["logprobs"] == 4
    assert found["model"] == server.name and found["refused"] == "model_not_found"
    assert f"request_id={found['request_id']}" in server.log


def test_openais_node_client_gets_the_same_answer_streamed_and_whole(
    server: Served, places: Places, environ: dict[str, str], tmp_path: Path, note: Note
) -> None:
    note("openai for Node.js", "chats: whole and streamed; an error")
    script = CLIENTS / "openai_node.mjs"
    found = json.loads(run("node", script, server.url, places.node, environ=environ, folder=tmp_path))
    assert found["whole"] and found["whole"] == found["streamed"]
    assert found["usage"] == 12 and found["refused"] == "model_not_found"


def test_openais_python_client_goes_on_from_a_streamed_response(
    server: Served, places: Places, environ: dict[str, str], tmp_path: Path, note: Note
) -> None:
    note("openai", "responses: streamed and whole, gone on from, read and deleted")
    found = json.loads(
        run(places.python, CLIENTS / "openai_responses.py", server.url, environ=environ, folder=tmp_path)
    )
    assert found["streamed"] and found["streamed"] == found["whole"] == found["kept"]
    assert found["longer"] > found["shorter"], "the earlier answer is a part of the prompt"
    assert found["deleted"] == "not_found" and found["refused"] == "model_not_found"


def test_anthropics_python_client_gets_the_same_message_streamed_and_whole(
    server: Served, places: Places, environ: dict[str, str], tmp_path: Path, note: Note
) -> None:
    note("anthropic", "messages: whole, streamed, a count of tokens; an error")
    found = json.loads(
        run(places.python, CLIENTS / "anthropic_python.py", server.url, environ=environ, folder=tmp_path)
    )
    assert found["whole"] and found["whole"] == found["streamed"]
    assert found["reasons"] == ["max_tokens"] * 2 and found["output_tokens"] == [8, 8]
    assert found["input_tokens"] == [found["counted"]] * 2 and found["counted"] > 5
    assert found["refused"] == "not_found_error"


def test_an_agent_of_pydantic_ai_answers_and_follows_up(
    server: Served, places: Places, environ: dict[str, str], tmp_path: Path, note: Note
) -> None:
    note("pydantic-ai-slim", "an agent without tools: a question, a follow-up, a streamed answer")
    script = CLIENTS / "pydantic_agent.py"
    found = json.loads(run(places.python, script, server.url, server.name, environ=environ, folder=tmp_path))
    assert found["first"] and found["first"] == found["streamed"]
    assert found["second"] and 0 < found["tokens"] <= 12


def test_guidellm_measures_requests_of_which_none_fails(
    server: Served, places: Places, environ: dict[str, str], tmp_path: Path, smollm2_dir: Path, note: Note
) -> None:
    note("guidellm", "a benchmark: six streamed chats of synthetic text, two at a time")
    run(
        places.python.with_name("guidellm"), "run", "--disable-console",
        "--backend", f"kind=openai_http,target={server.url}",
        "--profile", "kind=concurrent,streams=2",
        "--constraint", "kind=max_requests,count=6",
        "--tokenizer", f"kind=huggingface_auto,model={smollm2_dir}",
        "--data", "kind=synthetic_text,prompt_tokens=32,output_tokens=8",
        "--output", "kind=json,path=report.json",
        environ=environ, folder=tmp_path,
    )  # fmt: skip
    (benchmark,) = json.loads((tmp_path / "report.json").read_text("utf-8"))["benchmarks"]
    requests = benchmark["requests"]
    assert [request["info"]["error"] for request in requests["errored"]] == []
    assert len(requests["successful"]) == 6
    assert {request["output_tokens"] for request in requests["successful"]} == {8}


def test_locusts_users_see_no_failure(
    server: Served, places: Places, environ: dict[str, str], tmp_path: Path, note: Note
) -> None:
    note("locust", "four users for eight seconds: chats whole and streamed, metrics")
    run(
        places.python.with_name("locust"), "--locustfile", CLIENTS / "locustfile.py", "--headless",
        "--host", server.url,
        "--users", "4", "--spawn-rate", "4", "--run-time", "8s", "--stop-timeout", "30", "--csv", "load",
        environ=environ, folder=tmp_path,
    )  # fmt: skip
    with (tmp_path / "load_stats.csv").open(newline="") as file:
        rows = {row["Name"]: row for row in csv.DictReader(file)}
    assert rows.keys() == {"/metrics", "/v1/chat/completions", "/v1/models", "streamed", "Aggregated"}
    assert all(int(row["Request Count"]) > 0 and row["Failure Count"] == "0" for row in rows.values())
    assert server.stats()["running"] == 0


def test_lm_eval_scores_choices_and_generates(
    server: Served, places: Places, environ: dict[str, str], tmp_path: Path, smollm2_dir: Path, note: Note
) -> None:
    note("lm-eval", "two tasks over a local file: log-probabilities of choices, and generation")
    for name in ("colours.yaml", "continue.yaml"):
        text = (CLIENTS / name).read_text("utf-8").replace("COLOURS", str(CLIENTS / "colours.jsonl"))
        (tmp_path / name).write_text(text, "utf-8")
    run(
        places.python.with_name("lm-eval"), "run", "--model", "local-completions", "--model_args",
        f"model={server.name},base_url={server.url}/v1/completions,tokenizer={smollm2_dir},num_concurrent=2",
        "--tasks", "colours,continue", "--include_path", tmp_path, "--output_path", "out", "--log_samples",
        environ=environ | {"HF_HOME": str(tmp_path / "hub")}, folder=tmp_path,
    )  # fmt: skip
    (results,) = (tmp_path / "out").rglob("results_*.json")
    expected = choice_scores(smollm2_dir)
    accuracy = sum(max(scores) == scores[answer] for answer, scores in expected) / len(expected)
    assert json.loads(results.read_text("utf-8"))["results"]["colours"]["acc,none"] == accuracy
    for sample, (_, scores) in zip(samples(tmp_path, "colours"), expected, strict=True):
        # One to three tokens each, in bfloat16 against float32.
        assert [float(resp[0][0]) for resp in sample["resps"]] == pytest.approx(scores, abs=0.1)
    answers = [sample["resps"][0][0] for sample in samples(tmp_path, "continue")]
    assert len(answers) == 4 and all(answer.strip() and "\n" not in answer for answer in answers)


#: What OpenAI's client uses of an answer, and what the server is for.
FEATURES: dict[str, tuple[str, str]] = {
    "tools": ("a forced call of a function", "server"),
    "structured_output": ("an answer of a JSON schema", "server"),
    "embeddings": ("embeddings of two texts", "embedding_server"),
}


@pytest.mark.parametrize("feature", FEATURES)
def test_a_client_uses_a_feature_of_agents(
    feature: str, places: Places, environ: dict[str, str], tmp_path: Path, note: Note, request: pytest.FixtureRequest
) -> None:
    what, fixture = FEATURES[feature]
    note("openai", what)
    script, server = CLIENTS / "openai_features.py", request.getfixturevalue(fixture)
    assert run(places.python, script, feature, server.url, environ=environ, folder=tmp_path) == "used\n"
