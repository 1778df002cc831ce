"""Compile the CPU backend's kernels for this processor, or for the level that EVENER_CPU_ISA names, and cache them.

python scripts/compile_kernels.py
"""

from __future__ import annotations

import logging
import sys

from evener.backend.native_code import Unavailable
from evener_backend_cpu.isa import usable
from evener_backend_cpu.native_library import load


def main() -> int:
    """0, also if there is no compiler: then tests of the kernels say what is missing."""
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    processor = usable()
    found = load(processor)
    print(f"CPU kernels ({processor.variant}):", found.reason if isinstance(found, Unavailable) else "ready")
    return 0


if __name__ == "__main__":
    sys.exit(main())
