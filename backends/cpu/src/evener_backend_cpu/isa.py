"""The processor's instruction sets, from ``/proc/cpuinfo``. Torch-free."""

from __future__ import annotations

import platform
from dataclasses import dataclass
from pathlib import Path

_VARIANTS = (
    ("amx_bf16", {"amx_bf16", "avx512_bf16"}),
    ("avx512_bf16", {"avx512f", "avx512bw", "avx512dq", "avx512vl", "avx512_bf16"}),
    ("avx512", {"avx512f", "avx512bw", "avx512dq", "avx512vl"}),
    ("avx2", {"avx2", "fma"}),
    ("neon_bf16", {"asimd", "bf16"}),
    ("neon", {"asimd"}),
)
_KNOWN_FEATURES = frozenset(
    {
        "amx_bf16",
        "amx_int8",
        "avx2",
        "fma",
        "avx512f",
        "avx512bw",
        "avx512dq",
        "avx512vl",
        "avx512_bf16",
        "avx512_fp16",
        "avx512_vnni",
        "avx_vnni",
        "asimd",
        "asimddp",
        "bf16",
        "i8mm",
        "sve",
    }
)


@dataclass(frozen=True)
class Processor:
    """The first processor of the machine.

    Attributes:
        variant: "avx512_bf16", "avx2", "neon", …, or "generic".
        features: those of the processor's features that kernels may match.
        words: all of them, as ``/proc/cpuinfo`` names them.
    """

    name: str
    variant: str
    features: frozenset[str]
    words: frozenset[str] = frozenset()


def read(cpuinfo: Path = Path("/proc/cpuinfo")) -> Processor:
    """The first processor in ``cpuinfo``; without that file only the machine type is known."""
    fields: dict[str, str] = {}
    if cpuinfo.exists():
        for line in cpuinfo.read_text(encoding="utf-8", errors="replace").splitlines():
            key, _, value = line.partition(":")
            fields.setdefault(key.strip(), value.strip())
    words = frozenset((fields.get("flags") or fields.get("Features") or "").split())
    variant = next((name for name, needed in _VARIANTS if needed <= words), "generic")
    return Processor(fields.get("model name") or platform.machine(), variant, words & _KNOWN_FEATURES, words)
