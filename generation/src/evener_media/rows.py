"""The media rows that a worker keeps between steps. Plans say what it stores and drops."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import torch

from evener.contracts.device import Device
from evener.contracts.encoder import Encoder
from evener.contracts.media import MediaItem
from evener.engine.wire.media import StepMedia


class MediaStore:
    """Rows [n, hidden] by the digest of their item, in the compute dtype.

    Args:
        encoders: the model's encoders by name.
        dtype: the compute dtype.
    """

    def __init__(self, device: Device, encoders: Mapping[str, Encoder], dtype: str) -> None:
        self._device, self._encoders, self._dtype = device, encoders, getattr(torch, dtype)
        self._rows: dict[bytes, torch.Tensor] = {}

    @torch.inference_mode()
    def warm_up(self) -> None:
        """Run each encoder once on zeros, so that its kernels are built."""
        for encoder in self._encoders.values():
            encoder.encode(self._device.upload(np.zeros(encoder.shape, dtype=encoder.dtype)))

    def take(self, media: StepMedia) -> tuple[torch.Tensor, torch.Tensor]:
        """Drop, store and encode items as the plan says. Returns ``Step.embedding_overrides``: int64 [m], the tokens
        whose embeddings are replaced, and the rows [m, hidden] that replace them."""
        for digest in media.drops:
            del self._rows[digest]
        for item in media.items:
            self._rows[item.digest] = self._make(item)
        at = [np.arange(o.token, o.token + o.count, dtype=np.int64) for o in media.overlays]
        rows = [self._rows[o.digest][o.first : o.first + o.count] for o in media.overlays]
        return self._device.upload(np.concatenate(at)), torch.cat(rows)

    def _make(self, item: MediaItem) -> torch.Tensor:
        value = self._device.upload(item.array())
        rows = self._encoders[item.encoder].encode(value) if item.encoder else value
        assert rows.shape[0] == item.rows, f"{item.encoder or 'given'} rows: {rows.shape[0]} instead of {item.rows}"
        return rows.to(self._dtype)
