"""Anthropic's Python client with options that users set: prints what came of each as JSON."""

from __future__ import annotations

import json
import sys
from typing import Any

import anthropic

_CACHE = {"type": "ephemeral", "ttl": "1h"}
_TOOL = {"name": "weather", "input_schema": {"type": "object", "properties": {"city": {"type": "boolean"}}},
         "cache_control": _CACHE}  # fmt: skip
_HELLO = [{"role": "user", "content": [{"type": "text", "text": "Hello.", "cache_control": _CACHE}]}]
_HISTORY: list[dict[str, Any]] = [
    *_HELLO,
    {"role": "assistant", "content": [
        {"type": "thinking", "thinking": "hm", "signature": "s"}, {"type": "redacted_thinking", "data": "d"},
        {"type": "text", "text": "I look."}, {"type": "tool_use", "id": "t", "name": "weather", "input": {}},
    ]},
    {"role": "user", "content": [
        {"type": "tool_result", "tool_use_id": "t", "is_error": True, "content": "none", "cache_control": _CACHE},
        {"type": "document", "title": "a", "source": {"type": "text", "media_type": "text/plain", "data": "b"}},
    ]},
]  # fmt: skip
_OPTIONS: dict[str, dict[str, Any]] = {
    "cache_control": {"cache_control": _CACHE, "system": [{"type": "text", "text": "x", "cache_control": _CACHE}]},
    "thinking": {"thinking": {"type": "enabled", "budget_tokens": 1024}, "max_tokens": 2048},
    "adaptive": {"thinking": {"type": "adaptive"}},
    "none": {"tools": [_TOOL], "tool_choice": {"type": "none"}},
    "any": {"tools": [_TOOL], "tool_choice": {"type": "any", "disable_parallel_tool_use": True}},
    "service_tier": {"service_tier": "auto"},
    "container": {"container": "c"},
    "metadata": {"metadata": {"user_id": "u"}},
    "history": {"messages": _HISTORY, "tools": [_TOOL]},
    "beta": {"betas": ["context-management-2025-06-27"], "speed": "fast",
             "context_management": {"edits": [{"type": "clear_tool_uses_20250919"}]}},
}  # fmt: skip


def outcome(client: anthropic.Anthropic, model: str, fields: dict[str, Any]) -> str:
    """The fields that changed nothing, or the beginning of a refusal."""
    messages = client.beta.messages if "betas" in fields else client.messages
    asked = {"model": model, "max_tokens": 24, "messages": _HELLO, **fields}
    try:
        answer = messages.with_raw_response.create(**asked)
    except anthropic.BadRequestError as error:
        return f"refused: {error.body['error']['message'].split()[0]}"
    answer.parse()
    return str(answer.headers.get("x-ignored-fields", ""))


def main(url: str, model: str) -> None:
    """Ask the server at ``url``."""
    client = anthropic.Anthropic(base_url=url, api_key="none", max_retries=0)
    found: dict[str, Any] = {name: outcome(client, model, fields) for name, fields in _OPTIONS.items()}
    asked = {"model": model, "messages": _HISTORY, "tools": [_TOOL]}
    usage = client.messages.create(**asked, max_tokens=4).usage
    used = usage.input_tokens + usage.cache_read_input_tokens + usage.cache_creation_input_tokens
    found["counted"] = client.messages.count_tokens(**asked).input_tokens == used
    print(json.dumps(found))


if __name__ == "__main__":
    main(*sys.argv[1:])
