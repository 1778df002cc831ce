"""The simulated probe. A probe takes no options, so ``EVENER_SIMULATED_PROBE`` selects how it behaves.

``absent``: no marks; ``slow:2``: it answers after two seconds; ``hang``: it never answers; ``crash``: it raises.
Otherwise it answers at once. Torch-free.
"""

from __future__ import annotations

import os
import time

from evener.contracts.probe import Marks, ProbedDevice, ProbeResult
from evener_conformance.simulated import DEVICES

BEHAVIOUR = "EVENER_SIMULATED_PROBE"


def marks() -> Marks:
    """Always fit: every machine can simulate. The variable is part of the cache key."""
    asked = os.environ.get(BEHAVIOUR, "")
    if asked == "absent":
        return Marks(False, (f"{BEHAVIOUR}=absent",))
    return Marks(True, ("it is simulated",), cache_key={BEHAVIOUR: asked, "devices": str(DEVICES)})


def probe() -> ProbeResult:
    """A score below every real backend's: it is chosen only by name, or if it is alone."""
    asked, _, seconds = os.environ.get(BEHAVIOUR, "").partition(":")
    if asked == "crash":
        raise RuntimeError(f"{BEHAVIOUR}=crash")
    if asked in ("slow", "hang"):
        time.sleep(float(seconds) if seconds else 3600.0)
    chips = tuple(ProbedDevice(index, f"simulated chip {index}") for index in range(DEVICES))
    return ProbeResult(1, chips, ("simulation runs anywhere",))
