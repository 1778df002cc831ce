"""OpenAI's Agents SDK: an agent that must call a function, over both APIs, and one with a typed answer. Prints JSON."""

from __future__ import annotations

import asyncio
import json
import sys
from typing import Literal

import openai
from agents import (
    Agent,
    ModelSettings,
    OpenAIChatCompletionsModel,
    OpenAIResponsesModel,
    Runner,
    function_tool,
    set_tracing_disabled,
)
from forms import City
from openai.types.shared import Reasoning

called: list[str] = []
#: What users set besides, of which the server uses what it has.
_OPTIONS = {
    "max_tokens": 2000, "temperature": 1, "truncation": "auto", "store": True, "metadata": {"a": "b"},
    "verbosity": "low", "reasoning": Reasoning(effort="low", summary="auto"),
    "response_include": ["reasoning.encrypted_content"],
}  # fmt: skip


@function_tool
def weather(city: Literal["Paris", "Rome"], sunny: bool) -> str:
    """The weather in a city."""
    called.append(city)
    return "It is warm."


async def main(url: str, name: str) -> None:
    """Run the agents on the server at ``url``."""
    set_tracing_disabled(True)
    client = openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0)
    found = {}
    for kind in (OpenAIChatCompletionsModel, OpenAIResponsesModel):
        model = kind(model=name, openai_client=client)
        must = ModelSettings(tool_choice="required", parallel_tool_calls=False, **_OPTIONS)
        agent = Agent(name="one", instructions="Be brief.", model=model, tools=[weather], model_settings=must,
                      tool_use_behavior="stop_on_first_tool")  # fmt: skip
        output = (await Runner.run(agent, "What is the weather in Paris?")).final_output
        streaming = Runner.run_streamed(agent, "What is the weather in Paris?")
        kinds = {event.type async for event in streaming.stream_events()}
        typed = Agent(name="two", model=model, output_type=City, model_settings=ModelSettings(**_OPTIONS))
        formed = (await Runner.run(typed, "Name a city.")).final_output
        found[kind.__name__] = {
            "output": output, "streamed": streaming.final_output, "kinds": sorted(kinds), "formed": formed.model_dump()
        }  # fmt: skip
    print(json.dumps({"found": found, "calls": len(called)}))


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))
