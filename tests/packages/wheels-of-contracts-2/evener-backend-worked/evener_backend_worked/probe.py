"""Can this backend run here? Only if an environment variable simulates the chip."""

import os

from evener.contracts.probe import Marks, ProbedDevice, ProbeResult


def marks():
    here = os.environ.get("WORKED_PRETEND") == "1"
    return Marks(here, ("WORKED_PRETEND=1" if here else "there is no such chip; WORKED_PRETEND=1 simulates one",))


def probe():
    return ProbeResult(100, (ProbedDevice(0, "Worked", memory=2 << 30),), ("the chip is simulated in host memory",))
