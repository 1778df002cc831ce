"""Tests with checkpoints of the tools themselves. They need what ``make test-tools`` writes, and run only with it."""

from __future__ import annotations

import pytest
from marked_apart import add_mark, leave_out

_MARK = "tools"


def pytest_configure(config: pytest.Config) -> None:
    """The mark is theirs alone."""
    add_mark(config, _MARK, "reads checkpoints that quantization tools wrote (make test-tools)")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """None of them runs without being asked for."""
    leave_out(config, items, _MARK)
