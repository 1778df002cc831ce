"""Hooks of schemathesis for the server's own document: a model that exists, and when a 504 is right.

schemathesis reads this file, named in SCHEMATHESIS_HOOKS, before it makes requests.
"""

from __future__ import annotations

from typing import Any

import schemathesis

#: Bodies without such a limit would ask for longer answers than a run has time for.
SHORT = {"max_tokens": 8, "max_completion_tokens": 8, "max_output_tokens": 64, "n": 3, "best_of": 3, "num_beams": 3}


@schemathesis.hook
def before_load_schema(context: schemathesis.HookContext, raw_schema: dict[str, Any]) -> None:
    """Requests name the model that is there, or none: with any other, all of them would end in a 404."""
    for schema in raw_schema["components"]["schemas"].values():
        fields = schema.get("properties", {})
        if "model" in fields and "messages" not in schema.get("title", ""):
            fields["model"] = {"type": "string", "enum": ["tiny"]}
        for name in fields.keys() & SHORT.keys():
            fields[name] = {"type": "integer", "minimum": 1, "maximum": SHORT[name]}


@schemathesis.check
def no_server_error(ctx: schemathesis.CheckContext, response: schemathesis.Response, case: schemathesis.Case) -> None:
    """A 504 is right where the body has a time limit of the client's, which has passed before there was any answer."""
    limited = isinstance(case.body, dict) and case.body.get("max_time") is not None
    if response.status_code == 504 and limited:
        error = response.json()["error"]
        assert (error.get("param"), error.get("code")) == ("max_time", "deadline_exceeded"), error
        return
    assert response.status_code < 500, f"{response.status_code}: {response.text[:500]}"
