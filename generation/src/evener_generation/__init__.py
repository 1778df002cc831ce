"""Structured output, and parsers of tool calls and reasoning, registered through the same hooks as anybody else's.

Torch-free.
"""

from __future__ import annotations

from evener.contracts.descriptor import Descriptor

descriptor = Descriptor(
    name="generation",
    summary="Structured output, and parsers of tool calls and reasoning.",
    contracts={"descriptor": 1, "generation": 1},
)
