"""Rows of media that a worker keeps: what plans say, no more."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import torch

from evener.contracts.device import Device
from evener.contracts.encoder import Encoder
from evener.contracts.media import MediaItem
from evener.media.items import StepMedia


class MediaStore:
    """Encoded and given rows by digest, in the compute type.

    Args:
        encoders: the model's, by name.
        dtype: compute type.
    """

    def __init__(self, device: Device, encoders: Mapping[str, Encoder], dtype: str) -> None:
        self._device, self._encoders, self._dtype = device, encoders, getattr(torch, dtype)
        self._rows: dict[bytes, torch.Tensor] = {}

    @torch.inference_mode()
    def warm_up(self) -> None:
        """Run each encoder once, over zeros."""
        for encoder in self._encoders.values():
            encoder.encode(self._device.upload(np.zeros(encoder.shape, dtype=encoder.dtype)))

    def take(self, media: StepMedia) -> tuple[torch.Tensor, torch.Tensor]:
        """Drop, take in, encode, and return what ``Step.overlay`` is in the step."""
        for digest in media.drops:
            del self._rows[digest]
        for item in media.items:
            self._rows[item.digest] = self._make(item)
        at = [np.arange(row, row + count, dtype=np.int64) for row, _, _, count in media.overlays]
        rows = [self._rows[digest][first : first + count] for _, digest, first, count in media.overlays]
        return self._device.upload(np.concatenate(at)), torch.cat(rows)

    def _make(self, item: MediaItem) -> torch.Tensor:
        value = self._device.upload(item.array())
        rows = self._encoders[item.encoder].encode(value) if item.encoder else value
        assert rows.shape[0] == item.rows, f"{item.encoder or 'given'} rows: {rows.shape[0]} instead of {item.rows}"
        return rows.to(self._dtype)
