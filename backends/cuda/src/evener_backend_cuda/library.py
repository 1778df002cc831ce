"""The optional kernel libraries of this backend. Torch-free."""

from __future__ import annotations

import re
from dataclasses import dataclass

from evener_backend_parts.library import Library


@dataclass(frozen=True)
class CudaLibrary(Library):
    """A library with kernels for its ``architectures``; without any, for ``sm_80`` and later."""

    owner: str = "evener-backend-cuda"

    def has_kernels(self, variant: str) -> bool:
        if self.architectures:
            return variant in self.architectures
        found = re.fullmatch(r"sm_(\d+)", variant)
        return found is not None and int(found[1]) >= 80

    def has_kernels_for(self) -> str:
        return ", ".join(self.architectures) or "sm_80 and later"


FLASH_ATTENTION = CudaLibrary("flash_attn", ("flash-attn",), "2.6", "flash-attn")
FLASHINFER = CudaLibrary("flashinfer", ("flashinfer-python",), "0.6", "flashinfer")
FLASH_MLA = CudaLibrary(
    "flash_mla", ("flash-mla",), "1.0", "", "git+https://github.com/deepseek-ai/FlashMLA.git", ("sm_90",)
)
#: SGLang's build, the only one with wheels.
DEEP_GEMM = CudaLibrary("deep_gemm", ("sgl-deep-gemm",), "0.2.5", "deep-gemm", architectures=("sm_90",))
