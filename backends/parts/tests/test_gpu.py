"""What a device of torch's namespace ``cuda`` sets in torch."""

from __future__ import annotations

import pytest
import torch

from evener.backend.torch_device import TorchDevice
from evener.contracts.device import DeviceCapabilities
from evener_backend_parts.gpu import GpuDevice


def test_float16_products_keep_their_sums_in_float32_L0(monkeypatch: pytest.MonkeyPatch) -> None:
    products = torch.backends.cuda.matmul
    before = products.allow_fp16_reduced_precision_reduction
    monkeypatch.setattr(TorchDevice, "__init__", lambda self, *arguments: None)
    try:
        products.allow_fp16_reduced_precision_reduction = True
        GpuDevice("cuda", 0, DeviceCapabilities())
        assert not products.allow_fp16_reduced_precision_reduction
    finally:
        products.allow_fp16_reduced_precision_reduction = before
