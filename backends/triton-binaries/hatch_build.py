"""Put compiled kernels into the wheel, if ``EVENER_TRITON_BINARIES`` names the folder that they are in.

    EVENER_TRITON_BINARIES=FOLDER/store pip wheel ./backends/triton-binaries   # FOLDER: scripts/triton_binaries.py's

Without it the wheel carries none, and nothing changes where it is installed. ``make triton-binaries`` does all of it.
"""

from __future__ import annotations

import os
import sysconfig
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

VARIABLE = "EVENER_TRITON_BINARIES"


class Binaries(BuildHookInterface):  # type: ignore[type-arg]
    """Puts the files of the folder beside the package's module."""

    PLUGIN_NAME = "custom"

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        wanted = os.environ.get(VARIABLE, "")
        if not wanted or version == "editable":
            return
        folder = Path(wanted)
        if not (folder / "index.json").is_file():
            raise SystemExit(f"{VARIABLE}={wanted}: it has no index.json; type make triton-binaries, or leave it out")
        if sysconfig.get_platform() != "linux-x86_64":
            raise SystemExit(f"{VARIABLE} is for Linux on x86-64, this is {sysconfig.get_platform()}: leave it out")
        for path in sorted(folder.iterdir()):
            build_data["force_include"][str(path)] = f"evener_kernels_triton_binaries/{path.name}"
        build_data["pure_python"] = False
        build_data["tag"] = "py3-none-linux_x86_64"
