"""The processor's instruction sets, from ``/proc/cpuinfo``, and the user's limit on them. Torch-free."""

from __future__ import annotations

import os
import platform
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from evener.errors import BackendError
from evener_backend_cpu.levels import LEVELS, Level

#: Values of ``cpu.isa`` beside "auto", and the level of x86-64 that each means. The first level is no limit.
LIMITS: Mapping[str, Level] = dict(zip(("avx512_bf16", "avx512_vnni", "avx512", "avx2"), LEVELS[1:], strict=True))
#: What "auto" means, for all processes of a test run.
VARIABLE = "EVENER_CPU_ISA"

_VARIANTS = (
    ("amx_bf16", {"amx_bf16", "avx512_bf16"}),
    ("avx512_bf16", {"avx512f", "avx512bw", "avx512dq", "avx512vl", "avx512_bf16"}),
    ("avx512", {"avx512f", "avx512bw", "avx512dq", "avx512vl"}),
    ("avx2", {"avx2", "fma"}),
    ("neon_bf16", {"asimd", "bf16"}),
    ("neon", {"asimd"}),
)
#: One thread of an Intel Xeon of 2023 gives 73 GFLOP/s in products by ``vdpbf16ps`` and 127 by those of float32; AMD's
#: Zen 5 twice as many by the former. Beside tiles it does not matter.
_SLOWER = frozenset({"avx512_bf16"})
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
        limit: the key of ``LIMITS`` that the user wants instead of the best; the other attributes are this level's.
        slower: words that the processor or the level has and kernels do without, as others are faster; ``features`` and
            ``words`` lack them.
    """

    name: str
    variant: str
    features: frozenset[str]
    words: frozenset[str] = frozenset()
    limit: str | None = None
    slower: frozenset[str] = frozenset()


def read(cpuinfo: Path = Path("/proc/cpuinfo")) -> Processor:
    """The first processor in ``cpuinfo``; without that file only the machine type is known."""
    fields: dict[str, str] = {}
    if cpuinfo.exists():
        for line in cpuinfo.read_text(encoding="utf-8", errors="replace").splitlines():
            key, _, value = line.partition(":")
            fields.setdefault(key.strip(), value.strip())
    words = frozenset((fields.get("flags") or fields.get("Features") or "").split())
    return _processor(fields.get("model name") or platform.machine(), words)


def usable(isa: str = "auto", environ: Mapping[str, str] | None = None) -> Processor:
    """The first processor of this machine, with the instructions that kernels may use.

    Args:
        isa: "auto", or a key of ``LIMITS``: this level, also if the processor has more.
        environ: where "auto" is looked up, under ``EVENER_CPU_ISA``; default ``os.environ``.

    Raises:
        BackendError: there is no such level, or the processor lacks it.
    """
    return limited(read(), isa, os.environ if environ is None else environ)


def limited(processor: Processor, isa: str, environ: Mapping[str, str]) -> Processor:
    """``processor`` with the instructions of ``isa``; arguments and errors are those of ``usable``."""
    key = "cpu.isa"
    if isa == "auto":
        key, isa = VARIABLE, environ.get(VARIABLE) or "auto"
    if isa == "auto":
        return processor
    able = [name for name, level in LIMITS.items() if level.needs <= processor.words | processor.slower]
    if isa not in able:
        why = f"{processor.name} lacks it" if isa in LIMITS else "there is no such level"
        raise BackendError(f"{key}={isa}, but {why}; type " + " or ".join(f"{key}={name}" for name in ("auto", *able)))
    return _processor(processor.name, LIMITS[isa].needs, isa)


def _processor(name: str, words: frozenset[str], limit: str | None = None) -> Processor:
    slower = words & _SLOWER if "Intel" in name and "amx_bf16" not in words else frozenset[str]()
    words -= slower
    variant = next((variant for variant, needed in _VARIANTS if needed <= words), "generic")
    return Processor(name, variant, words & _KNOWN_FEATURES, words, limit, slower)
