"""A feature that agents use, with OpenAI's or Anthropic's Python client: prints "used", or "refused" and the error."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from functools import partial
from typing import Any

import anthropic
import openai

_CITY = {
    "type": "object",
    "properties": {"city": {"type": "string"}},
    "required": ["city"],
    "additionalProperties": False,
}


def tools(client: openai.OpenAI, model: str) -> None:
    """A forced call of one function, with arguments of its schema."""
    answer = client.chat.completions.create(
        model=model,
        messages=[{"role": "user", "content": "What is the weather in Paris?"}],
        tools=[{"type": "function", "function": {"name": "weather", "parameters": _CITY}}],
        tool_choice={"type": "function", "function": {"name": "weather"}},
        max_tokens=64,
    )
    (call,) = answer.choices[0].message.tool_calls
    assert call.function.name == "weather"
    assert isinstance(json.loads(call.function.arguments)["city"], str)


def structured_output(client: openai.OpenAI, model: str) -> None:
    """An answer that is an object of a schema."""
    answer = client.chat.completions.create(
        model=model,
        messages=[{"role": "user", "content": "Name a city."}],
        response_format={"type": "json_schema", "json_schema": {"name": "city", "schema": _CITY, "strict": True}},
        max_tokens=64,
    )
    assert isinstance(json.loads(answer.choices[0].message.content)["city"], str)


def responses(client: openai.OpenAI, model: str) -> None:
    """The responses endpoint, streamed."""
    with client.responses.stream(model=model, input="Name a colour.", max_output_tokens=16) as events:
        kinds = [event.type for event in events]
        assert events.get_final_response().output_text
    assert kinds[0] == "response.created" and kinds[-1] in ("response.completed", "response.incomplete")


def embeddings(client: openai.OpenAI, model: str) -> None:
    """The embeddings of two texts."""
    found = client.embeddings.create(model=model, input=["one", "two"]).data
    assert [each.index for each in found] == [0, 1] and all(each.embedding for each in found)


FEATURES: dict[str, Callable[[openai.OpenAI, str], None]] = {
    "tools": tools,
    "structured_output": structured_output,
    "responses": responses,
    "embeddings": embeddings,
}


def messages(url: str, model: str) -> None:
    """Anthropic's messages endpoint, with Anthropic's client."""
    client = anthropic.Anthropic(base_url=url, api_key="none", max_retries=0)
    body: list[Any] = [{"role": "user", "content": "Name a colour."}]
    assert client.messages.create(model=model, max_tokens=8, messages=body).content[0].type == "text"


def main(name: str, url: str) -> None:
    """Use the feature ``name`` of the server at ``url``."""
    client = openai.OpenAI(base_url=f"{url}/v1", max_retries=0)
    model = client.models.list().data[0].id
    use = partial(messages, url, model) if name == "messages" else partial(FEATURES[name], client, model)
    try:
        use()
    except (openai.BadRequestError, openai.NotFoundError, anthropic.NotFoundError) as error:
        print(f"refused: {error}")
    else:
        print("used")


if __name__ == "__main__":
    main(*sys.argv[1:])
