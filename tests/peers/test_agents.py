"""Agents and their clients drive the server as their users would: calls of tools, answers of a form, three APIs.

The model has random weights and follows no instruction: its calls are valid because the server holds them to
their form.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from client_programs import run, version
from peer_sources import Places
from served import Served, tiny_model

pytestmark = pytest.mark.peers

CLIENTS = Path(__file__).parent / "clients/agents"
#: The context: agents have long instructions, of which each byte is a token here.
POSITIONS = 1 << 15

Ask = Callable[..., Any]


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """A model of random weights behind a real server, with a template that has a place for tools."""
    folder = tmp_path_factory.mktemp("agents")
    source = Path(__file__).with_name("vllm_peer") / "template.jinja"
    template = folder / "tools.jinja"
    template.write_text("{%- set reasons = false -%}\n" + source.read_text("utf-8"), "utf-8")
    model = tiny_model(folder / "tiny", positions=POSITIONS)
    keys = ("load=dummy", f"infer.max_seq_len={POSITIONS}", "infer.kv_memory=64MiB", f"server.chat_template={template}")
    with Served.model(model, *keys, "server.reasoning_parser=none", "server.tool_parser=hermes") as served:
        yield served


@pytest.fixture
def ask(
    tiny: Served, places: Places, environ: dict[str, str], tmp_path: Path,
    record_property: Callable[[str, object], None],
) -> Ask:  # fmt: skip
    """Run a script of a client, and read what it found. Nothing is asked of anybody but the server."""

    def found(package: str, what: str, script: str, *, of_agents: bool = True) -> Any:
        node = script.endswith(".mjs")
        record_property("client", f"{package} {version(package, of_agents=of_agents and not node)}")
        record_property("what", what)
        python = places.agents_python if of_agents else places.python
        command = ("node" if node else python, CLIENTS / script, tiny.url, tiny.name)
        quiet = environ | {"LITELLM_LOCAL_MODEL_COST_MAP": "True", "OPENAI_AGENTS_DISABLE_TRACING": "1"}
        more = (places.node,) if node else ()
        return json.loads(run(*command, *more, environ=quiet, folder=tmp_path).splitlines()[-1])

    return found


def is_city(value: Any) -> bool:
    """Whether a value is of the form that all scripts ask for."""
    return value.keys() == {"city", "sunny"} and value["city"] in ("Paris", "Rome") and isinstance(value["sunny"], bool)


def test_litellm_chats_calls_and_fills_a_form(ask: Ask) -> None:
    found = ask("litellm", "chats over two APIs, whole and streamed; a forced call; a form", "litellm_python.py")
    assert found["whole"] and found["whole"] == found["streamed"] and found["message"]
    name, arguments = found["called"]
    assert name == "weather" and is_city(arguments) and is_city(found["formed"])


def test_langchain_calls_a_tool_goes_on_and_fills_forms(ask: Ask) -> None:
    what = "chats over two APIs, whole and streamed; a call and its result; forms by schema and by call"
    found = ask("langchain-openai", what, "langchain_python.py")
    assert found["whole"] and found["whole"] == found["streamed"] and found["after"] and found["responses"]
    name, arguments = found["called"]
    assert name == "weather" and is_city(arguments)
    assert all(map(is_city, found["formed"].values())) and len(found["formed"]) == 2
    assert found["json_mode"] in ("stop", "length")


def test_instructor_gets_a_form_in_each_mode_that_can_be_enforced_and_an_answer_in_the_others(ask: Ask) -> None:
    what = "a form in each of fifteen modes, for OpenAI, OpenRouter and Anthropic"
    found = ask("instructor", what, "instructor_modes.py")
    # The other modes are for clients of eleven vendors with APIs of their own; the script has their names.
    assert found["others"] == [] and len(found["found"]) == 15
    for mode, came in found["found"].items():
        assert came == "valid" or (mode not in found["enforced"] and came == "answered"), (mode, came)


def test_openais_agents_call_a_function_and_give_a_typed_answer_over_both_apis(ask: Ask) -> None:
    found = ask("openai-agents", "agents over two APIs: a call, streamed too; a typed answer", "openai_agents.py")
    assert len(found["found"]) == 2 and found["calls"] >= 4
    for each in found["found"].values():
        assert "It is warm." in each["output"] and "It is warm." in each["streamed"] and is_city(each["formed"])


def test_an_agent_of_smolagents_calls_a_tool(ask: Ask) -> None:
    found = ask("smolagents", "one step of an agent that calls a tool", "smolagents_python.py")
    assert found["calls"] and set(found["calls"]) <= {"weather", "final_answer"} and found["errors"] == []


def test_dspy_fills_a_signature_by_its_schema(ask: Ask) -> None:
    found = ask("dspy", "text; a signature with a typed answer", "dspy_python.py")
    assert found["plain"] and is_city({"city": found["city"], "sunny": found["sunny"]})
    assert "json" in found["form"].lower() or "Weather" in found["form"] or "Output" in found["form"]


def test_pydantic_ai_gets_typed_answers_over_three_apis(ask: Ask) -> None:
    what = "typed answers by a tool and by a schema, over three APIs"
    # The agents' environment has an older client of OpenAI's than it needs.
    found = ask("pydantic-ai-slim", what, "pydantic_tools.py", of_agents=False)
    assert len(found) == 5 and all(map(is_city, found.values()))


def test_vercels_ai_sdk_streams_fills_a_form_and_calls_tools_over_two_apis(ask: Ask) -> None:
    what = "text over two APIs, whole and streamed; a form; calls and their results"
    found = ask("ai for Node.js", what, "vercel_ai.mjs")
    assert found["whole"] and found["whole"] == found["streamed"] and found["message"]
    assert is_city(found["object"]) and found["results"] and set(found["results"]) == {"warm"}
    for name, arguments in (*found["called"], *found["used"]):
        assert name == "weather" and is_city(arguments)
    assert found["called"] and found["used"] and {"tool-call", "tool-result"} <= set(found["parts"])


def test_openais_client_sets_the_options_that_its_documents_name(ask: Ask) -> None:
    what = "options of chats and responses; named items; a count; in the background, streamed too and read again"
    found = ask("openai", what, "openai_options.py", of_agents=False)
    unused = ("store", "metadata", "service_tier", "prompt_cache_key", "verbosity", "prediction", "safety_identifier")
    refused = {name: f"refused: {name}" for name in ("web_search_options", "audio")}
    used = dict.fromkeys(("modalities", "parallel_tool_calls", "reasoning_effort"), "")
    assert found["chat"] == {name: name for name in unused} | used | refused
    unused = ("max_tool_calls", "service_tier", "safety_identifier", "prompt_cache_key")
    used = dict.fromkeys(("store", "truncation", "parallel_tool_calls", "metadata", "tool_choice"), "")
    part = {"include": "include[0]", "reasoning": "reasoning.summary", "text": "text.verbosity"}
    refused = {name: f"refused: {name}" for name in ("conversation", "prompt")}
    assert found["responses"] == {name: name for name in unused} | used | part | refused
    assert found["named"] and found["counted"] and found["background"] and found["read_again"]
    first, last = found["streamed"]
    assert first == "response.created" and last in ("response.completed", "response.incomplete")


def test_anthropics_client_sets_the_options_that_its_documents_name(ask: Ask) -> None:
    found = ask("anthropic", "options of messages; a count with tools", "anthropic_options.py", of_agents=False)
    used = dict.fromkeys(("none", "any", "metadata", "history", "adaptive"), "")
    # The model is served as one that does not reason.
    unused = {"cache_control": "cache_control", "service_tier": "service_tier", "thinking": "thinking.budget_tokens"}
    beta = {"beta": "speed, context_management", "container": "refused: container"}
    assert {**found, "beta": ", ".join(sorted(found["beta"].split(", "), reverse=True))} == {
        **used, **unused, **beta, "counted": True,
    }  # fmt: skip
