"""Ten thousand malformed requests over a real engine: no 5xx, nothing left behind, and the server still answers."""

from __future__ import annotations

import asyncio
import copy
import itertools
import json
import logging
import random
import socket
import struct
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
import pytest
import requests
from asgi_calls import Answer, Call, InProcess
from hypothesis import HealthCheck, Phase, seed, settings
from hypothesis import given as given_by
from malformed_requests import CHAT, COMPLETIONS, COUNT, HEADERS, MESSAGES, RESPONSES, Malformed
from served import Served, eventually, tiny_model

from evener_server.body import BodyLimits

if TYPE_CHECKING:
    import schemathesis

TINY = {
    "load": "dummy", "infer.kv_memory": "2MiB", "infer.max_seq_len": "256", "infer.max_reqs": "16",
    "infer.threads": "1", "serve.max_queue": "100000", "executor": "inline",
}  # fmt: skip
BATCH = 50
#: Each kind of answer that thousands of requests get; 0: none, as the client has gone.
ANSWERS = {0, 200, 400, 404, 405, 408, 413, 415}
GOOD = {"prompt": "hello", "max_tokens": 8, "temperature": 0, "ignore_eos": True}


def make_model(folder: Path) -> Path:
    """A tiny model with a chat template."""
    tiny_model(folder)
    template = "{% for m in messages %}<{{ m['role'] }}>{{ m['content'] }}{% endfor %}"
    (folder / "tokenizer_config.json").write_text(json.dumps({"chat_template": template}), "utf-8")
    return folder


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("model") / "tiny")


@pytest.fixture(scope="module")
def server(model: Path) -> Iterator[InProcess]:
    with InProcess(model, TINY, BodyLimits(max_bytes=100_000, timeout=0.3)) as found:
        yield found


@pytest.fixture
def unharmed(server: InProcess) -> Iterator[InProcess]:
    """The server; afterwards it holds nothing and says what it said before."""
    before = good_answer(server)
    yield server
    server.at_rest()
    assert good_answer(server) == before


def good_answer(server: InProcess) -> Any:
    answer = server.calls([Call(COMPLETIONS, json.dumps({**GOOD, "model": "tiny"}).encode())])[0]
    assert answer.status == 200, answer
    return json.loads(answer.body)["choices"]


def check(call: Call, answer: Answer) -> None:
    """What holds for every answer."""
    # A request may ask for so little time that the answer to it is that it has passed.
    too_late = answer.status == 504 and b'"deadline_exceeded"' in answer.body and b'"max_time"' in call.body
    assert answer.status < 500 or too_late, f"{call}\n{answer}"
    if answer.status == 0:
        assert call.gone_after is not None or not call.whole, f"no answer: {call}"
        return
    assert answer.headers["x-request-id"], call
    if not answer.ended:
        assert call.gone_after is not None or not call.whole, f"the answer did not end: {call}"
        return
    stays = call.gone_after is None and call.whole
    if answer.headers.get("content-type", "").startswith("text/event-stream"):
        assert answer.body.endswith(b"data: [DONE]\n\n") or b"\n\nevent: " in answer.body or not stays, (
            f"{call}\n{answer}"
        )
        assert b'"server_error"' not in answer.body or not stays, f"{call}\n{answer}"
    # Among successful answers, metrics are text and pages are HTML.
    elif call.method != "HEAD" and (answer.status >= 400 or "json" in answer.headers.get("content-type", "")):
        body = json.loads(answer.body)
        if answer.status >= 400:
            fields = {"message", "type"} if call.path.startswith(MESSAGES) else {"message", "type", "param", "code"}
            assert set(body["error"]) == fields and body["error"]["message"], body


def send_all(server: InProcess, calls: Sequence[Call]) -> Counter[int]:
    """All of them, some at a time; how often each status came."""
    seen: Counter[int] = Counter()
    for first in range(0, len(calls), BATCH):
        part = calls[first : first + BATCH]
        for call, answer in zip(part, server.calls(part), strict=True):
            check(call, answer)
            seen[answer.status] += 1
    return seen


def own(server: InProcess, count: int, number: int) -> None:
    seen = send_all(server, list(itertools.islice(Malformed("tiny", number), count)))
    assert set(seen) >= ANSWERS, f"not every kind of answer was seen: {seen}"


def test_malformed_requests_end_in_4xx_and_leave_nothing(unharmed: InProcess) -> None:
    own(unharmed, 400, 1)


@pytest.mark.slow
def test_nine_thousand_malformed_requests_end_in_4xx_and_leave_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    import request_fuzzer  # it imports this module

    assert request_fuzzer.main(["--count", "9000", "--first", "10"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["requests"] == 9000 and {int(status) for status in report["statuses"]} >= ANSWERS


def test_the_fuzzer_reports_a_traceback_in_the_log(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    import request_fuzzer

    def failing(call: Call, answer: Answer) -> None:
        try:
            raise ValueError("planted")
        except ValueError:
            logging.getLogger("evener_server").exception("it failed")

    monkeypatch.setattr(request_fuzzer, "check", failing)
    assert request_fuzzer.main(["--count", "1"]) == 1
    assert "it failed" in capsys.readouterr().out


# KsanaLLM's endpoints

_TARGETS = [
    {"target_name": "layernorm", "slice_pos": [[0, 1], [-1, -1]], "token_reduce_mode": "GATHER_ALL"},
    {"target_name": "logits", "token_reduce_mode": "GATHER_TOKEN_ID"}, {"target_name": "transformer", "token_id": [5]},
]  # fmt: skip
_ROWS = {"pos": [1], "embeddings": [[0.5] * 60]}
KSANA_BODIES: Sequence[tuple[str, dict[str, Any]]] = [
    ("/generate", {"prompt": "hello", "stream": False, "sampling_config": {
        "max_new_tokens": 4, "topk": 2, "topp": 0.5, "temperature": 0.5, "num_beams": 1, "num_return_sequences": 2,
        "logprobs": 2, "stop_token_ids": [9], "stop_strings": ["z"], "repetition_penalty": 1.1}}),
    ("/generate", {"input_tokens": [5, 6, 7], "stream": True, "sampling_config": {"max_new_tokens": 3},
                   "input_refit_embedding": _ROWS, "model_name": "tiny"}),
    ("/forward", {"requests": [{"prompt": "hello", "request_target": _TARGETS},
                               {"input_tokens": [5, 6, 7], "request_target": _TARGETS[:1],
                                "input_refit_embedding": _ROWS}]}),
]  # fmt: skip
_WRONG: Sequence[Any] = (
    None, True, 0, -1, 1.5, 2**31, 2**63, -(2**63), 1e308, "", "a",
    "\ud7ff", [], [[]], [None], [-1], [2**40], {}, {"a": 1},
    [1] * 300, [[0, 0]] * 300, [[5, 2]], [[-9, 99]], [[0, 0, 0]], [1.5] * 64, b"bytes", {1: 2},
)  # fmt: skip


def places(value: Any, where: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """The path of every value inside."""
    for key, inner in value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ():
        yield (*where, key)
        yield from places(inner, (*where, key))


def with_one_wrong_value(path: str, good: dict[str, Any], rng: random.Random) -> Call:
    """A value anywhere in it is another, in JSON or in msgpack; or some bytes of the msgpack are others."""
    body, wrong = copy.deepcopy(good), rng.choice(_WRONG)
    packed = (b"content-type", b"application/x-msgpack")
    where = rng.choice(list(places(body)))
    holder: Any = body
    for key in where[:-1]:
        holder = holder[key]
    holder[where[-1]] = copy.deepcopy(wrong)
    if rng.random() < 0.4 and wrong != b"bytes" and wrong != {1: 2}:
        return Call(path, json.dumps(body).encode("utf-8", "surrogatepass"))
    if rng.random() < 0.5:
        return Call(path, msgspec.msgpack.encode(body), headers=(packed,))
    raw = bytearray(msgspec.msgpack.encode(good))
    for _ in range(rng.randint(1, 4)):
        raw[rng.randrange(len(raw))] = rng.randrange(256)
    return Call(path, bytes(raw[: rng.randint(len(raw) // 2, len(raw))]), headers=(packed,))


@pytest.mark.parametrize("batches", [8, pytest.param(30, marks=pytest.mark.slow)])
def test_malformed_requests_of_ksanallm_end_in_4xx_and_leave_nothing(unharmed: InProcess, batches: int) -> None:
    rng, seen = random.Random(5), Counter[int]()
    for _ in range(batches):
        calls = [with_one_wrong_value(*rng.choice(KSANA_BODIES), rng) for _ in range(BATCH)]
        for call, answer in zip(calls, unharmed.calls(calls), strict=True):
            assert answer.status in (200, 400, 404, 413) and answer.ended, f"{call}\n{answer}"
            seen[answer.status] += 1
            if answer.status != 200:
                decode = msgspec.msgpack.decode if "msgpack" in answer.headers["content-type"] else json.loads
                assert set(decode(answer.body)) == {"message", "code", "error"}, f"{call}\n{answer}"
    good = [Call(path, json.dumps(body).encode()) for path, body in KSANA_BODIES]
    assert [answer.status for answer in unharmed.calls(good)] == [200] * len(good)
    assert seen[200] > 5 * batches / 3 and seen[400] > 50 * batches / 3


# From the API's own description


def narrowed(document: dict[str, Any]) -> dict[str, Any]:
    """The description with the model's real name and short answers, so that many requests run."""
    made = copy.deepcopy(document)
    for name in ("ChatBody", "CompletionBody"):
        fields = made["components"]["schemas"][name]["properties"]
        fields["model"] = {"type": "string", "enum": ["tiny"]}
        for other in ("max_completion_tokens", "prompt_embeds"):
            fields.pop(other, None)
        fields["max_tokens"] = {"type": "integer", "minimum": 1, "maximum": 6}
        # A completion may have prompt_embeds in place of its prompt; made-up ones would all be refused.
        made["components"]["schemas"][name].setdefault("required", ["prompt"]).append("max_tokens")
        fields["n"] = {"type": "integer", "minimum": 1, "maximum": 3}
    message = made["components"]["schemas"]["Message"]
    message["required"], message["properties"]["content"] = ["role", "content"], {"type": "string", "minLength": 1}
    return made


def to_call(case: schemathesis.Case) -> Call:
    sent = requests.Request(**case.as_transport_kwargs(base_url="http://test")).prepare()
    body = sent.body if isinstance(sent.body, bytes) else (sent.body or "").encode("utf-8", "surrogatepass")
    headers = tuple((name.lower().encode("latin-1"), value.encode("latin-1") if isinstance(value, str) else value)
                    for name, value in sent.headers.items())  # fmt: skip
    path = requests.utils.unquote(sent.path_url.partition("?")[0])
    return Call(path, body, str(sent.method), headers, query=sent.path_url.partition("?")[2].encode())


def described(server: InProcess, mode: str, label: str, count: int) -> None:
    import schemathesis  # half a second, of each process that collects tests

    document = server.app.openapi()
    schema = schemathesis.openapi.from_dict(narrowed(document) if mode == "positive" else document)
    operation = next(found.ok() for found in schema.get_all_operations() if found.ok().label == label)
    calls: list[Call] = []

    @seed(7)
    @settings(max_examples=count, database=None, deadline=None, phases=[Phase.generate],
              suppress_health_check=list(HealthCheck))  # fmt: skip
    @given_by(case=operation.as_strategy(generation_mode=schemathesis.GenerationMode(mode)))
    def collect(case: schemathesis.Case) -> None:
        calls.append(to_call(case))

    collect()
    assert len(calls) >= count
    sent = send_all(server, calls)
    assert mode == "negative" or sent[200] > 0, f"none was answered: {sent}"


#: The others are translated into chats: what they refuse is their own.
DESCRIBED = [
    *((mode, f"POST {path}") for mode in ("positive", "negative") for path in (CHAT, COMPLETIONS)),
    *(("negative", f"POST {path}") for path in (RESPONSES, MESSAGES, COUNT)),
]


@pytest.mark.parametrize(("mode", "label"), [DESCRIBED[1], DESCRIBED[4]])
def test_requests_made_from_the_description_are_answered(unharmed: InProcess, mode: str, label: str) -> None:
    described(unharmed, mode, label, 8)


@pytest.mark.slow
@pytest.mark.parametrize(("mode", "label"), DESCRIBED)
def test_many_requests_made_from_the_description_are_answered(unharmed: InProcess, mode: str, label: str) -> None:
    described(unharmed, mode, label, 150)


# Through real sockets


class Raw:
    """Bytes for a socket: HTTP that is none, or none that anybody should send."""

    def __init__(self, number: int) -> None:
        self._rng = random.Random(number)

    def __iter__(self) -> Iterator[tuple[list[bytes], bool]]:
        return self

    def __next__(self) -> tuple[list[bytes], bool]:
        """Pieces to send, and whether the connection is then reset instead of read."""
        pieces = self._rng.choice(
            [self.line, self.lengths, self.chunked, self.head, self.noise, self.stream, self.good]
        )()
        return pieces, self._rng.random() < 0.25

    def line(self) -> list[bytes]:
        line = self._rng.choice([
            b"GET", b"GET /", b"GET / HTTP/9.9", b"POST /v1/completions HTTP/1.0", b"GET  /  HTTP/1.1", b"\r\n\r\n",
            b"\x16\x03\x01",
            b"GET /" + b"a" * 70_000 + b" HTTP/1.1", b"PRI * HTTP/2.0", b"GET /%ZZ HTTP/1.1", b"G\xffT / HTTP/1.1",
            b"OPTIONS * HTTP/1.1", b"GET http://x/ HTTP/1.1", b"GET / HTTP/1.1 x", b"CONNECT a:1 HTTP/1.1",
        ])  # fmt: skip
        return [line + b"\r\nHost: localhost\r\n\r\n"]

    def lengths(self) -> list[bytes]:
        length = self._rng.choice(
            [b"-1", b"0", b"1", b"99999999999999999999", b"0x10", b"5, 5", b"5\r\nContent-Length: 6", b"", b" 5 "]
        )
        return [self._head(b"Content-Length: " + length) + self._body()]

    def chunked(self) -> list[bytes]:
        coding = self._rng.choice([b"chunked", b"chunked, chunked", b"xchunked", b"identity", b"gzip, chunked"])
        body = self._body()
        size = self._rng.choice(
            [b"%x" % len(body), b"-1", b"ffffffffffffffffff", b"zz", b"", b"%x;ext=%s" % (len(body), b"a" * 50)]
        )
        end = self._rng.choice([b"0\r\n\r\n", b"0\r\nTrailer: x\r\n\r\n", b"", b"\r\n"])
        both = self._rng.choice([b"", b"\r\nContent-Length: 5"])
        return [self._head(b"Transfer-Encoding: " + coding + both), size + b"\r\n" + body + b"\r\n", end]

    def head(self) -> list[bytes]:
        lines = [b"%s: %s" % self._rng.choice(HEADERS) for _ in range(self._rng.randint(1, 5))]
        odd = self._rng.choice(
            [
                b"",
                b"No colon",
                b": x",
                b" folded: x",
                b"a" * 60_000 + b": b",
                b"X: \x00",
                b"\r\n".join([b"A: b"] * 2000),
            ]
        )
        body = self._body()
        return [self._head(b"\r\n".join([b"Content-Length: %d" % len(body), *lines, *([odd] if odd else [])])) + body]

    def noise(self) -> list[bytes]:
        return [self._rng.randbytes(self._rng.randint(1, 3000)) for _ in range(self._rng.randint(1, 3))]

    def stream(self) -> list[bytes]:
        body = json.dumps(
            {"model": "tiny", "prompt": "hi", "max_tokens": 60, "stream": True, "ignore_eos": True}
        ).encode()
        raw = self._head(b"Content-Length: %d" % len(body)) + body
        return [raw] * self._rng.choice([1, 1, 3])

    def good(self) -> list[bytes]:
        body = self._body()
        raw = self._head(b"Content-Length: %d" % len(body)) + body
        at = self._rng.randrange(len(raw))
        return self._rng.choice(
            [[raw], [raw[:at], raw[at:]], [raw[:at]], [raw[i : i + 1] for i in range(60)], [raw * 3]]
        )

    def _head(self, lines: bytes) -> bytes:
        head = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
        return head + lines + b"\r\n\r\n"

    def _body(self) -> bytes:
        return json.dumps({"model": "tiny", "prompt": "hi", "max_tokens": self._rng.randint(1, 5)}).encode()


async def raw_answer(port: int, pieces: list[bytes], reset: bool, quiet: asyncio.Future[Any]) -> bytes:
    """What comes back; a connection that says nothing more once ``quiet`` is done is closed."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    found = b""
    if reset:
        made: socket.socket = writer.get_extra_info("socket")
        made.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    try:
        for piece in pieces:
            writer.write(piece)
            await writer.drain()
            await asyncio.sleep(0)
        while not reset:
            reading = asyncio.ensure_future(reader.read(1 << 16))
            await asyncio.wait((reading, quiet), return_when=asyncio.FIRST_COMPLETED)
            if not reading.done():
                reading.cancel()  # it waits for more of the request, which is an answer, too
                break
            if not (part := reading.result()):
                break
            found += part
    except ConnectionError:
        pass  # it has closed the connection, which is one, too
    finally:
        writer.close()
    return found


def over_sockets(model: Path, count: int, number: int) -> None:
    keys = {key: value for key, value in TINY.items() if key != "executor"}
    with Served.warm(model, *(f"{key}={value}" for key, value in keys.items())) as served:
        port = int(served.url.rpartition(":")[2])
        wanted = {**GOOD, "model": served.name}
        before = served.http.post("/v1/completions", json=wanted).json()["choices"]

        async def answered_another() -> None:
            # After a while, whatever has not answered them by then may be the machine; not once this is answered.
            await asyncio.sleep(3.0)
            (await asyncio.to_thread(served.http.post, "/v1/completions", json=wanted)).raise_for_status()

        async def some(part: list[tuple[list[bytes], bool]]) -> list[bytes]:
            quiet = asyncio.ensure_future(answered_another())
            answers = await asyncio.gather(*(raw_answer(port, *one, quiet) for one in part))
            await quiet
            return answers

        seen: Counter[bytes] = Counter()
        for batch in range(0, count, BATCH):
            part = list(itertools.islice(Raw(number + batch), min(BATCH, count - batch)))
            for (pieces, reset), answer in zip(part, asyncio.run(some(part)), strict=True):
                statuses = [line.split()[1] for line in answer.split(b"\r\n") if line.startswith(b"HTTP/1.1 ")]
                assert not any(status.startswith(b"5") for status in statuses), (pieces, reset, answer[:500])
                seen.update(statuses)
        assert {b"200", b"400"} <= set(seen), seen
        wait_until_idle(served)
        assert served.http.post("/v1/completions", json=wanted).json()["choices"] == before
        assert "Traceback" not in served.log, served.log[-4000:]
        assert served.stop() == 0


def wait_until_idle(served: Served) -> None:
    def idle() -> bool:
        # Of one moment: a request whose client has gone may begin between two looks. Its blocks return with the step
        # that was under way when it was ended.
        stats = served.stats()
        return stats["running"] == stats["waiting"] == stats["blocks_used"] == 0

    eventually(idle)


def test_bytes_that_are_not_http_leave_a_server_that_answers(model: Path) -> None:
    over_sockets(model, 40, 1)


@pytest.mark.slow
def test_many_bytes_that_are_not_http_leave_a_server_that_answers(model: Path) -> None:
    over_sockets(model, 300, 100)
