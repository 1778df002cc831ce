"""The server's own options: keys ``server.<name>``."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from evener_server import descriptor

#: Values of the options that name a parser: by the model's chat template, or none.
AUTO, NONE = "auto", "none"


@dataclass(frozen=True)
class ServerOptions:
    """The options; ``descriptor.options`` has their help texts.

    Attributes:
        vllm_metrics: serve metrics under vLLM's names too.
        tool_parser, reasoning_parser: names of parsers.
        api_key_file: a file with API keys.
        model_aliases: other names of the model, separated by commas.
    """

    vllm_metrics: bool = True
    tool_parser: str = AUTO
    reasoning_parser: str = AUTO
    api_key_file: str | None = None
    model_aliases: str = ""

    @functools.cached_property
    def aliases(self) -> tuple[str, ...]:
        """Other names under which requests find the model."""
        return tuple(dict.fromkeys(name for part in self.model_aliases.split(",") if (name := part.strip())))

    @classmethod
    def of(cls, options: Mapping[str, Mapping[str, Any]]) -> ServerOptions:
        """From ``Config.options``, in which only options that were set are."""
        return cls(**options.get(descriptor.name, {}))
