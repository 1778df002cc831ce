"""instructor, in each of its modes for OpenAI's API: what came of each, as JSON."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable
from typing import Any

import instructor
import openai
from forms import City
from instructor import Mode

#: Modes in which the form is enforced; the others only ask the model for it, which one of random weights does not do.
ENFORCED = (Mode.TOOLS, Mode.TOOLS_STRICT, Mode.JSON_SCHEMA, Mode.RESPONSES_TOOLS)
ASKED = (Mode.JSON, Mode.MD_JSON, Mode.PARALLEL_TOOLS)


def main(url: str, name: str) -> None:
    """Ask the server at ``url`` for a city."""
    found: dict[str, Any] = {}
    for mode in (*ENFORCED, *ASKED):
        client = instructor.from_openai(
            openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0), mode=mode, model=name
        )
        kind: Any = Iterable[City] if mode is Mode.PARALLEL_TOOLS else City
        tokens = {"max_output_tokens" if mode is Mode.RESPONSES_TOOLS else "max_tokens": 2000}
        try:
            answer = client.chat.completions.create(
                response_model=kind, messages=[{"role": "user", "content": "Name a city."}], max_retries=0,
                temperature=1, **tokens,
            )  # fmt: skip
            found[mode.value] = "refused" if answer is None else "valid"
        except openai.APIStatusError as error:
            found[mode.value] = str(error)
        except Exception as error:  # what instructor raises where the text is not of the form
            cause = error
            while cause.__cause__ is not None or cause.__context__ is not None:
                cause = cause.__cause__ or cause.__context__  # type: ignore[assignment]
            refused = isinstance(cause, openai.APIStatusError)
            found[mode.value] = str(cause) if refused or mode in ENFORCED else "answered"
    print(json.dumps({"enforced": [mode.value for mode in ENFORCED], "found": found}))


if __name__ == "__main__":
    main(*sys.argv[1:])
