"""One thread for tiny tensors."""

from __future__ import annotations

import pytest


@pytest.fixture(autouse=True)
def tiny_tensors(one_thread: None) -> None:
    """Every test here runs on one thread."""
