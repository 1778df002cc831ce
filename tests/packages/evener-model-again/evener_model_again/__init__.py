"""Qwen3-Next a second time, from outside of evener's repository."""

from __future__ import annotations

from evener.contracts.descriptor import Descriptor

descriptor = Descriptor(
    name="again",
    summary="Qwen3-Next under a name of its own.",
    contracts={"descriptor": 1, "architecture": 2, "layers": 2},
    architectures={"AgainForCausalLM": "evener_model_again.again:AgainForCausalLM"},
)
