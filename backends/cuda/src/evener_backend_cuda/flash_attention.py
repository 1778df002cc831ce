"""The state provider "flash_attn": flash-attn (Dao 2023), version 2 of its kernels."""

from __future__ import annotations

from evener_backend_cuda.library import FLASH_ATTENTION
from evener_backend_parts.flash_attention import FlashAttention


class FlashAttentionState(FlashAttention):
    """Pages of multiples of 256 tokens, which its kernels require."""

    name = layout = "flash_attn"
    library = FLASH_ATTENTION
    sizes = (256,)
