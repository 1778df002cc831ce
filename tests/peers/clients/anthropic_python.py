"""Anthropic's Python client, as its documents have it: prints what came as JSON."""

from __future__ import annotations

import json
import sys
import urllib.request
from typing import Any

import anthropic


def main(url: str) -> None:
    """Ask the server at ``url``."""
    client = anthropic.Anthropic(base_url=url, api_key="none", max_retries=0)
    with urllib.request.urlopen(f"{url}/v1/models") as answer:
        model = json.load(answer)["data"][0]["id"]
    asked: dict[str, Any] = {
        "model": model,
        "system": [{"type": "text", "text": "Be brief.", "cache_control": {"type": "ephemeral"}}],
        "messages": [{"role": "user", "content": "Tell me everything about the sea."}],
    }
    settings = {**asked, "max_tokens": 8, "extra_body": {"temperature": 0.0}}
    whole = client.messages.create(**settings)
    with client.messages.stream(**settings) as stream:
        text = "".join(stream.text_stream)
        streamed = stream.get_final_message()
    assert streamed.content[0].text == text
    try:
        client.messages.create(**{**settings, "model": "other"})
        refused = ""
    except anthropic.NotFoundError as error:
        refused = error.body["error"]["type"]
    both = (whole, streamed)
    # A prompt's tokens are counted in three parts: read from the cache, written to it, and the rest.
    used = [each.usage for each in both]
    print(
        json.dumps(
            {
                "whole": whole.content[0].text,
                "streamed": text,
                "reasons": [each.stop_reason for each in both],
                "output_tokens": [each.usage.output_tokens for each in both],
                "input_tokens": [
                    each.input_tokens + each.cache_read_input_tokens + each.cache_creation_input_tokens for each in used
                ],
                "counted": client.messages.count_tokens(**asked).input_tokens,
                "refused": refused,
            }
        )
    )


if __name__ == "__main__":
    main(*sys.argv[1:])
