"""The probe; it runs in a child process, as a vendor's would."""

import os
import time

from evener.contracts.probe import Marks, ProbedDevice, ProbeResult


def marks():
    return Marks(True, ("it is a simulated chip",))


def probe():
    if os.environ.get("FAILS") == "the probe hangs":
        time.sleep(600)
    if os.environ.get("FAILS") == "the probe aborts":
        os.abort()
    return ProbeResult(1, (ProbedDevice(0, "a failing chip", 1 << 30),), ("it is here",))
