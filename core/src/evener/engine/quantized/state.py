"""How a run's state is stored: asked of an installed package, and carried out when the pool is bound."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from evener.config.schema import InferConfig
from evener.contracts.checkpoint import Checkpoint, Headers
from evener.contracts.declared import StateSlot
from evener.contracts.device import Device
from evener.contracts.quantized.state import QuantizedState, StateAnswer, StateRequest
from evener.contracts.state import StateProvider
from evener.errors import ConfigError
from evener.layers.builder import Builder
from evener.plugins.discover import installed_catalog
from evener.plugins.load import LoadedPackages


def choose_state(
    declared: Sequence[Builder], infer: InferConfig, checkpoint: Checkpoint, headers: Headers, device: Device,
    loaded: LoadedPackages,
) -> list[str]:  # fmt: skip
    """Let installed packages decide how state is stored: they set ``spec`` and ``scales`` of the declared slots.
    Returns notes for the manifest.

    Args:
        declared: each pipeline stage's part of the model.

    Raises:
        ConfigError: a dtype or scales were asked for, and no installed package can do that.
        EvenerError: what the package raises.
    """
    choosers = installed_catalog().lazy_imports("state format")
    for key, value in {"kv_dtype": infer.kv_dtype, "kv_scales": infer.kv_scales}.items():
        if not choosers and value not in ("auto", None):
            raise ConfigError(f"infer.{key}={value} needs a package that is not installed: pip install evener-formats")
    providers, group = [p.value for p in loaded.state_providers(device)], declared[0].communicator
    shared = (0, 1) if group is None else (group.rank, group.size)
    request = StateRequest(
        infer.kv_dtype, infer.kv_scales, [each.slots for each in declared], checkpoint, headers, device, providers,
        *shared,
    )  # fmt: skip
    answers: list[StateAnswer] = [found.load()(request) for found in choosers.values()]
    declared[0].ignored += [pattern for answer in answers for pattern in answer.read]
    return [note for answer in answers for note in answer.notes]


def bind_slot(
    slot: StateSlot, provider: StateProvider, slabs: torch.Tensor, cut: int, block_size: int, device: Device
) -> Any:
    """What ``StateProvider.bind`` or ``QuantizedState.bind_scaled`` returns for the slot's blocks: ``cut`` of them in
    each of the ``slabs`` [slabs, bytes]."""
    blocks = slabs.view(len(slabs) * cut, slabs.shape[1] // cut)
    if not slot.scales:
        return provider.bind(blocks, slot.spec, block_size)
    assert isinstance(provider, QuantizedState), "resolution asks for it"
    scales = [device.upload(np.array(each, dtype=np.float32)) for each in slot.scales]
    return provider.bind_scaled(blocks, slot.spec, block_size, scales)
