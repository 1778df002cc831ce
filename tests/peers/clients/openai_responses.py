"""OpenAI's Python client on the Responses API, as its documents have it: prints what came as JSON."""

from __future__ import annotations

import json
import sys

import openai


def main(url: str) -> None:
    """Ask the server at ``url``."""
    client = openai.OpenAI(base_url=f"{url}/v1", max_retries=0)
    model = client.models.list().data[0].id
    settings = {"model": model, "max_output_tokens": 12, "temperature": 0.0}
    with client.responses.stream(input="Name a colour.", **settings) as events:
        found_events = list(events)
    # The answer may reach its limit, and then the client's get_final_response has none.
    first = found_events[-1].response
    assert found_events[0].type == "response.created" and first.status in ("completed", "incomplete")
    text = "".join(event.delta for event in found_events if event.type == "response.output_text.delta")
    assert text == first.output_text
    second = client.responses.create(input="Another one.", previous_response_id=first.id, **settings)
    found = {
        "streamed": first.output_text,
        "whole": client.responses.create(input=[{"role": "user", "content": "Name a colour."}], **settings).output_text,
        "kept": client.responses.retrieve(first.id).output_text,
        "shorter": first.usage.input_tokens,
        "longer": second.usage.input_tokens,
    }
    client.responses.delete(first.id)
    try:
        client.responses.retrieve(first.id)
    except openai.NotFoundError as error:
        found["deleted"] = error.code
    try:
        client.responses.create(input="x", model="other")
    except openai.NotFoundError as error:
        found["refused"] = error.code
    print(json.dumps(found))


if __name__ == "__main__":
    main(*sys.argv[1:])
