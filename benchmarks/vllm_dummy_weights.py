"""Random weights as vLLM's ``load_format="dummy"`` draws them: uniform in ±1e-3, norms too.

Every parameter is drawn with the same seed, so parameters of the same size are equal. Ours are normal, with norm
weights of one. docs/lab/experts.md says how that changes routing.
"""

from __future__ import annotations

import zlib
from typing import Any

import torch

from evener_inspection import dummy_weights

SEED, RANGE = 1234, 1e-3


class Uniform(dummy_weights._Noise):
    """Replaces the noise of ``evener_inspection.dummy_weights``."""

    def weight(self, item: Any, device: torch.device) -> torch.Tensor:
        if item.dummy in ("ones", "zeros"):
            return self._fill(item.name, item.shape, item.dtype, device)
        return super().weight(item, device)

    def _fill(self, name: str, shape: tuple[int, ...], dtype: str, device: torch.device) -> torch.Tensor:
        # In vLLM the experts of a layer are one parameter, so they differ from each other.
        seed = zlib.crc32(name.encode()) if name.rpartition(" ")[2].isdigit() else SEED
        generator = torch.Generator(device=device).manual_seed(seed)
        made = torch.empty(shape, dtype=getattr(torch, dtype), device=device)
        return made.uniform_(-RANGE, RANGE, generator=generator)


def use() -> None:
    """Make ``load=dummy`` draw such weights in this process."""
    dummy_weights._Noise = Uniform  # type: ignore[misc]
