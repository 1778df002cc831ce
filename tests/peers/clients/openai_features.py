"""A feature that agents use, with OpenAI's Python client: prints "used"."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable

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


def embeddings(client: openai.OpenAI, model: str) -> None:
    """The embeddings of two texts."""
    found = client.embeddings.create(model=model, input=["one", "two"]).data
    assert [each.index for each in found] == [0, 1] and all(each.embedding for each in found)


FEATURES: dict[str, Callable[[openai.OpenAI, str], None]] = {
    "tools": tools,
    "structured_output": structured_output,
    "embeddings": embeddings,
}


def main(name: str, url: str) -> None:
    """Use the feature ``name`` of the server at ``url``."""
    client = openai.OpenAI(base_url=f"{url}/v1", max_retries=0)
    model = client.models.list().data[0].id
    FEATURES[name](client, model)
    print("used")


if __name__ == "__main__":
    main(*sys.argv[1:])
