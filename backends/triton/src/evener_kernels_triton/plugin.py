"""The hooks of the Triton kernels."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from evener.contracts.device import Device
from evener.contracts.hooks import hookimpl
from evener.contracts.ops import Kernel
from evener.contracts.state import StateProvider
from evener_kernels_triton.adapters import ADAPTERS
from evener_kernels_triton.binaries import use_stored
from evener_kernels_triton.composites import COMPOSITES
from evener_kernels_triton.experts import EXPERTS
from evener_kernels_triton.features import number_of
from evener_kernels_triton.latent import LATENT
from evener_kernels_triton.latent_state import LatentState
from evener_kernels_triton.layer_norm import TritonLayerNorm
from evener_kernels_triton.layers import LAYERS
from evener_kernels_triton.linear import LINEAR
from evener_kernels_triton.logits import LOGITS
from evener_kernels_triton.primitives import PRIMITIVES
from evener_kernels_triton.sampling import SAMPLING
from evener_kernels_triton.state import PagedState
from evener_kernels_triton.tuning import MIN_EVEN_TOKENS, Tuning


@hookimpl
def evener_kernels(device: Device, options: Mapping[str, Any]) -> Sequence[Kernel]:
    """All kernels, with launch sizes for this device. Those that a package carries compiled are not compiled again."""
    use_stored()
    tuning = _tuning(device, options)
    kinds = (*PRIMITIVES, TritonLayerNorm, *SAMPLING, *LOGITS, *LINEAR, *COMPOSITES, *LAYERS, *EXPERTS, *LATENT,
             *ADAPTERS)  # fmt: skip
    return [kind(device, tuning) for kind in kinds]


@hookimpl
def evener_state_providers(device: Device, options: Mapping[str, Any]) -> Sequence[StateProvider]:
    """The providers of paged state and of latent state."""
    tuning = _tuning(device, options)
    short, short_latent = (number_of(f"short{of}", device.capabilities.features, 0) for of in ("", "-latent"))
    return [PagedState(tuning, short), LatentState(tuning, short_latent)]


def _tuning(device: Device, options: Mapping[str, Any]) -> Tuning:
    return Tuning.of(
        device.capabilities, options.get("overlap", "auto") != "off", options.get("even_attention", MIN_EVEN_TOKENS)
    )
