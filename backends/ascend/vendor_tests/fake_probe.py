"""The backend's real probe, over a folder of device nodes that a test made (in EVENER_TEST_DEV)."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

from evener.contracts.probe import Marks
from evener_backend_ascend import descriptor as real
from evener_backend_ascend.probe import marks as real_marks
from evener_backend_ascend.probe import probe

descriptor = replace(real, probe="fake_probe", module="simulated_plugin")
__all__ = ["descriptor", "marks", "probe"]


def marks() -> Marks:
    """Those of the folder."""
    found = real_marks(Path(os.environ["EVENER_TEST_DEV"]))
    return replace(found, cache_key={**found.cache_key, "chip": os.environ.get("FAKE_ACL_CHIP", "")})
