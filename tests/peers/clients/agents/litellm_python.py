"""litellm: chats through OpenAI's and Anthropic's API, a forced call, an answer of a schema. Prints JSON."""

from __future__ import annotations

import json
import sys
from typing import Any

import litellm
from forms import SCHEMA, TOOL

_MESSAGES = [{"role": "user", "content": "What is the weather in Paris?"}]


def main(url: str, name: str) -> None:
    """Talk to the server at ``url``."""
    common: dict[str, Any] = {"messages": _MESSAGES, "api_key": "none", "max_tokens": 2000, "temperature": 1}
    chat: dict[str, Any] = common | {"model": f"hosted_vllm/{name}", "api_base": f"{url}/v1"}
    short = chat | {"max_tokens": 8, "temperature": 0}
    whole = litellm.completion(**short).choices[0].message.content
    streamed = "".join(part.choices[0].delta.content or "" for part in litellm.completion(**short, stream=True))
    named = {"type": "function", "function": {"name": "weather"}}
    call = litellm.completion(**chat, tools=[TOOL], tool_choice=named).choices[0].message.tool_calls[0].function
    form = {"type": "json_schema", "json_schema": {"name": "city", "schema": SCHEMA, "strict": True}}
    formed = litellm.completion(**chat, response_format=form).choices[0].message.content
    message = litellm.completion(**common | {"model": f"anthropic/{name}", "api_base": url, "max_tokens": 8})
    print(json.dumps({
        "whole": whole, "streamed": streamed, "called": [call.name, json.loads(call.arguments)],
        "formed": json.loads(formed), "message": message.choices[0].message.content,
    }))  # fmt: skip


if __name__ == "__main__":
    main(*sys.argv[1:])
