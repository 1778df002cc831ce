"""instructor, in each of its modes for the APIs that the server has: what came of each, as JSON."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable
from typing import Any

import anthropic
import instructor
import openai
from forms import City
from instructor import Mode

#: Modes in which the form is enforced; the others only ask the model for it, which one of random weights does not do.
ENFORCED = (Mode.TOOLS, Mode.TOOLS_STRICT, Mode.JSON_SCHEMA, Mode.JSON_O1, Mode.OPENROUTER_STRUCTURED_OUTPUTS,
            Mode.RESPONSES_TOOLS, Mode.RESPONSES_TOOLS_WITH_INBUILT_TOOLS, Mode.ANTHROPIC_TOOLS)  # fmt: skip
ASKED = (Mode.JSON, Mode.MD_JSON, Mode.FUNCTIONS, Mode.PARALLEL_TOOLS, Mode.ANTHROPIC_JSON,
         Mode.ANTHROPIC_REASONING_TOOLS, Mode.ANTHROPIC_PARALLEL_TOOLS)  # fmt: skip
_LISTS = (Mode.PARALLEL_TOOLS, Mode.ANTHROPIC_PARALLEL_TOOLS)
_RESPONSES = (Mode.RESPONSES_TOOLS, Mode.RESPONSES_TOOLS_WITH_INBUILT_TOOLS)
#: Modes that are left out begin with the name of a vendor whose own client sends them to an API of its own.
VENDORS = ("XAI", "MISTRAL", "VERTEXAI", "GEMINI", "GENAI", "COHERE", "CEREBRAS", "FIREWORKS", "WRITER", "BEDROCK",
           "PERPLEXITY")  # fmt: skip


def made(mode: Mode, url: str, name: str) -> Any:
    """instructor's client for this mode."""
    if mode.name.startswith("ANTHROPIC"):
        client = anthropic.Anthropic(base_url=url, api_key="none", max_retries=0)
        return instructor.from_anthropic(client, mode=mode, model=name)
    begin = instructor.from_openrouter if mode is Mode.OPENROUTER_STRUCTURED_OUTPUTS else instructor.from_openai
    return begin(openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0), mode=mode, model=name)


def main(url: str, name: str) -> None:
    """Ask the server at ``url`` for a city."""
    found: dict[str, Any] = {}
    for mode in (*ENFORCED, *ASKED):
        kind: Any = Iterable[City] if mode in _LISTS else City
        options = {"max_output_tokens" if mode in _RESPONSES else "max_tokens": 2000}
        if not mode.name.startswith("ANTHROPIC"):  # its client has no such argument
            options["temperature"] = 1
        try:
            answer = made(mode, url, name).chat.completions.create(
                response_model=kind, messages=[{"role": "user", "content": "Name a city."}], max_retries=0, **options
            )
            found[mode.value] = "refused" if answer is None else "valid"
        except (openai.APIStatusError, anthropic.APIStatusError) as error:
            found[mode.value] = str(error)
        except Exception as error:  # what instructor raises where the text is not of the form
            cause = error
            while cause.__cause__ is not None or cause.__context__ is not None:
                cause = cause.__cause__ or cause.__context__  # type: ignore[assignment]
            # A TypeError: the request was never made.
            refused = isinstance(cause, openai.APIStatusError | anthropic.APIStatusError | TypeError)
            found[mode.value] = str(cause) if refused or mode in ENFORCED else "answered"
    others = [mode.name for mode in Mode if mode not in (*ENFORCED, *ASKED) and not mode.name.startswith(VENDORS)]
    print(json.dumps({"enforced": [mode.value for mode in ENFORCED], "found": found, "others": others}))


if __name__ == "__main__":
    main(*sys.argv[1:])
