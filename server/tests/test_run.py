from __future__ import annotations

import io
import json
import re
from collections.abc import AsyncIterator
from datetime import datetime
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import tokenizers

from evener.cli.main import main
from evener.config.resolve import ResolvedValue
from evener.contracts.outputs import Delta
from evener.engine.facts.engine_info import EngineInfo
from evener_conformance.fake_engine import NO_MEMORY
from evener_server.run_outputs import OutputFolder


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
    settings: Any
    closed: int

    def __init__(self) -> None:
        self.info = EngineInfo(
            model="", served_name="test", max_model_len=9, vocab_size=10, backend="test", device="",
            backend_reason="the only one", memory=NO_MEMORY, config={"dtype": ResolvedValue("float32", "as asked")},
        )  # fmt: skip
        self.tokenizer = SimpleNamespace(encode=lambda text: [ord(c) for c in text])

    @classmethod
    async def start(cls, config: Any, mode: str, settings: Any) -> FakeLLM:
        cls.asked.append(config)
        cls.settings = settings
        return cls()

    async def submit(self, prompt: Any, params: Any) -> FakeStream:
        self.asked += [prompt, params]
        return FakeStream([1, 2, 3])

    submit_chat = submit

    async def close(self) -> None:
        type(self).closed += 1


@pytest.fixture
def llm(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> type[FakeLLM]:
    FakeLLM.deltas = [("Hel", None, None), ("lo", "stop", None)]
    FakeLLM.asked, FakeLLM.closed = [], 0
    monkeypatch.setattr("evener.async_llm.AsyncLLM", FakeLLM)
    monkeypatch.chdir(tmp_path)
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
    assert err.startswith("test (the only one); 3 + 2 tokens; first token after ") and err.endswith(
        "; finish reason: stop\n"
    )
    config, prompt, params = llm.asked
    assert (config.seed, prompt, params.max_tokens, params.temperature, params.ignore_eos) == (3, "Hi", 5, 0.0, False)
    assert llm.closed == 1


def test_the_tokenizer_is_made_before_the_engine_starts_and_given_to_its_front_end(
    llm: type[FakeLLM], folder: Path
) -> None:
    assert main(["run", str(folder), "--prompt", "Hi"]) == 0 and llm.settings.tokenizer is None
    model = tokenizers.models.WordLevel({"Hi": 0, "there": 1}, unk_token="Hi")
    tokenizers.Tokenizer(model).save(str(folder / "tokenizer.json"))
    assert main(["run", str(folder), "--prompt", "Hi"]) == 0
    settings = llm.settings
    assert settings.model_dir == folder and settings.tokenizer.encode("there") == [1]
    (folder / "tokenizer.json").unlink()
    frontend, _ = settings.build(llm().info, lambda message: None)
    assert frontend.tokenizer is settings.tokenizer


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


@pytest.mark.parametrize(("length", "ids"), [(2, "ab"), (3, "abc"), (8, "abcabcab")])
def test_a_prompt_is_repeated_or_cut_to_the_length_that_is_asked_for(
    length: int, ids: str, llm: type[FakeLLM], folder: Path
) -> None:
    assert main(["run", str(folder), "--prompt", "abc", f"request.prompt_tokens_len={length}"]) == 0
    _, prompt, params = llm.asked
    assert prompt == [ord(c) for c in ids] and params.ignore_eos is False


def test_fixed_prompt_and_output_lengths_ignore_eos(llm: type[FakeLLM], folder: Path) -> None:
    assert main(["run", str(folder), "request.prompt_tokens_len=6", "request.max_new_tokens=7"]) == 0
    assert llm.asked[2].ignore_eos is True and llm.asked[2].max_tokens == 7


def test_a_prompt_without_tokens_cannot_be_repeated(
    llm: type[FakeLLM], folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["run", str(folder), "--prompt", "", "request.prompt_tokens_len=6"]) == 2
    assert "repeats the tokens of --prompt, but '' has none" in capsys.readouterr().err and llm.closed == 1


def left(parent: Path) -> Path:
    """The one folder of a run in ``parent``."""
    (folder,) = parent.glob("*/*")
    return folder


def test_run_with_fixed_lengths_writes_config_and_result_to_outputs(
    llm: type[FakeLLM], folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["request.prompt_tokens_len=6", "request.max_new_tokens=7", "ops.attention=reference", "seed=3"]
    assert main(["run", str(folder), *words, "serve.api_keys=s3cret"]) == 0
    made = left(tmp_path / "outputs")
    assert re.fullmatch(r"\d{4}-\d\d-\d\d/\d\d-\d\d-\d\d", str(made.relative_to(tmp_path / "outputs")))
    assert f"output folder: outputs/{made.parent.name}/{made.name}" in capsys.readouterr().err
    result = json.loads((made / "result.json").read_text())
    assert result["text"] == "Hello" and result["model"] == str(folder) and result["sampling"]["max_tokens"] == 7
    assert json.loads((made / "resolved.json").read_text())["dtype"]["reason"] == "as asked"
    assert not any("s3cret" in path.read_text() for path in made.iterdir())
    # The keys are a whole file: the same run again.
    llm.asked.clear()
    assert main(["run", "--config", str(made / "config.yaml"), "outputs=again"]) == 0
    config, prompt, params = llm.asked
    assert (config.seed, config.ops, len(prompt), params.max_tokens) == (3, {"attention": "reference"}, 6, 7)
    assert left(tmp_path / "again").is_dir()


def test_run_writes_no_output_folder_by_default(llm: type[FakeLLM], folder: Path, tmp_path: Path) -> None:
    assert main(["run", str(folder), "--prompt", "Hi"]) == 0
    assert main(["run", str(folder), "request.prompt_tokens_len=6", "outputs=none"]) == 0
    assert not (tmp_path / "outputs").exists()
    assert main(["run", str(folder), "--prompt", "Hi", "--outputs", "kept"]) == 0
    assert (left(tmp_path / "kept") / "result.json").is_file()


def test_runs_of_the_same_second_get_folders_of_their_own(tmp_path: Path) -> None:
    now = datetime(2030, 1, 2, 3, 4, 5)
    names = [OutputFolder(tmp_path, now).folder.relative_to(tmp_path) for _ in range(3)]
    assert [str(name) for name in names] == ["2030-01-02/03-04-05", "2030-01-02/03-04-05-1", "2030-01-02/03-04-05-2"]


def test_unwritable_output_folder_error_names_the_key(
    llm: type[FakeLLM], folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").touch()
    assert main(["run", str(folder), "--prompt", "Hi", "outputs=file"]) == 2
    assert "outputs=file cannot be written: " in capsys.readouterr().err and llm.asked == []


def test_the_prompt_may_come_from_standard_input(
    llm: type[FakeLLM], folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO("from a pipe"))
    assert main(["run", str(folder), "--prompt", "-"]) == 0
    assert llm.asked[1] == "from a pipe"


@pytest.mark.parametrize(
    ("words", "code", "message"),
    [
        ([], 2, "needs a prompt: --prompt TEXT, or request.prompt_tokens_len=N"),
        (["--prompt", "a", "--system", "b"], 2, "--system needs a chat template"),
        (["--prompt", "a", "--temperature", "-1"], 1, "temperature must be"),
        (["--prompt", "a", "--max-tokens", "0"], 1, "max_tokens must be"),
    ],
)
def test_invalid_arguments_fail_with_one_line_before_the_engine_starts(
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
