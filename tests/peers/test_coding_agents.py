"""Coding agents of OpenAI and Anthropic, unmodified, from their command lines: each shows what the server answers.

Their instructions and tools are thousands of tokens, so a real model with a long context answers.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from client_programs import run, version
from peer_sources import Places
from served import Served

#: More than a program may take (LIMIT), and the start of the server.
pytestmark = [pytest.mark.peers, pytest.mark.timeout(900)]

#: Codex reads where to ask from a file alone.
CODEX = """
model = "{name}"
model_provider = "here"
[model_providers.here]
name = "here"
base_url = "{url}/v1"
wire_api = "responses"
"""


@pytest.fixture(scope="module")
def server(qwen_dir: Path) -> Iterator[Served]:
    with Served.model(qwen_dir, "infer.max_reqs=4", "infer.kv_memory=1GiB") as served:
        yield served


@pytest.fixture
def start(
    places: Places, environ: dict[str, str], tmp_path: Path, record_property: Callable[[str, object], None]
) -> Callable[..., str]:
    """Start a program of a package in an empty folder, with no settings of this user; returns its standard output.
    Node.js runs it: what npm links needs a script of the package, and none is run when it is installed."""

    def started(package: str, what: str, program: str, *words: str, **more: str) -> str:
        name = f"{package} for Node.js"
        record_property("client", f"{name} {version(name)}")
        record_property("what", what)
        quiet = environ | {"HOME": str(tmp_path), "XDG_CONFIG_HOME": str(tmp_path / "config")}
        (tmp_path / "work").mkdir()
        path = places.node / "node_modules" / package / program
        return run("node", path, *words, environ=quiet | more, folder=tmp_path / "work")

    return started


def test_codex_asks_by_responses_and_shows_the_answer(
    server: Served, start: Callable[..., str], tmp_path: Path
) -> None:
    settings = tmp_path / "codex"
    settings.mkdir()
    (settings / "config.toml").write_text(CODEX.format(name=server.name, url=server.url), "utf-8")
    words = ("exec", "--skip-git-repo-check", "--sandbox", "read-only", "Say hello.")
    what = "the coding agent's command line over Responses: a question"
    said = start("@openai/codex", what, "bin/codex.js", *words, CODEX_HOME=str(settings))
    server.wait_for(r"path=/v1/responses status=200 .*prompt_tokens=\d{4,}")
    assert said.strip()


def test_claude_code_asks_by_messages_and_shows_the_answer(server: Served, start: Callable[..., str]) -> None:
    words = ("--print", "Say hello.", "--output-format", "json", "--tools", "")
    what = "the coding agent's command line over Messages: a question"
    said = start(
        "@anthropic-ai/claude-code", what, "cli-wrapper.cjs", *words, ANTHROPIC_BASE_URL=server.url,
        ANTHROPIC_API_KEY="none", ANTHROPIC_MODEL=server.name, ANTHROPIC_SMALL_FAST_MODEL=server.name,
        CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC="1", CLAUDE_CODE_MAX_OUTPUT_TOKENS="64",
    )  # fmt: skip
    server.wait_for(r"path=/v1/messages status=200 .*prompt_tokens=\d{4,}")
    found = json.loads(said)
    assert found["result"].strip() and not found["is_error"] and found["usage"]["output_tokens"] > 0
