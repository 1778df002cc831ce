"""dspy: a signature with a typed answer, by JSON schema, and a tool's call. Prints what came, as JSON."""

from __future__ import annotations

import json
import sys
from typing import Literal

import dspy


class Weather(dspy.Signature):
    """Say how the weather is."""

    question: str = dspy.InputField()
    city: Literal["Paris", "Rome"] = dspy.OutputField()
    sunny: bool = dspy.OutputField()


def main(url: str, name: str) -> None:
    """Ask the server at ``url``. litellm, which dspy asks, knows that servers of this kind keep to schemas."""
    lm = dspy.LM(
        f"lm_studio/{name}", api_base=f"{url}/v1", api_key="none", max_tokens=2000, temperature=1, cache=False,
        num_retries=0,
    )  # fmt: skip
    plain = lm("Hello", max_tokens=8, temperature=0)
    with dspy.context(lm=lm, adapter=dspy.JSONAdapter()):
        formed = dspy.Predict(Weather)(question="How is the weather in Paris?")
    form = lm.history[-1]["kwargs"]["response_format"]
    print(json.dumps({"plain": plain, "city": formed.city, "sunny": formed.sunny, "form": str(form)[:60]}))


if __name__ == "__main__":
    main(*sys.argv[1:])
