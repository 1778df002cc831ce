"""langchain: a chat whole and streamed, a forced call, structured output in its methods. Prints what came, as JSON."""

from __future__ import annotations

import json
import sys

from forms import SCHEMA, City
from langchain_core.messages import AIMessage, HumanMessage, ToolMessage
from langchain_core.tools import StructuredTool
from langchain_openai import ChatOpenAI

_QUESTION = "What is the weather in Paris?"


def weather(city: str, sunny: bool) -> str:
    """The weather in a city."""
    return f"{city}: {sunny}"


def main(url: str, name: str) -> None:
    """Talk to the server at ``url``."""
    model = ChatOpenAI(model=name, base_url=f"{url}/v1", api_key="none", max_tokens=2000, temperature=1, max_retries=0)
    short = model.bind(max_tokens=8, temperature=0)
    whole = short.invoke(_QUESTION).content
    streamed = "".join(str(part.content) for part in short.stream(_QUESTION))
    tool = StructuredTool.from_function(weather, args_schema=City)
    answer = model.bind_tools([tool], tool_choice="any", parallel_tool_calls=False).invoke(_QUESTION)
    assert isinstance(answer, AIMessage)
    (call,) = answer.tool_calls
    result = ToolMessage(tool.invoke(call["args"]), tool_call_id=call["id"])
    after = short.invoke([HumanMessage(_QUESTION), answer, result]).content
    formed = {
        method: dict(model.with_structured_output(City, method=method, strict=strict).invoke(_QUESTION))
        for method, strict in (("json_schema", True), ("function_calling", True))
    }
    loose = model.with_structured_output(SCHEMA | {"title": "City"}, method="json_mode", include_raw=True)
    mode = loose.invoke(_QUESTION)["raw"].response_metadata["finish_reason"]
    responses = ChatOpenAI(
        model=name, base_url=f"{url}/v1", api_key="none", max_tokens=8, temperature=0, use_responses_api=True
    )
    print(json.dumps({
        "whole": whole, "streamed": streamed, "called": [call["name"], call["args"]], "after": after, "formed": formed,
        "json_mode": mode, "responses": responses.invoke(_QUESTION).text,
    }))  # fmt: skip


if __name__ == "__main__":
    main(*sys.argv[1:])
