"""pydantic-ai: answers of a type by a tool and by a schema, over OpenAI's two APIs and Anthropic's. Prints JSON."""

from __future__ import annotations

import asyncio
import json
import sys
from typing import Any

from anthropic import AsyncAnthropic
from forms import City
from pydantic_ai import Agent, NativeOutput, ToolOutput
from pydantic_ai.models import Model
from pydantic_ai.models.anthropic import AnthropicModel
from pydantic_ai.models.openai import OpenAIChatModel, OpenAIResponsesModel
from pydantic_ai.providers.anthropic import AnthropicProvider
from pydantic_ai.providers.openai import OpenAIProvider


async def main(url: str, name: str) -> None:
    """Run agents on the server at ``url``."""
    openai = OpenAIProvider(base_url=f"{url}/v1", api_key="none")
    anthropic = AnthropicProvider(anthropic_client=AsyncAnthropic(base_url=url, api_key="none", max_retries=0))
    models: dict[str, tuple[Model, tuple[Any, ...]]] = {
        "chat": (OpenAIChatModel(name, provider=openai), (ToolOutput, NativeOutput)),
        "responses": (OpenAIResponsesModel(name, provider=openai), (ToolOutput, NativeOutput)),
        "messages": (AnthropicModel(name, provider=anthropic), (ToolOutput,)),
    }
    found: dict[str, Any] = {}
    for kind, (model, outputs) in models.items():
        for output in outputs:
            agent = Agent(model, output_type=output(City), model_settings={"max_tokens": 2000, "temperature": 1})
            found[f"{kind}, {output.__name__}"] = (await agent.run("Name a city.")).output.model_dump()
    print(json.dumps(found))


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))
