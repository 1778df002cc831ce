"""Triton's kernels run under its interpreter, on the CPU, whichever package's tests come first."""

from __future__ import annotations

import os

# Triton reads this when a kernel is defined, and backends import each other's kernels.
os.environ.setdefault("TRITON_INTERPRET", "1")
