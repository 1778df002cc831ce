"""The tools of a chat request, in OpenAI's format."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import ConfigDict, Field

from evener_server.messages import Body

#: A request may have so many tools.
MOST_TOOLS = 512


class Function(Body):
    """A function that the model may call; ``parameters`` is a JSON schema."""

    model_config = ConfigDict(extra="ignore")

    name: Annotated[str, Field(pattern=r"^[a-zA-Z0-9_.-]{1,128}$")]
    description: str | None = None
    parameters: dict[str, Any] | None = None
    #: Accepted because clients send it, and named in ``x-ignored-fields``: arguments are not held to the schema.
    strict: bool | None = None


class Tool(Body):
    """One tool."""

    model_config = ConfigDict(extra="ignore")

    type: Literal["function"] = "function"
    function: Function

    def plain(self) -> dict[str, Any]:
        """The tool as chat templates read it."""
        return self.model_dump(exclude={"function": {"strict"}}, exclude_none=True)


Tools = Annotated[list[Tool], Field(max_length=MOST_TOOLS, fail_fast=True)]
