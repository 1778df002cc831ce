"""The vector or the score of a text, from the row that the engine sent."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np

from evener.contracts.outputs import RequestOutput
from evener.errors import RequestError
from evener.pooling.settings import PoolingSettings
from evener.sampling_params import SamplingParams

#: What the engine is asked for.
EMBED = SamplingParams(max_tokens=1, detokenize=False)
#: Float32 [numbers].
Vector: TypeAlias = "np.ndarray[Any, Any]"


@dataclass(frozen=True)
class Embedding:
    """The vector of a text, float32 [numbers]; its tokens, and how many of them were in the prefix cache."""

    vector: Vector
    prompt_token_ids: list[int]
    num_cached_tokens: int = 0


def check_dimensions(dimensions: int | None, settings: PoolingSettings | None, width: int) -> None:
    """Raises:
    RequestError: vectors of a model with these ``settings`` cannot be cut to so many numbers.
    """
    if dimensions is None or settings is None:
        return
    known = [size for size in settings.sizes if size <= width] or range(1, width + 1)
    if type(dimensions) is not int or dimensions not in known:
        sizes = f"one of {settings.sizes}" if settings.sizes else f"from 1 to {width}"
        raise RequestError(f"dimensions is {dimensions}, but for this model it must be {sizes}", "dimensions")


def embedding_of(output: RequestOutput, settings: PoolingSettings, dimensions: int | None = None) -> Embedding:
    """The embedding of a prompt that has ended."""
    vector = finished_vector(output.outputs[0].pooled, settings, dimensions)
    return Embedding(vector, output.prompt_token_ids, output.num_cached_tokens)


def finished_score(row: bytes, settings: PoolingSettings) -> float:
    """The score of a pooled ``row``: the probability of yes, or its log-odds."""
    logits = np.frombuffer(row, dtype=np.float32).astype(np.float64)
    odds = float(logits[0] - logits[1] if len(logits) > 1 else logits[0])
    # Not exp(-odds) alone: of large odds it overflows.
    return (1 + math.tanh(odds / 2)) / 2 if settings.sigmoid else odds


def finished_vector(row: bytes, settings: PoolingSettings, dimensions: int | None = None) -> Vector:
    """The vector of a pooled ``row`` of float32: cut to its first ``dimensions`` numbers, and then normalized."""
    vector: Vector = np.frombuffer(row, dtype=np.float32)[:dimensions]
    if settings.normalize:
        vector = vector / max(float(np.linalg.norm(vector)), float(np.finfo(np.float32).tiny))
    return vector
