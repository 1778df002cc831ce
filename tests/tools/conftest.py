"""Tests with checkpoints of the tools themselves. They need what ``make test-tools`` writes, and run only with it."""

from __future__ import annotations

import pytest

_MARK = "tools"


def pytest_configure(config: pytest.Config) -> None:
    """The mark is theirs alone."""
    config.addinivalue_line("markers", f"{_MARK}: reads checkpoints that quantization tools wrote (make test-tools)")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Without being asked for, none of them runs, whatever else is selected."""
    if _MARK in str(config.getoption("markexpr")):
        return
    left_out = [item for item in items if item.get_closest_marker(_MARK)]
    if left_out:
        config.hook.pytest_deselected(items=left_out)
        items[:] = [item for item in items if not item.get_closest_marker(_MARK)]
