"""The perplexity of each prompt, behind its answer: asks for what is needed before the request runs, and adds to the
text when it has ended."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from evener.contracts.outputs import Delta
from evener.contracts.request_plugin import RequestPlugin


class Perplexity(RequestPlugin):
    def prepare(self, model_dir: str, options: Mapping[str, Any]) -> None:
        del model_dir, options
        # By request. An entry begins with the first piece and ends with the last one, which every request has.
        self._found: dict[str, list[float]] = {}

    def preprocess(self, request: dict[str, Any]) -> dict[str, Any]:
        params = request["params"]
        if request["kind"] == "embed" or params.prompt_logprobs is not None:
            return request
        return {**request, "params": replace(params, prompt_logprobs=0)}  # of the prompt's own tokens alone

    def postprocess_chunk(self, chunk: Delta) -> Delta:
        if chunk.index:
            return chunk  # they come with the first sample
        values = self._found.setdefault(chunk.request_id, [])
        # The first token of a prompt has none; of the others the first entry is the token's own.
        values += [next(iter(each.values())) for each in chunk.prompt_logprobs or () if each is not None]
        if chunk.finish_reason is None:
            return chunk
        del self._found[chunk.request_id]
        if not values or chunk.error is not None:
            return chunk
        return replace(chunk, text=f"{chunk.text} perplexity {math.exp(-sum(values) / len(values)):.4f}")
