"""The vector of a text, from the row that the engine sent."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np

from evener.contracts.outputs import RequestOutput
from evener.contracts.pooling import PoolingSettings
from evener.errors import RequestError
from evener.pooling.settings import check_task
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


def check_embed(dimensions: int | None, settings: PoolingSettings | None, width: int) -> None:
    """Raises:
    RequestError: a model with these ``settings`` does not embed, or its vectors cannot be cut to so many numbers.
    """
    check_task("embed", settings)
    if dimensions is None or settings is None:
        return
    known = [size for size in settings.sizes if size <= width] or range(1, width + 1)
    if type(dimensions) is not int or dimensions not in known:
        sizes = f"one of {settings.sizes}" if settings.sizes else f"from 1 to {width}"
        raise RequestError(f"dimensions is {dimensions}, but for this model it must be {sizes}", "dimensions")


def embedding_of(output: RequestOutput, settings: PoolingSettings | None, dimensions: int | None) -> Embedding:
    """The embedding of a prompt that has ended."""
    vector = finished_vector(output.outputs[0].pooled, settings or PoolingSettings(), dimensions)
    return Embedding(vector, output.prompt_token_ids, output.num_cached_tokens)


def finished_vector(row: bytes, settings: PoolingSettings, dimensions: int | None = None) -> Vector:
    """The vector of a pooled ``row`` of float32: cut to its first ``dimensions`` numbers, and then normalized."""
    vector: Vector = np.frombuffer(row, dtype=np.float32)[:dimensions]
    if settings.normalize:
        vector = vector / max(float(np.linalg.norm(vector)), float(np.finfo(np.float32).tiny))
    return vector
