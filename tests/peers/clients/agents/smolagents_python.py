"""smolagents: an agent takes one step, which is a call of a tool, and code agents' structured steps. Prints JSON."""

from __future__ import annotations

import json
import sys
from typing import Any

from smolagents import OpenAIModel, ToolCallingAgent, tool

called: list[str] = []


@tool
def weather(sunny: bool) -> str:
    """The weather.

    Args:
        sunny: Whether the sun shines.
    """
    called.append(str(sunny))
    return "It is warm."


def main(url: str, name: str) -> None:
    """Run the agent on the server at ``url``."""
    model = OpenAIModel(name, api_base=f"{url}/v1", api_key="none", max_tokens=2000, temperature=1,
                        parallel_tool_calls=False)  # fmt: skip
    agent = ToolCallingAgent(tools=[weather], model=model, max_steps=1, verbosity_level=0)
    steps: list[Any] = list(agent.run("How is the weather?", stream=True))
    calls = [call.name for step in steps for call in getattr(step, "tool_calls", None) or ()]
    errors = [str(step.error)[:300] for step in steps if getattr(step, "error", None)]
    print(json.dumps({"calls": calls, "errors": errors, "called": called}))


if __name__ == "__main__":
    main(*sys.argv[1:])
