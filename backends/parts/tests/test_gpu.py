"""What a device of torch's namespace ``cuda`` sets in torch."""

from __future__ import annotations

import pytest
import torch

from evener.backend.torch_device import TorchDevice
from evener.contracts.device import DeviceCapabilities
from evener_backend_parts.gpu import GpuDevice


@pytest.mark.parametrize("dtype", ["fp16", "bf16"])
def test_products_keep_their_sums_in_float32_L0(dtype: str, monkeypatch: pytest.MonkeyPatch) -> None:
    products, setting = torch.backends.cuda.matmul, f"allow_{dtype}_reduced_precision_reduction"
    before = getattr(products, setting)
    monkeypatch.setattr(TorchDevice, "__init__", lambda self, *arguments: None)
    try:
        setattr(products, setting, True)
        GpuDevice("cuda", 0, DeviceCapabilities())
        assert not getattr(products, setting)
    finally:
        setattr(products, setting, before)
