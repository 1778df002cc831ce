"""The vector of a text, from the row that the engine sent."""

from __future__ import annotations

from typing import Any, TypeAlias

import numpy as np

from evener.contracts.outputs import RequestOutput
from evener.contracts.pooling import Embedding, PoolingSettings, check_task
from evener.errors import RequestError
from evener.sampling_params import SamplingParams

#: What the engine is asked for.
EMBED = SamplingParams(max_tokens=1, detokenize=False)
#: Float32 [numbers].
Vector: TypeAlias = "np.ndarray[Any, Any]"


class TextVectors:
    """The vectors that one request wants.

    Args:
        settings: of the model; None: it generates text.
        width: numbers of its rows.
        dimensions: numbers of each vector; None: as many as the model has.

    Raises:
        RequestError: the model does not embed, or its vectors cannot be cut to so many numbers.
    """

    params = EMBED

    def __init__(self, settings: PoolingSettings | None, width: int, dimensions: int | None = None) -> None:
        check_task("embed", settings)
        self.settings, self._dimensions = settings or PoolingSettings(), dimensions
        sizes = self.settings.sizes
        known = [size for size in sizes if size <= width] or range(1, width + 1)
        if dimensions is not None and (type(dimensions) is not int or dimensions not in known):
            right = f"one of {sizes}" if sizes else f"from 1 to {width}"
            raise RequestError(f"dimensions is {dimensions}, but for this model it must be {right}", "dimensions")

    def of_row(self, row: bytes) -> Vector:
        """The vector of a pooled ``row`` of float32: cut to its first numbers, and then normalized."""
        vector: Vector = np.frombuffer(row, dtype=np.float32)[: self._dimensions]
        if self.settings.normalize:
            vector = vector / max(float(np.linalg.norm(vector)), float(np.finfo(np.float32).tiny))
        return vector

    def of_output(self, output: RequestOutput) -> Embedding:
        """The embedding of a prompt that has ended."""
        vector = self.of_row(output.outputs[0].pooled)
        return Embedding(vector, output.prompt_token_ids, output.num_cached_tokens)
