from __future__ import annotations

from collections.abc import Callable

import pytest

from evener_conformance.package_site import site as site


@pytest.fixture
def never() -> Callable[[str], str]:
    """Source of a module that must not be imported."""
    return lambda why: f"raise AssertionError({why!r})\n"
