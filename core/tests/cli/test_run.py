from __future__ import annotations

import io
import json
from collections.abc import AsyncIterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from evener.cli.main import main
from evener.frontend.outputs import Delta


class FakeStream:
    def __init__(self, prompt: list[int]) -> None:
        self.prompt_token_ids = prompt

    async def __aenter__(self) -> FakeStream:
        return self

    async def __aexit__(self, *exc: object) -> None:
        return None

    async def __aiter__(self) -> AsyncIterator[Delta]:
        for text, reason, error in FakeLLM.deltas:
            yield Delta("1", 0, text=text, token_ids=[1], finish_reason=reason, error=error)  # type: ignore[arg-type]


class FakeLLM:
    """Notes what it is asked and gives prepared answers."""

    deltas: list[tuple[str, str | None, str | None]]
    asked: list[Any]
    closed: int

    def __init__(self) -> None:
        self.info = {"backend": "test", "backend_reason": "the only one", "vocab_size": 10}
        self.tokenizer = SimpleNamespace()

    @classmethod
    async def start(cls, config: Any, mode: str) -> FakeLLM:
        cls.asked.append(config)
        return cls()

    async def submit(self, prompt: Any, params: Any) -> FakeStream:
        self.asked += [prompt, params]
        return FakeStream([1, 2, 3])

    submit_chat = submit

    async def close(self) -> None:
        type(self).closed += 1


@pytest.fixture
def llm(monkeypatch: pytest.MonkeyPatch) -> type[FakeLLM]:
    FakeLLM.deltas = [("Hel", None, None), ("lo", "stop", None)]
    FakeLLM.asked, FakeLLM.closed = [], 0
    monkeypatch.setattr("evener.async_llm.AsyncLLM", FakeLLM)
    return FakeLLM


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "config.json").write_text("{}")
    return tmp_path


def test_the_answer_goes_to_standard_output_and_figures_to_standard_error(
    llm: type[FakeLLM], folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["run", str(folder), "--prompt", "Hi", "--max-tokens", "5", "--temperature", "0", "seed=3"]) == 0
    out, err = capsys.readouterr()
    assert out == "Hello\n"
    assert err.startswith("test (the only one); 3 + 2 tokens; first after ") and err.endswith("; ended: stop\n")
    config, prompt, params = llm.asked
    assert (config.seed, prompt, params.max_tokens, params.temperature, params.ignore_eos) == (3, "Hi", 5, 0.0, False)
    assert llm.closed == 1


def test_json_has_the_answer_and_its_figures(
    llm: type[FakeLLM], folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["run", str(folder), "--prompt", "Hi", "--json"]) == 0
    answer = json.loads(capsys.readouterr().out)
    assert (answer["text"], answer["finish_reason"], answer["completion_tokens"]) == ("Hello", "stop", 2)
    assert answer["backend_reason"] == "the only one" and answer["seconds_to_first_token"] >= 0


def test_a_model_with_a_chat_template_gets_a_conversation_unless_raw_is_said(llm: type[FakeLLM], folder: Path) -> None:
    (folder / "chat_template.jinja").write_text("{{ messages }}")
    assert main(["run", str(folder), "--prompt", "Hi", "--system", "Be brief."]) == 0
    assert main(["run", str(folder), "--prompt", "Hi", "--raw"]) == 0
    assert llm.asked[1] == [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi"}]
    assert llm.asked[4] == "Hi"


def test_the_request_section_counts_where_no_option_says_otherwise(llm: type[FakeLLM], folder: Path) -> None:
    words = ["request.prompt_tokens_len=6", "request.max_new_tokens=7", "infer.stop_with_eos=false"]
    assert main(["run", str(folder), *words]) == 0
    _, prompt, params = llm.asked
    assert len(prompt) == 6 and all(0 <= token < 10 for token in prompt)
    assert (params.max_tokens, params.ignore_eos) == (7, True)


def test_the_prompt_may_come_from_standard_input(
    llm: type[FakeLLM], folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO("from a pipe"))
    assert main(["run", str(folder), "--prompt", "-"]) == 0
    assert llm.asked[1] == "from a pipe"


@pytest.mark.parametrize(
    ("words", "code", "message"),
    [
        ([], 2, "needs --prompt TEXT, or request.prompt_tokens_len=N"),
        (["--prompt", "a", "request.prompt_tokens_len=3"], 2, "one of them"),
        (["--prompt", "a", "--system", "b"], 2, "--system needs a chat template"),
        (["--prompt", "a", "--temperature", "-1"], 1, "temperature must be"),
        (["--prompt", "a", "--max-tokens", "0"], 1, "max_tokens must be"),
    ],
)
def test_what_cannot_be_run_is_one_line_before_an_engine_is_started(
    words: list[str], code: int, message: str, llm: type[FakeLLM], folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["run", str(folder), *words]) == code
    err = capsys.readouterr().err
    assert message in err and err.count("\n") == 1
    assert llm.asked == [], "an engine was started for nothing"


def test_a_request_that_fails_is_an_error_with_its_reason(
    llm: type[FakeLLM], folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    llm.deltas = [("Hel", None, None), ("", "error", "the worker is gone")]
    assert main(["run", str(folder), "--prompt", "a"]) == 1
    assert "error: the request failed: the worker is gone" in capsys.readouterr().err
    assert llm.closed == 1
