"""OpenAI's Python client with options that users set: prints what came of each as JSON."""

from __future__ import annotations

import json
import sys
import time
from typing import Any

import openai

_HELLO = [{"role": "user", "content": "Hello."}]
_CITY = {"type": "object", "properties": {"city": {"type": "boolean"}}, "required": ["city"],
         "additionalProperties": False}  # fmt: skip
_TOOL = {"type": "function", "name": "weather", "parameters": _CITY, "strict": True}
_CHAT: dict[str, Any] = {
    "store": True, "metadata": {"a": "b"}, "service_tier": "flex", "prompt_cache_key": "k", "verbosity": "low",
    "prediction": {"type": "content", "content": "x"}, "modalities": ["text"], "safety_identifier": "s",
    "parallel_tool_calls": False, "reasoning_effort": "low", "web_search_options": {},
    "audio": {"format": "wav", "voice": "alloy"},
}  # fmt: skip
_RESPONSES: dict[str, Any] = {
    "include": ["reasoning.encrypted_content"], "store": False, "truncation": "auto", "parallel_tool_calls": False,
    "reasoning": {"effort": "low", "summary": "auto"}, "metadata": {"a": "b"}, "service_tier": "auto",
    "text": {"format": {"type": "json_schema", "name": "c", "schema": _CITY, "strict": True}, "verbosity": "low"},
    "max_tool_calls": 3, "safety_identifier": "s", "prompt_cache_key": "k", "conversation": "c", "prompt": {"id": "p"},
    "tool_choice": {"type": "allowed_tools", "mode": "required", "tools": [{"type": "function", "name": "weather"}]},
}  # fmt: skip


def outcome(create: Any, **fields: Any) -> str:
    """The fields that changed nothing, or which field was refused."""
    try:
        answer = create.with_raw_response.create(**fields)
    except openai.BadRequestError as error:
        return f"refused: {error.param}"
    answer.parse()
    return str(answer.headers.get("x-ignored-fields", ""))


def main(url: str, model: str) -> None:
    """Ask the server at ``url``."""
    client = openai.OpenAI(base_url=f"{url}/v1", max_retries=0)
    chats, responses = client.chat.completions, client.responses
    said = {"model": model, "input": "Hello.", "tools": [_TOOL]}
    settings = {**said, "max_output_tokens": 40}
    found: dict[str, Any] = {
        "chat": {name: outcome(chats, model=model, messages=_HELLO, max_completion_tokens=4, **{name: value})
                 for name, value in _CHAT.items()},
        "responses": {name: outcome(responses, **settings, **{name: value}) for name, value in _RESPONSES.items()},
    }  # fmt: skip
    kept = responses.create(**said, max_output_tokens=2000, tool_choice="required")
    named = [{"type": "item_reference", "id": item.id} for item in kept.output]
    result = {"type": "function_call_output", "call_id": kept.output[-1].call_id, "output": "sunny"}
    again = responses.create(**{**settings, "input": [*_HELLO, *named, result]})
    found["named"] = again.usage.input_tokens > kept.usage.input_tokens
    found["counted"] = responses.input_tokens.count(**said).input_tokens == kept.usage.input_tokens
    waiting = responses.create(**settings, background=True)
    while waiting.status in ("queued", "in_progress"):
        time.sleep(0.2)
        waiting = responses.retrieve(waiting.id)
    found["background"] = waiting.status in ("completed", "incomplete")
    events = list(responses.create(**settings, background=True, stream=True))
    found["streamed"] = [event.type for event in (*events[:1], *events[-1:])]
    later = responses.retrieve(events[0].response.id, stream=True, starting_after=1)
    found["read_again"] = list(later) == events[2:]
    print(json.dumps(found))


if __name__ == "__main__":
    main(*sys.argv[1:])
