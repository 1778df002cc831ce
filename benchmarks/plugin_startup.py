"""Start-up cost of installed packages: `evener plugins` with and without N more of them, each in a new process.

    python benchmarks/plugin_startup.py [--plugins 50] [--repeats 7]

The packages are real ones (a wheel's metadata, an entry point, a descriptor) in a folder of their own on PYTHONPATH.
Cold: they have no compiled byte code, and none is written. The runs alternate; the medians and their difference are
printed, and the part of it that the process spends on reading descriptors.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

INSIDE = """
import time
start = time.perf_counter()
from evener.plugins.discover import discover
loaded = time.perf_counter()
found = discover()
print(len(found.packages), loaded - start, time.perf_counter() - loaded)
"""


def install(folder: Path, number: int) -> None:
    """One package: metadata, entry point, descriptor."""
    name, module = f"evener-backend-bench{number}", f"evener_backend_bench{number}"
    (folder / module).mkdir()
    (folder / module / "__init__.py").write_text(
        "from evener.contracts.descriptor import Descriptor, Option\n\n"
        f'descriptor = Descriptor(\n    name="bench{number}",\n    summary="Number {number}.",\n'
        '    contracts={"probe": 2, "device": 2, "ops": 2},\n'
        f'    probe="{module}.probe",\n    module="{module}.plugin",\n'
        '    serves=frozenset({"namespace:bench"}),\n'
        '    options={"rods": Option(type=int, default=64, help="Tokens.")},\n    ops=("rms_norm", "linear"),\n)\n'
    )
    (folder / module / "probe.py").write_text(
        "from evener.contracts.probe import Marks\n\n\ndef marks():\n    return Marks(False, ('not here',))\n"
    )
    info = folder / f"{module}-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(f"[evener.backends]\nbench{number} = {module}:descriptor\n")


def once(script: str, path: str) -> tuple[float, str]:
    """Seconds of one process, and what it printed."""
    environ = {**os.environ, "PYTHONPATH": path, "PYTHONDONTWRITEBYTECODE": "1"}
    start = time.perf_counter()
    done = subprocess.run([sys.executable, "-c", script], env=environ, capture_output=True, text=True, check=True)
    return time.perf_counter() - start, done.stdout


def main() -> int:
    """Time it and print one JSON line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--plugins", type=int, default=50)
    parser.add_argument("--repeats", type=int, default=7)
    wanted = parser.parse_args()
    times: dict[str, list[float]] = {"without": [], "with": []}
    inside: dict[str, list[float]] = {"without": [], "with": []}
    with tempfile.TemporaryDirectory() as folder:
        for number in range(wanted.plugins):
            install(Path(folder), number)
        counts = {}
        for _ in range(wanted.repeats):
            for name, path in (("without", ""), ("with", folder)):
                seconds, said = once(INSIDE, path)
                counts[name], _, reading = (float(word) for word in said.split())
                times[name].append(seconds)
                inside[name].append(reading)
    assert counts["with"] - counts["without"] == wanted.plugins, counts
    middle = {name: statistics.median(each) for name, each in times.items()}
    within = {name: statistics.median(each) for name, each in inside.items()}
    print(json.dumps({
        "plugins": wanted.plugins,
        "seconds_without": round(middle["without"], 4), "seconds_with": round(middle["with"], 4),
        "added_s": round(middle["with"] - middle["without"], 4),
        "added_reading_s": round(within["with"] - within["without"], 4),
    }))  # fmt: skip
    return 0


if __name__ == "__main__":
    sys.exit(main())
