"""The tool and the form that all clients ask for."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict


class City(BaseModel):
    """A city. All values are bounded: a model of random weights ends them only where it must."""

    model_config = ConfigDict(extra="forbid")

    city: Literal["Paris", "Rome"]
    sunny: bool


SCHEMA: dict[str, Any] = City.model_json_schema()
TOOL: dict[str, Any] = {
    "type": "function",
    "function": {"name": "weather", "description": "The weather in a city.", "parameters": SCHEMA, "strict": True},
}
