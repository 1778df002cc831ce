"""The real server and the official client: what a user sees, and what is left when clients or workers go away."""

from __future__ import annotations

import asyncio
import os
import random
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from openai import AsyncOpenAI, OpenAI
from served import EVENER, PATIENCE, Hold, Served, descendants, eventually, free_port, tiny_model

from evener.folders.run import remove_stale_folders

CAPITAL: Any = [{"role": "user", "content": "What is the capital of France?"}]
SMALL = ("infer.kv_memory=268435456", "infer.max_seq_len=1024", "infer.threads=1")
TINY = ("load=dummy", "infer.kv_memory=4194304", "infer.max_seq_len=2048", "infer.max_reqs=16", "infer.threads=1")


@pytest.fixture(scope="module")
def real(smollm2_dir: Path) -> Iterator[Served]:
    """A real model behind a real server; for tests that leave nothing behind."""
    with Served.warm(smollm2_dir, *SMALL) as served:
        yield served
        # Those of a request that has just met its end token return with the step that was under way.
        eventually(lambda: served.stats()["blocks_used"] == 0)
        assert served.stop() == 0


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model(tmp_path_factory.mktemp("model") / "tiny")


@pytest.fixture
def tiny(folder: Path) -> Iterator[Served]:
    """A model of random weights behind a server of its own; for tests that end it or look at what is left."""
    with Served.warm(folder, *TINY) as served:
        yield served


#: ``evener serve``, which goes on for minutes instead of seconds to say that its engine has died: on a busy machine it
#: takes that long to ask.
PATIENT = """
import sys
from evener.cli.main import main
from evener_server import process
process._DEAD_GRACE_SECONDS = 600.0
sys.exit(main(["serve", *sys.argv[1:]]))
"""


@pytest.fixture
def mortal(folder: Path, tmp_path: Path) -> Iterator[Served]:
    """As ``tiny``, for tests that end its worker: no request ends before, as the worker stops in its 20th step."""
    program = (sys.executable, "-c", PATIENT, folder, "serve.port=0", *TINY)
    with Served("env", *(f"{name}={value}" for name, value in Hold(tmp_path, 20).environ.items()), *program) as served:
        yield served


@pytest.fixture(scope="module")
def client(real: Served) -> Iterator[OpenAI]:
    with connect(real) as client:
        yield client


def connect(served: Served) -> OpenAI:
    return OpenAI(base_url=f"{served.url}/v1", api_key="none", max_retries=0, timeout=PATIENCE)


def chat(client: OpenAI, **fields: Any) -> Any:
    given = {"model": "SmolLM2-135M-Instruct", "messages": CAPITAL, "temperature": 0, "max_tokens": 24, **fields}
    return client.chat.completions.create(**given)


def complete(client: OpenAI, **fields: Any) -> Any:
    given = {"model": "SmolLM2-135M-Instruct", "prompt": "One, two, three,", "temperature": 0, "max_tokens": 16}
    return client.completions.create(**{**given, **fields})


def test_a_chat_is_answered_and_counted(client: OpenAI) -> None:
    answer = chat(client)
    assert answer.object == "chat.completion" and answer.id.startswith("chatcmpl-")
    (choice,) = answer.choices
    assert "Paris" in choice.message.content and choice.message.role == "assistant" and choice.finish_reason == "stop"
    usage = answer.usage
    assert usage.prompt_tokens > 10 and 3 < usage.completion_tokens <= 24
    assert usage.total_tokens == usage.prompt_tokens + usage.completion_tokens


def test_a_streamed_chat_has_the_same_text_a_role_first_and_usage_last(client: OpenAI) -> None:
    whole = chat(client)
    first, *chunks, usage = chat(client, stream=True, stream_options={"include_usage": True})
    assert first.choices[0].delta.role == "assistant"
    text = "".join(chunk.choices[0].delta.content or "" for chunk in (first, *chunks))
    assert text == whole.choices[0].message.content
    assert [c.choices[0].finish_reason for c in (first, *chunks) if c.choices[0].finish_reason] == ["stop"]
    assert usage.choices == [] and usage.usage.completion_tokens == whole.usage.completion_tokens
    assert all(chunk.usage is None for chunk in (first, *chunks))
    assert len({chunk.id for chunk in (first, *chunks, usage)}) == 1


def test_a_completion_streams_the_text_that_it_gives_at_once_and_stops_at_its_limit(client: OpenAI) -> None:
    whole = complete(client)
    assert whole.choices[0].text.startswith(" four") and whole.choices[0].finish_reason == "length"
    assert whole.usage.completion_tokens == 16
    chunks = list(complete(client, stream=True))
    assert "".join(chunk.choices[0].text for chunk in chunks) == whole.choices[0].text
    assert chunks[-1].choices[0].finish_reason == "length"


def test_prompts_may_be_ids_and_several(client: OpenAI) -> None:
    alone = [complete(client, prompt=prompt).choices[0].text for prompt in ("One, two,", "The sky is")]
    together = complete(client, prompt=["One, two,", "The sky is"])
    assert [choice.text for choice in together.choices] == alone
    assert complete(client, prompt=[1, 2, 3, 4], max_tokens=2).usage.prompt_tokens == 4


def test_log_probabilities_of_a_chat_name_every_token_and_the_greedy_one_is_the_likeliest(client: OpenAI) -> None:
    for answer in (chat(client, logprobs=True, top_logprobs=3, max_tokens=5), _streamed_logprobs(client)):
        (choice,) = answer.choices
        entries = choice.logprobs.content
        assert len(entries) == 5
        assert b"".join(bytes(entry.bytes) for entry in entries).decode() == choice.message.content
        for entry in entries:
            assert len(entry.top_logprobs) == 3 and entry.top_logprobs[0].token == entry.token
            values = [top.logprob for top in entry.top_logprobs]
            assert values == sorted(values, reverse=True) and 0 >= entry.logprob == values[0]


def _streamed_logprobs(client: OpenAI) -> Any:
    with client.chat.completions.stream(
        model="SmolLM2-135M-Instruct", messages=CAPITAL, temperature=0, max_tokens=5, logprobs=True, top_logprobs=3
    ) as stream:
        for _ in stream:
            continue
        return stream.current_completion_snapshot


def test_log_probabilities_of_a_completion_are_aligned_with_its_text(client: OpenAI) -> None:
    (choice,) = complete(client, logprobs=2, max_tokens=4).choices
    found = choice.logprobs
    assert "".join(found.tokens) == choice.text and len(found.tokens) == len(found.token_logprobs) == 4
    starts = [choice.text.index(token, at) for token, at in zip(found.tokens, _starts(found.tokens), strict=True)]
    assert [offset - found.text_offset[0] for offset in found.text_offset] == starts
    assert all(len(top) >= 2 for top in found.top_logprobs)


def _starts(tokens: list[str]) -> list[int]:
    return [sum(map(len, tokens[:i])) for i in range(len(tokens))]


def test_a_seed_gives_the_same_samples_again_and_n_samples_differ(client: OpenAI) -> None:
    def samples(seed: int) -> list[str]:
        answer = chat(client, n=2, seed=seed, temperature=1.2, max_tokens=12)
        assert [choice.index for choice in answer.choices] == [0, 1]
        return [choice.message.content for choice in answer.choices]

    once, again, other = samples(7), samples(7), samples(8)
    assert once == again and once != other and once[0] != once[1]


def test_a_stop_string_within_tokens_ends_the_text_before_it(client: OpenAI) -> None:
    text = complete(client).choices[0].text
    at = text.index("ve, s")  # "five, six" without its ends: parts of several tokens
    (choice,) = complete(client, stop=["nowhere", "ve, s"]).choices
    assert choice.text == text[:at] and choice.finish_reason == "stop"
    streamed = "".join(chunk.choices[0].text for chunk in complete(client, stop="ve, s", stream=True))
    assert streamed == text[:at]


def test_content_may_be_parts_and_every_role_has_its_place(client: OpenAI) -> None:
    parts = [{"role": "user", "content": [{"type": "text", "text": CAPITAL[0]["content"]}]}]
    assert chat(client, messages=parts).choices[0].message.content == chat(client).choices[0].message.content
    talk = [{"role": "developer", "content": "Be brief."}, *CAPITAL, {"role": "assistant", "content": "Paris."}]
    answer = chat(client, messages=[*talk, {"role": "user", "content": "And of Italy?"}], max_completion_tokens=8,
                  max_tokens=openai.NOT_GIVEN)  # fmt: skip
    assert answer.choices[0].message.content


def test_an_invalid_request_raises_its_own_exception_class_that_names_the_field(client: OpenAI) -> None:
    with pytest.raises(openai.NotFoundError, match="SmolLM2-135M-Instruct") as missing:
        chat(client, model="gpt-4o")
    assert missing.value.code == "model_not_found"
    too_long: Any = [{"role": "user", "content": "word " * 2000}]
    with pytest.raises(openai.BadRequestError, match="1024 tokens") as long:
        chat(client, messages=too_long)
    assert long.value.code == "context_length_exceeded" and long.value.param == "messages"
    for field, value in (("logit_bias", {"five": 1}), ("presence_penalty", 2.5), ("temperature", -1), ("n", 0)):
        with pytest.raises(openai.BadRequestError, match=field) as wrong:
            chat(client, **{field: value})
        assert wrong.value.param == field and wrong.value.type == "invalid_request_error"
    with pytest.raises(openai.BadRequestError, match="temperature") as unknown:
        chat(client, extra_body={"temperatur": 1})
    assert unknown.value.code == "unknown_parameter"


@pytest.mark.slow
def test_every_penalty_and_bias_does_what_it_says(client: OpenAI, smollm2_dir: Path) -> None:
    from tokenizers import Tokenizer

    ids = Tokenizer.from_file(str(smollm2_dir / "tokenizer.json"))
    looping: Any = {"prompt": "The cat sat. The cat sat. The cat sat. The cat sat.", "max_tokens": 24}
    assert complete(client, **looping).choices[0].text == " The cat sat." * 6
    for fields in (
        {"frequency_penalty": 2}, {"presence_penalty": 2}, {"extra_body": {"repetition_penalty": 1.8}},
        {"logit_bias": {str(ids.encode(" cat").ids[0]): -100}},
    ):  # fmt: skip
        assert complete(client, **looping, **fields).choices[0].text.count("cat") < 3, fields
    (forced,) = ids.encode(" Rome").ids
    assert chat(client, logit_bias={str(forced): 100}, max_tokens=3).choices[0].message.content == " Rome Rome Rome"


@pytest.mark.slow
def test_limits_from_below_stop_ids_and_deadlines(client: OpenAI, smollm2_dir: Path) -> None:
    from tokenizers import Tokenizer

    ids = Tokenizer.from_file(str(smollm2_dir / "tokenizer.json"))
    plain = chat(client, max_tokens=60)
    assert plain.choices[0].finish_reason == "stop"
    longer = chat(client, max_tokens=60, extra_body={"min_tokens": 50})
    assert longer.usage.completion_tokens >= 50 > plain.usage.completion_tokens
    (stop,) = ids.encode(" is").ids
    cut = chat(client, max_tokens=60, extra_body={"stop_token_ids": [stop]})
    assert cut.choices[0].finish_reason == "stop"
    assert cut.choices[0].message.content == plain.choices[0].message.content.split(" is")[0]
    # Time for a first token on any machine, and too little on any for all of them.
    late = chat(client, n=4, max_tokens=900, extra_body={"max_time": 2.0, "ignore_eos": True})
    assert {choice.finish_reason for choice in late.choices} == {"timeout"}
    assert 0 < late.usage.completion_tokens < 4 * 900
    with pytest.raises(openai.APIStatusError) as missed:
        chat(client, extra_body={"max_time": 1e-6})
    assert missed.value.status_code == 504 and missed.value.code == "deadline_exceeded"


def test_echo_scores_the_prompt_as_its_tokens_would_have_been_sampled(client: OpenAI) -> None:
    text = "The capital of France is Paris."
    (echoed,) = complete(client, prompt=text, echo=True, logprobs=1, max_tokens=0).choices
    assert echoed.text == text and echoed.logprobs.token_logprobs[0] is None
    for count in (3, 5):
        (one,) = complete(client, prompt="".join(echoed.logprobs.tokens[:count]), logprobs=1, max_tokens=1).choices
        ((token, value),) = one.logprobs.top_logprobs[0].items()
        assert echoed.logprobs.top_logprobs[count][token] == pytest.approx(value, abs=1e-3)
    (both,) = complete(client, prompt=text, echo=True, max_tokens=4).choices
    assert both.text.startswith(text) and len(both.text) > len(text)


def test_best_of_returns_the_likeliest_and_bills_all(client: OpenAI) -> None:
    asked: Any = {"temperature": 1.3, "seed": 7, "max_tokens": 8, "logprobs": 0, "extra_body": {"ignore_eos": True}}
    every = complete(client, n=5, **asked)
    best = complete(client, n=2, best_of=5, **asked)
    totals = sorted(((sum(c.logprobs.token_logprobs), c.text) for c in every.choices), reverse=True)
    assert [c.text for c in best.choices] == [text for _, text in totals[:2]]
    assert best.usage.completion_tokens == every.usage.completion_tokens == 40


def test_the_model_the_version_and_the_reason_for_the_backend_are_told(client: OpenAI, real: Served) -> None:
    (model,) = client.models.list()
    assert model.id == "SmolLM2-135M-Instruct" == client.models.retrieve(model.id).id
    version = real.get("/version").json()
    assert version["backend"] == "cpu" and version["backend_reason"] and version["manifest"]["ops"]


def test_a_request_id_is_in_the_header_and_in_the_log(client: OpenAI, real: Served) -> None:
    named = chat(client, max_tokens=1, extra_headers={"x-request-id": "end-to-end-7"})
    assert named._request_id == "end-to-end-7"
    real.wait_for(rf"request_id=end-to-end-7 method=POST path=/v1/chat/completions status=200 .*id={named.id}")
    drawn = chat(client, max_tokens=1)._request_id
    assert drawn and drawn != "end-to-end-7"
    real.wait_for(f"request_id={drawn} ")


@pytest.mark.slow
async def test_64_clients_that_come_and_go_leave_no_block_in_use(tiny: Served) -> None:
    draw = random.Random(2)
    async with AsyncOpenAI(base_url=f"{tiny.url}/v1", api_key="none", max_retries=0, timeout=PATIENCE) as client:
        ends = await asyncio.gather(*(visit(client, tiny.name, number, draw) for number in range(64)))
        assert set(ends) == {"whole", "left the stream", "was cancelled"}
        await asyncio.to_thread(eventually, lambda: idle(tiny))
        after = await client.completions.create(model=tiny.name, prompt="still here?", max_tokens=3)
        assert after.usage is not None and after.usage.completion_tokens <= 3
    assert tiny.stats()["finished"] >= 64
    # The last one's blocks, too, once the step after its end token is done.
    await asyncio.to_thread(eventually, lambda: idle(tiny))
    assert tiny.stop() == 0
    assert "Traceback" not in tiny.log


async def visit(client: AsyncOpenAI, model: str, number: int, draw: random.Random) -> str:
    """One client: waits for all, leaves its stream after some pieces, or is cancelled at a moment of its own."""
    tokens, pieces, moment = draw.randint(20, 200), draw.randint(1, 60), draw.random() / 2
    ask: Any = {
        "model": model, "prompt": "abc" * draw.randint(1, 60), "max_tokens": tokens, "n": 1 + number % 2,
        "extra_body": {"ignore_eos": True},
    }  # fmt: skip
    if number % 4 == 0:
        answer = await client.completions.create(**ask)
        assert answer.usage is not None and answer.usage.completion_tokens == tokens * ask["n"]
        return "whole"
    if number % 4 == 1:
        with pytest.raises(asyncio.TimeoutError):
            await asyncio.wait_for(client.completions.create(**{**ask, "max_tokens": 1500}), moment)
        return "was cancelled"
    async with await client.completions.create(stream=True, **{**ask, "max_tokens": 1500}) as stream:
        async for _ in stream:
            pieces -= 1
            if pieces == 0:
                break
    return "left the stream"


def idle(served: Served) -> bool:
    stats = served.stats()
    return stats["running"] == stats["waiting"] == stats["blocks_used"] == 0


@pytest.mark.slow
def test_while_state_is_scarce_no_more_requests_wait_than_max_queue(folder: Path) -> None:
    """The second request needs more state at once than the first one leaves, so it waits as long as that one runs."""
    scarce = ("load=dummy", "infer.threads=1", "infer.kv_memory=2MiB", "infer.max_seq_len=4096",
              "infer.step_tokens=4096")  # fmt: skip
    body = {"prompt": [5] * 600, "max_tokens": 3400, "ignore_eos": True, "temperature": 0}
    large = {**body, "prompt": [6] * 4000, "max_tokens": 2}
    with Served.warm(folder, *scarce, "infer.max_reqs=8", "serve.max_queue=1") as served, ThreadPoolExecutor() as pool:
        with served.http.stream("POST", "/v1/completions", json={**body, "stream": True}) as first:
            lines = first.iter_lines()  # kept, because httpx closes the stream with it
            next(lines)
            second = pool.submit(served.http.post, "/v1/completions", json=large)
            eventually(lambda: served.stats()["waiting"] == 1)
            third = served.http.post("/v1/completions", json=large)
        assert third.status_code == 429 and int(third.headers["retry-after"]) >= 1
        assert "1 requests wait for memory: try again in a moment" in third.json()["error"]["message"]
        # The first one's client is gone, so there is room.
        assert second.result().status_code == 200 and second.result().json()["usage"]["completion_tokens"] == 2
        eventually(lambda: served.stats()["blocks_used"] == 0)


def test_a_killed_worker_ends_its_requests_with_the_reason_and_the_server_is_alive_but_not_ready(
    mortal: Served,
) -> None:
    (worker,) = (
        pid for pid, command in descendants(mortal.process.pid).items() if "engine.processes.child worker" in command
    )
    with connect(mortal) as client:
        stream = complete(client, model=mortal.name, stream=True, max_tokens=1900, extra_body={"ignore_eos": True})
        next(iter(stream))
        os.kill(worker, signal.SIGKILL)
        with pytest.raises(openai.APIError, match=r"worker process was killed by signal SIGKILL"):
            for _ in stream:
                continue
        assert mortal.get("/health").status_code == 200
        ready = mortal.get("/ready")
        assert ready.status_code == 503 and "SIGKILL" in ready.json()["error"]["message"]
        with pytest.raises(openai.InternalServerError, match="SIGKILL") as refused:
            complete(client, model=mortal.name)
        assert refused.value.status_code == 503
    below = descendants(mortal.process.pid)
    assert mortal.stop() == 0
    eventually(lambda: not any(Path(f"/proc/{pid}/exe").exists() for pid in below))


@pytest.mark.slow
def test_a_worker_that_dies_at_rest_is_noticed(mortal: Served) -> None:
    (worker,) = (
        pid for pid, command in descendants(mortal.process.pid).items() if "engine.processes.child worker" in command
    )
    os.kill(worker, signal.SIGKILL)
    eventually(lambda: mortal.get("/ready").status_code == 503)
    assert mortal.get("/health").status_code == 200 and mortal.get("/stats").status_code == 503
    assert mortal.stop() == 0


@pytest.mark.slow
def test_sigterm_lets_a_stream_end_and_the_next_server_takes_the_port(folder: Path, tmp_path: Path) -> None:
    port, hold = free_port(), Hold(tmp_path, 20)
    environ = [f"{name}={value}" for name, value in hold.environ.items()]
    # On a busy machine the stream may take longer than a drain does by default.
    program = (EVENER, "serve", folder, f"serve.port={port}", *TINY, f"--drain-timeout={PATIENCE}")
    with Served("env", *environ, *program) as tiny, connect(tiny) as client:
        stream = complete(
            client, model=tiny.name, stream=True, max_tokens=300, extra_body={"ignore_eos": True},
            stream_options={"include_usage": True},
        )  # fmt: skip
        next(iter(stream))
        tiny.process.send_signal(signal.SIGTERM)
        tiny.wait_for("SIGTERM: 1 running requests have")
        hold.release()
        *_, last = stream
        assert last.usage is not None and last.usage.completion_tokens == 300
        assert tiny.process.wait(PATIENCE) == 0
        with pytest.raises(httpx.TransportError):
            tiny.get("/health")
    with Served.warm(folder, *TINY, f"serve.port={port}") as again, connect(again) as client:
        assert again.url == tiny.url
        assert complete(client, model=again.name, max_tokens=2).usage.completion_tokens <= 2
        assert again.stop(signal.SIGINT) == 0


@pytest.mark.parametrize("number", [signal.SIGTERM, pytest.param(signal.SIGINT, marks=pytest.mark.slow)])
def test_a_signal_while_the_engine_starts_ends_every_process_with_one_line(
    folder: Path, number: signal.Signals
) -> None:
    # Not pytest's folder: a socket's path has about a hundred characters at most.
    with tempfile.TemporaryDirectory(prefix="ends-") as below:
        stop_while_it_starts(folder, number, Path(below))


def stop_while_it_starts(folder: Path, number: signal.Signals, temporary: Path) -> None:
    command = [str(word) for word in (EVENER, "serve", folder, "serve.port=0", *TINY)]
    held = temporary / "held"
    held.mkdir()
    # Nothing is ever loaded: a busy machine could give this process no time until the engine had started.
    environ = {**os.environ, **Hold(held, None).environ, "TMPDIR": str(temporary)}
    with subprocess.Popen(command, stdin=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, env=environ) as process:
        # As soon as the controller is there: it takes no messages before the model is loaded.
        eventually(
            lambda: any("engine.processes.child controller" in each for each in descendants(process.pid).values())
        )
        below = descendants(process.pid)
        process.send_signal(number)
        assert process.wait(PATIENCE) == 128 + number
        assert process.stderr is not None
        said = process.stderr.read()
    assert said.count("\n") == 1 and f"{number.name}: stopped before the engine had started" in said
    eventually(lambda: not any(Path(f"/proc/{pid}/exe").exists() for pid in below))
    # A worker that had just begun may be the last to end, and what it left is the next start's to remove.
    eventually(lambda: remove_stale_folders(temporary) or not list(temporary.glob("evener-*")))
