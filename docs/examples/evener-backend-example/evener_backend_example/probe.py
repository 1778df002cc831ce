"""Can this backend run here? `marks` is cheap and runs in evener's process, `probe` in a child with a time limit."""

import os
from pathlib import Path

from evener.contracts.probe import Marks, ProbedDevice, ProbeResult

NODE = Path("/dev/example0")
PRETEND = os.environ.get("EXAMPLE_PRETEND", "") == "1"  # host memory stands in for the chip, to try the package


def marks():
    if PRETEND:
        return Marks(True, ("EXAMPLE_PRETEND=1",), cache_key={"pretend": "1"})
    here = NODE.exists()
    return Marks(here, (f"{NODE} is {'there' if here else 'not there'}",))


def probe():
    # Import your SDK here, open the device, and read its name and memory.
    return ProbeResult(100, (ProbedDevice(0, "Example", memory=1 << 30),), ("it answers",))
