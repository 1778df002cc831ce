"""Quantized state: eight-bit elements, and float32 scales for each layer.

A tensor of a spec is quantized if it has ``StateTensor.wide``. A number ``x`` is stored as ``round(x / scale)``,
saturated, and read as ``element * scale``; ``evener.state_pages.elements`` is the definition. A package that announces
``state_formats`` in its descriptor decides which layers' state is, and brings the scales.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from evener.contracts.checkpoint import Checkpoint, Headers
from evener.contracts.declared import StateSlot
from evener.contracts.device import Device
from evener.contracts.state import StateProvider, StateSpec, StoredStateProvider

if TYPE_CHECKING:
    import torch


class QuantizedState(StoredStateProvider):
    """(optional) The interface of a provider that stores quantized state too, beside that of its kinds.

    Attributes:
        scaled: the element types that it stores, of "float8_e4m3fn", "float8_e5m2", "int8". A group with another one is
            not offered to it.
        replaced: (optional) element types that it does not store, and what it stores instead of each, e.g.
            {"float8_e4m3fn": "int8"}. The run announces it. Default: none.
    """

    scaled: frozenset[str]
    replaced: Mapping[str, str] = MappingProxyType({})

    @abstractmethod
    def bind_scaled(
        self, storage: torch.Tensor, spec: StateSpec, block_size: int, scales: Sequence[torch.Tensor]
    ) -> Any:
        """As ``bind``, for quantized state. ``scales``: of this layer, for each tensor of the spec float32 [shape[0]]
        on the device (one for each head), valid as long as the views. Other methods take and give numbers of the dtype
        ``StateTensor.wide``; importing exported blocks gives the same elements."""


def unscaled(provider: StateProvider, spec: StateSpec) -> str | None:
    """Why ``provider`` does not store quantized state of this ``spec``; None if it does, or if the state is not
    quantized."""
    stored = provider.scaled if isinstance(provider, QuantizedState) else frozenset()
    odd = [tensor.dtype for tensor in spec.tensors if tensor.wide is not None and tensor.dtype not in stored]
    have = f", only {', '.join(sorted(stored))}" if stored else ""
    return f"does not store {odd[0]} with scales{have}" if odd else None


@dataclass(frozen=True)
class StateRequest:
    """What a package is asked, when a model is declared and nothing is resolved yet.

    Attributes:
        dtype, scales: the keys ``infer.kv_dtype`` and ``infer.kv_scales``.
        stages: the declared state of each pipeline stage.
        checkpoint: that the model is read from.
        headers: of its tensors; empty for random weights.
        device: that will hold the state.
        providers: the state providers of installed packages.
        rank, ranks: this one of those that share a layer's heads, and how many they are.
    """

    dtype: str
    scales: str | None
    stages: Sequence[Sequence[StateSlot]]
    checkpoint: Checkpoint
    headers: Headers
    device: Device
    providers: Sequence[StateProvider]
    rank: int = 0
    ranks: int = 1


@dataclass(frozen=True)
class StateAnswer:
    """What a package decided. It has set ``spec`` and ``scales`` of the slots.

    Attributes:
        notes: for the manifest.
        read: regular expressions for names of the checkpoint's tensors that belong to state, not to weights.
    """

    notes: Sequence[str] = ()
    read: Sequence[str] = ()


#: A function of ``Descriptor.state_formats``. It raises ConfigError or CheckpointError.
StateChooser = Callable[[StateRequest], StateAnswer]
