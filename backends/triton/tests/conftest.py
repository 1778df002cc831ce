"""The kernels run under Triton's interpreter, on the CPU."""

from __future__ import annotations

import os

# Triton reads this when a kernel is defined.
os.environ.setdefault("TRITON_INTERPRET", "1")
