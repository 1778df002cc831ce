"""Compile the native code that tests share, and cache it: the CPU backend's kernels and the simulated device.

The kernels are for this processor, or for the level that EVENER_CPU_ISA names. Both are compiled at the same time.

python scripts/compile_kernels.py
"""

from __future__ import annotations

import logging
import sys
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

from evener.backend.native_code import Unavailable
from evener_backend_cpu.isa import usable
from evener_backend_cpu.native_library import load
from evener_conformance.simulated.build import compiled


def main() -> int:
    """0, also if there is no compiler: then tests of that code say what is missing."""
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    processor = usable()
    with ThreadPoolExecutor() as pool:
        work: dict[str, Future[Any]] = {
            f"CPU kernels ({processor.variant})": pool.submit(load, processor),
            "simulated device": pool.submit(compiled),
        }
    for name, done in work.items():
        found = done.result()
        print(f"{name}:", found.reason if isinstance(found, Unavailable) else "ready")
    return 0


if __name__ == "__main__":
    sys.exit(main())
