"""An agent of pydantic-ai without tools: a question, a follow-up, a streamed answer. Prints what came back, as JSON."""

from __future__ import annotations

import asyncio
import json
import sys

from pydantic_ai import Agent
from pydantic_ai.models.openai import OpenAIChatModel
from pydantic_ai.providers.openai import OpenAIProvider


async def main(url: str, name: str) -> None:
    """Talk to the server at ``url``."""
    model = OpenAIChatModel(name, provider=OpenAIProvider(base_url=f"{url}/v1", api_key="none"))
    agent = Agent(model, instructions="Answer briefly.", model_settings={"max_tokens": 12, "temperature": 0})
    first = await agent.run("Name a colour.")
    second = await agent.run("And another one.", message_history=first.all_messages())
    async with agent.run_stream("Name a colour.") as streaming:
        streamed = await streaming.get_output()
    usage = second.usage
    tokens = (usage() if callable(usage) else usage).output_tokens
    print(json.dumps({"first": first.output, "second": second.output, "streamed": streamed, "tokens": tokens}))


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1], sys.argv[2]))
