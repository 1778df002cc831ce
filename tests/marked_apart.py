"""Marks of tests that need what another command installs or makes: they run only where ``-m`` names their mark."""

from __future__ import annotations

import pytest


def add_mark(config: pytest.Config, mark: str, about: str) -> None:
    """Make the mark known."""
    config.addinivalue_line("markers", f"{mark}: {about}")


def leave_out(config: pytest.Config, items: list[pytest.Item], mark: str) -> None:
    """Without being asked for, no test with the mark runs, whatever else is selected."""
    if mark in str(config.getoption("markexpr")):
        return
    left_out = [item for item in items if item.get_closest_marker(mark)]
    if left_out:
        config.hook.pytest_deselected(items=left_out)
        items[:] = [item for item in items if not item.get_closest_marker(mark)]
