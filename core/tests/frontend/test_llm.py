"""``LLM`` on an engine without a model."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from evener import LLM, SamplingParams
from evener.engine.wire.messages import Abort, FromController, NewRequest
from evener.errors import ConfigError, EngineDeadError, EngineError, RequestError, TemplateError
from evener_conformance.fake_engine import FakeEngine
from evener_conformance.tiny_tokenizer import write_tiny_tokenizer

GREEDY = SamplingParams(temperature=0, max_tokens=4)


def make(folder: Path, engine: FakeEngine | None = None) -> LLM:
    return LLM.from_client(engine or FakeEngine(), model_dir=folder)


def test_outputs_are_in_the_order_of_the_prompts(tiny_dir: Path) -> None:
    with make(tiny_dir) as llm:
        params = [SamplingParams(max_tokens=n) for n in (6, 2, 3)]
        prompts: list[str | list[int]] = ["ab", [99, 100], "ef"]
        outputs = llm.generate(prompts, params)
    assert [output.outputs[0].text for output in outputs] == ["ababab", "cd", "efe"]
    assert [output.prompt for output in outputs] == ["ab", None, "ef"]
    assert [output.prompt_token_ids for output in outputs] == [[97, 98], [99, 100], [101, 102]]
    assert all(output.finished and output.outputs[0].finish_reason == "length" for output in outputs)


def test_one_string_and_one_flat_list_of_ids_are_one_prompt(tiny_dir: Path) -> None:
    with make(tiny_dir) as llm:
        assert [output.outputs[0].text for output in llm.generate("ab", GREEDY)] == ["abab"]
        assert [output.outputs[0].text for output in llm.generate([97, 98], GREEDY)] == ["abab"]
        assert llm.generate([]) == []
        assert len(llm.generate("ab")[0].outputs[0].token_ids) == 16


def test_samples_of_a_prompt_are_outputs_of_one_request(tiny_dir: Path) -> None:
    with make(tiny_dir) as llm:
        (output,) = llm.generate("ab", SamplingParams(n=3, max_tokens=2))
    assert [(sample.index, sample.text) for sample in output.outputs] == [(0, "ab"), (1, "ab"), (2, "ab")]


def test_nothing_is_submitted_when_one_prompt_is_wrong(tiny_dir: Path) -> None:
    engine = FakeEngine()
    with make(tiny_dir, engine) as llm:
        for prompts, params in (
            (["ab", ""], None),
            ([[1], [999]], None),
            ("ab", [GREEDY, GREEDY]),
            (7, None),
            ([1, "a"], None),
            (["a" * 127], SamplingParams(max_tokens=2)),
        ):
            with pytest.raises(RequestError):
                llm.generate(prompts, params)  # type: ignore[arg-type]
        assert engine.sent == []
        assert llm.generate("ab", GREEDY)[0].finished


def test_a_conversation_goes_through_the_template(tiny_dir: Path) -> None:
    with make(tiny_dir) as llm:
        hello = [{"role": "user", "content": "hello"}]
        (output,) = llm.chat(hello)
        assert output.prompt == "<|im_start|>user\nhello<|im_end|>\n<|im_start|>assistant\n"
        assert output.prompt_token_ids[0] == 257
        # The echo repeats the prompt up to its EOS token.
        assert (output.outputs[0].text, output.outputs[0].finish_reason) == ("user\nhello", "stop")
        assert len(llm.chat([hello, hello], GREEDY)) == 2
        with pytest.raises(RequestError, match="conversation"):
            llm.chat([])


def test_a_model_without_tokenizer_takes_and_gives_ids(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"eos_token_id": 3}')
    with make(tmp_path) as llm:
        assert llm.tokenizer is None
        (output,) = llm.generate([1, 2, 3])
        assert (output.outputs[0].token_ids, output.outputs[0].text) == ([1, 2, 3], "")
        params = SamplingParams(detokenize=False, ignore_eos=True, max_tokens=5)
        assert llm.generate([1, 2, 3], params)[0].outputs[0].token_ids == [1, 2, 3, 1, 2]
        with pytest.raises(RequestError, match="no tokenizer"):
            llm.generate("text")
        with pytest.raises(TemplateError, match="no chat template"):
            llm.chat([{"role": "user", "content": "x"}])


def test_a_request_that_fails_raises_after_the_others_ended_or_is_returned(tiny_dir: Path) -> None:
    class Failing(FakeEngine):
        def send(self, message: Any) -> None:
            super().send(message)
            if isinstance(message, NewRequest) and message.prompt == [98]:
                self.fail(message.id, "its device caught fire")

    with make(tiny_dir, Failing()) as llm:
        with pytest.raises(EngineError, match="prompt 1 failed: its device caught fire"):
            llm.generate(["a", "b", "c"], GREEDY)
        outputs = llm.generate(["a", "b", "c"], GREEDY, raise_on_error=False)
    assert [output.outputs[0].finish_reason for output in outputs] == ["length", "error", "length"]
    assert outputs[1].error == "its device caught fire"


def test_a_dead_engine_ends_the_call_and_every_later_one(tiny_dir: Path) -> None:
    class Dying(FakeEngine):
        def send(self, message: Any) -> None:
            super().send(message)
            self.die("killed")

    llm = make(tiny_dir, Dying())
    for _ in range(2):
        with pytest.raises(EngineDeadError, match="killed"):
            llm.generate("ab")
    llm.close()


def test_an_engine_that_does_not_start_is_closed_and_says_why(tiny_dir: Path) -> None:
    engine = FakeEngine(auto_ready=False)
    engine.die("no device")
    with pytest.raises(EngineDeadError, match="did not start: no device"):
        make(tiny_dir, engine)
    assert engine.closed


def test_an_interrupted_call_aborts_what_it_sent_and_the_next_call_works(tiny_dir: Path) -> None:
    class Interrupted(FakeEngine):
        receives = 0

        def receive(self, timeout: float | None) -> list[FromController]:
            self.receives += 1
            if self.receives == 3:
                raise KeyboardInterrupt
            return super().receive(timeout)

    engine = Interrupted()
    with make(tiny_dir, engine) as llm:
        with pytest.raises(KeyboardInterrupt):
            llm.generate(["ab", "cd"])
        assert [message.id for message in engine.sent if isinstance(message, Abort)] == ["0", "1"]
        assert llm.generate("ab", GREEDY)[0].outputs[0].text == "abab"


def test_a_script_whose_ranks_have_met_already_or_do_not_fit_gets_an_error_that_says_so(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name, value in {"WORLD_SIZE": "2", "RANK": "1", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2",
                        "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}.items():  # fmt: skip
        monkeypatch.setenv(name, value)
    with pytest.raises(ConfigError, match=r"2 ranks were started, but infer.tp_size × infer.pp_size uses 4"):
        LLM("/m", **{"infer.tp_size": 2, "infer.pp_size": 2})
    monkeypatch.setattr("torch.distributed.is_initialized", lambda: True)
    with pytest.raises(
        ConfigError, match=r"torch.distributed is already initialized in this process.* leave out init_process"
    ):
        LLM("/m", **{"infer.tp_size": 2})


def test_unclosed_llm_is_closed_at_interpreter_exit(tiny_dir: Path) -> None:
    code = (
        "import sys\n"
        "from pathlib import Path\n"
        "from evener import LLM\n"
        "from evener_conformance.fake_engine import FakeEngine\n"
        "class Engine(FakeEngine):\n"
        "    def close(self, drain=False):\n"
        "        print('closed', flush=True)\n"
        "        super().close(drain)\n"
        "llm = LLM.from_client(Engine(), model_dir=Path(sys.argv[1]))\n"
        "print('the script ends', flush=True)\n"
    )
    done = subprocess.run([sys.executable, "-c", code, str(tiny_dir)], capture_output=True, text=True, check=True)
    assert done.stdout.split("\n") == ["the script ends", "closed", ""], done.stderr


def test_two_llms_in_one_process_and_use_after_close_is_an_error(tiny_dir: Path, tmp_path: Path) -> None:
    first, second = make(tiny_dir), make(write_tiny_tokenizer(tmp_path))
    assert first.generate("ab", GREEDY)[0].outputs[0].text == second.generate("ab", GREEDY)[0].outputs[0].text
    first.close()
    first.close()
    with pytest.raises(EngineDeadError, match="closed"):
        first.generate("ab")
    assert second.generate("ab", GREEDY)[0].finished
    second.close()


def test_importing_evener_and_its_names_leaves_torch_and_transformers_out() -> None:
    code = (
        "import sys, evener; from evener import LLM, AsyncLLM, SamplingParams, RequestOutput, CompletionOutput\n"
        "assert evener.__version__ and set(evener.__all__) == set(dir(evener))\n"
        "print([name for name in ('torch', 'transformers', 'fastapi', 'hydra') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_a_name_that_evener_does_not_have_is_an_attribute_error() -> None:
    import evener

    with pytest.raises(AttributeError, match="no attribute 'LMM'"):
        evener.LMM  # noqa: B018


def test_overrides_reach_the_engine_and_the_front_end(tiny_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[tuple[Any, str, FakeEngine]] = []

    def start_engine(config: Any, mode: str) -> FakeEngine:
        started.append((config, mode, FakeEngine()))
        return started[-1][2]

    monkeypatch.setitem(sys.modules, "evener.engine.processes.start", SimpleNamespace(start_engine=start_engine))
    overrides: dict[str, object] = {"infer.max_reqs": 3, "request.max_new_tokens": 2, "seed": 5}
    for _ in range(2):
        with LLM(tiny_dir, **overrides) as llm:
            assert llm.generate("abc")[0].outputs[0].text == "ab"
    (config, mode, first), (_, _, second) = started
    assert (config.infer.max_reqs, Path(config.model), mode) == (3, tiny_dir, "inline")
    # The config's seed fixes those of requests that bring none.
    assert first.sent == second.sent
