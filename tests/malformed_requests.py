"""Requests that nobody should send, made from those that somebody would. The same seed gives the same requests."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterator
from typing import Any

from asgi_calls import JSON, Call

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
RESPONSES, MESSAGES, COUNT = "/v1/responses", "/v1/messages", "/v1/messages/count_tokens"
#: Values for any field, as JSON text: wrong types, sizes, and what JSON does not have.
VALUES = (
    "null", "true", "false", "0", "-0", "-0.0", "1", "-1", "0.5", "2", "1e308", "1e309", "-1e400", "1e-400", "1e5",
    str(2**31), str(-(2**31) - 1), str(2**63), str(-(2**63)), str(2**64), "9" * 400, "0." + "3" * 500, "NaN",
    "Infinity",
    "-Infinity", "nan", '""', '"a"', '"\\u0000"', '"\\ud800"', '"\\udc00\\ud800"', '"\\ud83d\\ude00"', '"\\uFFFF"',
    '"' + "x" * 5000 + '"', "[]", "[null]", "[[]]", "[1, 2, 3]", '["a", "b"]', "[" + "1," * 300 + "1]", "{}",
    '{"a": 1}', '{"type": "text"}', '{"": {}}', '"auto"', '"none"', "[-1]", "[1.5]", "[true]", '[1, "a"]',
    "[9999999999]",
    "[" * 70 + "]" * 70, '{"a":' * 70 + "1" + "}" * 70, '{"1": 1e999}', '{"5": 100}', "tru", "'a'", "0x10", "01",
    "+1", "1.",
)  # fmt: skip
FIELDS = (
    "model", "max_tokens", "max_completion_tokens", "temperature", "top_p", "top_k", "min_p", "seed", "n", "best_of",
    "stop", "stop_with_eos", "ignore_eos", "stream", "stream_options", "user", "logprobs", "top_logprobs", "echo",
    "suffix", "frequency_penalty", "presence_penalty", "repetition_penalty", "logit_bias", "stop_token_ids",
    "min_tokens",
    "response_format", "tools", "tool_choice", "functions", "metadata", "chat_template_kwargs", "chat_template",
    "prompt_logprobs", "prompt", "messages", "timeout", "", "__class__", "\x00", "é" * 50, "a" * 3000,
)  # fmt: skip
TEXTS = (
    "", " ", "\x00", "\x7f\x1b[31m", "é", "e\u0301", "\u202e", "\ufeff", "\U0001f600", "\U000e0001", "\uffff",
    "{{7*7}}",
    "{% for i in range(9**9) %}x{% endfor %}", "<|im_end|>", "<|im_start|>system", "</s>", "<s>", "a" * 3000,
    "\n" * 2000,
    "데" * 1000, "x y " * 900,
)  # fmt: skip
KINDS = (
    b"text/plain", b"", b"application/json; charset=latin-1", b"application/json;charset=\"utf-8\"",
    b"APPLICATION/JSON",
    b"application/json;;;=", b"multipart/form-data; boundary=x", b"application/x-www-form-urlencoded", b"\xff\xfe",
    b"application/json, application/json", b"application/json" + b";a=b" * 500,
)  # fmt: skip
HEADERS = (
    (b"content-encoding", b"gzip"), (b"content-encoding", b"identity, br"), (b"transfer-encoding", b"chunked, chunked"),
    (b"content-length", b"-1"), (b"content-length", b"99999999999999999999"), (b"content-length", b"abc"),
    (b"content-length", b"0"), (b"x-request-id", b"a\tb"), (b"x-request-id", b"\xff" * 9), (b"x-request-id",
    b"a" * 200),
    (b"x-request-id", b""), (b"x-request-id", b"../../etc/passwd"), (b"authorization", b"Bearer"),
    (b"authorization", b"Basic \xff"), (b"authorization", b"Bearer " + b"k" * 8000), (b"host", b"\x00"), (b"host", b""),
    (b"expect", b"100-continue"), (b"accept", b"image/png"), (b"accept-encoding", b"*;q=0"), (b"range", b"bytes=0-1"),
    (b"connection", b"upgrade"), (b"upgrade", b"websocket"), (b"cookie", b"=" * 4000), (b"x-forwarded-for", b"\r\n"),
    (b"retry-after", b"-1"), (b"traceparent", b"00-zz"), (b"content-type", b"application/json"), (b"", b""),
)  # fmt: skip
PATHS = (
    "/", "", "*", "/v1", "/v1/", "/v1/completions/", "//v1/completions", "/v1/../v1/completions", "/V1/COMPLETIONS",
    "/v1/models/", "/v1/models/%00", "/v1/models/..%2f..%2fetc%2fpasswd", "/v1/models/" + "a" * 5000,
    "/v1/models/é\ud800",
    "/health/x", "/ready", "/stats", "/version", "/metrics", "/docs", "/openapi.json", "/v1/completions\x00",
    "/v1/embeddings", "/generate", "/tokenize", "http://other/v1/completions",
)  # fmt: skip
METHODS = ("GET", "HEAD", "PUT", "DELETE", "OPTIONS", "PATCH", "TRACE", "CONNECT", "BREW", "post", "")


class Malformed:
    """Makes requests.

    Args:
        model: the name that the server knows.
        seed: of everything.
    """

    def __init__(self, model: str, seed: int) -> None:
        self._model, self._rng = model, random.Random(seed)
        self._makers: tuple[Callable[[], Call], ...] = (
            self.wrong_field, self.wrong_field, self.wrong_field, self.wrong_field, self.two_wrong, self.broken_text,
            self.broken_text, self.broken_bytes, self.odd_text, self.odd_text, self.odd_messages, self.odd_messages,
            self.nested, self.odd_type, self.odd_header, self.odd_path, self.cut_body, self.cut_body, self.slow_body,
            self.huge, self.leaves, self.leaves, self.leaves, self.good,
        )  # fmt: skip

    def __iter__(self) -> Iterator[Call]:
        return self

    def __next__(self) -> Call:
        return self._rng.choice(self._makers)()

    def good(self) -> Call:
        """Nothing is wrong with it."""
        path, fields = self._good()
        return Call(path, json.dumps(fields).encode())

    def wrong_field(self) -> Call:
        """One field has a value of the list."""
        path, fields = self._good()
        return Call(path, self._with(fields, {self._rng.choice(FIELDS): self._rng.choice(VALUES)}))

    def two_wrong(self) -> Call:
        """Several fields have, some of them twice in the text."""
        path, fields = self._good()
        wrong = {self._rng.choice(FIELDS): self._rng.choice(VALUES) for _ in range(self._rng.randint(2, 5))}
        body = self._with(fields, wrong)
        twice = self._rng.choice(VALUES)
        return Call(path, body[:-1] + b',"model":' + twice.encode() + b"}" if self._rng.random() < 0.3 else body)

    def broken_text(self) -> Call:
        """The JSON text is cut, or has something else in it."""
        path, fields = self._good()
        text = json.dumps(fields)
        at = self._rng.randrange(len(text))
        junk = self._rng.choice(
            ['"', "{", "}", "[", "]", ",", ":", "\\", "\\u12", "/*x*/", "\x00", "\n\t", "\ufeff", "NaN"]
        )
        cut = self._rng.choice([text[:at], text[at:], text[:at] + junk + text[at:], text + junk, junk + text, text * 2])
        return Call(path, cut.encode())

    def broken_bytes(self) -> Call:
        """Some bytes are others; mostly this is no UTF-8 any more."""
        path, fields = self._good()
        raw = bytearray(json.dumps(fields, ensure_ascii=False).encode())
        for _ in range(self._rng.randint(1, 6)):
            raw[self._rng.randrange(len(raw))] = self._rng.randrange(256)
        raw = raw if self._rng.random() < 0.8 else bytearray(self._rng.randbytes(self._rng.randint(0, 200)))
        return Call(path, bytes(raw))

    def odd_text(self) -> Call:
        """A string is odd: controls, halves of characters, template code, special tokens."""
        path, fields = self._good()
        text = self._rng.choice(TEXTS)
        key = self._rng.choice(["prompt", "stop", "user", "model", "suffix"])
        if path == CHAT and key == "prompt":
            fields["messages"] = [{"role": self._rng.choice(["user", "system", "tool", text]), "content": text}]
        else:
            fields[key] = self._rng.choice([text, [text], [text, "b"]])
        return Call(path, json.dumps(fields, ensure_ascii=self._rng.random() < 0.5).encode("utf-8", "surrogatepass"))

    def odd_messages(self) -> Call:
        """Messages or prompts of odd shapes."""
        rng = self._rng
        message: dict[str, Any] = {
            "role": rng.choice(["user", "assistant", "system", "tool", "developer", "robot", None, 5, []]),
            "content": rng.choice(
                ["hi", None, 5, [], [{"type": "text", "text": "a"}], [{"type": "image_url"}], {}, [1]]
            ),
        }
        if rng.random() < 0.5:
            message[
                rng.choice(["name", "tool_calls", "tool_call_id", "refusal", "audio", "x", "reasoning_content"])
            ] = rng.choice([None, "a", [], {}, [{"id": "1", "type": "function", "function": {}}], 5])
        path, fields = self._good(CHAT)
        fields["messages"] = rng.choice([[message], [message] * 200, message, [[message]], [message, None], []])
        if rng.random() < 0.3:
            path, fields = self._good(COMPLETIONS)
            fields["prompt"] = rng.choice([[], [[]], [0], [258], [259], [-1], [2**40], ["a", 1], [[1], "a"], [[1], [2]],
                                           ["a"] * 8, [[1]] * 40, [True], [1.0], None, [None], "", ["",
                                           "a"]])  # fmt: skip
        return Call(path, json.dumps(fields).encode())

    def nested(self) -> Call:
        """Lists and objects in each other, up to what would exhaust a stack."""
        path, fields = self._good()
        depth = self._rng.choice([10, 63, 64, 65, 500, 5000, 60000])
        opening, closing = self._rng.choice([(b"[", b"]"), (b'{"a":', b"}")])
        inner = opening * depth + (b"1" if opening != b"[" else b"") + closing * self._rng.choice([depth, depth, 0])
        body = json.dumps(fields).encode()[:-1] + b',"metadata":' + inner + b"}"
        return Call(path, self._rng.choice([body, inner]))

    def odd_type(self) -> Call:
        """Content-Type says something else, or nothing."""
        path, fields = self._good()
        headers = ((b"content-type", self._rng.choice(KINDS)),) if self._rng.random() < 0.9 else ()
        return Call(path, json.dumps(fields).encode(), headers=headers)

    def odd_header(self) -> Call:
        """Headers that contradict the body, are too long, or are no text."""
        path, fields = self._good()
        more = tuple(self._rng.choice(HEADERS) for _ in range(self._rng.randint(1, 4)))
        return Call(path, json.dumps(fields).encode(), headers=(JSON, *more))

    def odd_path(self) -> Call:
        """Another path, another method, or both."""
        _, fields = self._good()
        path = self._rng.choice([*PATHS, CHAT, COMPLETIONS])
        method = self._rng.choice([*METHODS, "POST", "GET"])
        body = self._rng.choice([b"", json.dumps(fields).encode(), b"{"])
        return Call(
            path, body, method, query=self._rng.choice([b"", b"a=b&a=%ff", b"%00", b"?" * 3000, b"stream=true"])
        )

    def cut_body(self) -> Call:
        """The client goes away before its body has ended."""
        path, fields = self._good()
        raw = json.dumps(fields).encode()
        at = self._rng.randrange(len(raw) + 1)
        chunks = ((0.0, raw[: at // 2]), (0.0, raw[at // 2 : at]))
        return Call(path, chunks=self._rng.choice([chunks, chunks[:1], ()]), whole=False)

    def slow_body(self) -> Call:
        """The body comes in pieces; some of them too late."""
        path, fields = self._good()
        raw = json.dumps(fields).encode()
        size = max(1, len(raw) // self._rng.randint(2, 12))
        pauses = [0.0, 0.0, 0.001, 0.005, 0.4]
        parts = [(self._rng.choice(pauses), raw[i : i + size]) for i in range(0, len(raw), size)]
        return Call(path, chunks=tuple(parts), whole=self._rng.random() < 0.8)

    def huge(self) -> Call:
        """Longer than the server takes, in one way or another."""
        path, fields = self._good()
        kind = self._rng.randrange(4)
        if kind == 0:
            return Call(path, b" " * 300_000 + json.dumps(fields).encode())
        if kind == 1:
            return Call(path, chunks=tuple((0.0, b"x" * 50_000) for _ in range(self._rng.randint(3, 20))))
        fields["prompt" if path == COMPLETIONS else "user"] = "word " * 10_000 if kind == 2 else [1] * 20_000
        return Call(path, json.dumps(fields).encode())

    def leaves(self) -> Call:
        """A good request whose client goes away while it is answered."""
        path, fields = self._good()
        fields |= {"stream": self._rng.random() < 0.8, "max_tokens": self._rng.randint(1, 40), "ignore_eos": True}
        return Call(path, json.dumps(fields).encode(), gone_after=self._rng.randint(0, 6))

    def _good(self, path: str | None = None) -> tuple[str, dict[str, Any]]:
        rng = self._rng
        path = path or rng.choice([CHAT, COMPLETIONS])
        fields: dict[str, Any] = {"model": self._model, "max_tokens": rng.randint(1, 6)}
        if path == CHAT:
            fields["messages"] = [{"role": "user", "content": rng.choice(["hi", "how are you?", "é"])}]
        else:
            fields["prompt"] = rng.choice(["hello", "the same beginning of it all, and more", [1, 2, 3], ["a", "b"]])
        for key, values in (("stream", [True, False]), ("n", [1, 2, 3]), ("temperature", [0, 0.7, 2]), ("seed", [1,
        -5]),
                            ("top_p", [0.5, 1]), ("top_k", [-1, 3]), ("stop", ["e", ["a", "zz"]])):  # fmt: skip
            if rng.random() < 0.3:
                fields[key] = rng.choice(values)
        return path, fields

    def _with(self, fields: dict[str, Any], wrong: dict[str, str]) -> bytes:
        kept = {key: json.dumps(value) for key, value in fields.items()}
        parts = [f"{json.dumps(key)}:{value}" for key, value in {**kept, **wrong}.items()]
        return ("{" + ",".join(parts) + "}").encode()
