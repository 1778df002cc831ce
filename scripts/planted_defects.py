"""Run the conformance kit on each fault in tests/packages/evener-backend-planted, one run for each.

    python scripts/planted_defects.py [NAME …] [--jobs 2] [--seed N]

The backend without a fault goes first and must pass. Prints a line for each fault: caught or not, by how many cases,
and the first of them. 0 if every one was caught.
"""

from __future__ import annotations

import argparse
import json
import os
import runpy
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = ROOT / "tests/packages/evener-backend-planted"


def known_defects() -> dict[str, str]:
    """The faults by name, each in a sentence."""
    found: dict[str, str] = runpy.run_path(str(PACKAGE / "evener_backend_planted/defects.py"))["DEFECTS"]
    return found


def install(target: Path) -> None:
    """Install the package into ``target`` with pip."""
    subprocess.run(
        [sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--no-index", "--no-deps",
         "--no-build-isolation", "--target", str(target), str(PACKAGE)],
        check=True,
    )  # fmt: skip


def run_kit(site: Path, defect: str, *words: str, python: str | Path = sys.executable) -> tuple[bool, list[str]]:
    """Whether the kit lets the backend pass with this fault (empty: none), and the cases that failed."""
    path = os.pathsep.join(filter(None, (str(site), os.environ.get("PYTHONPATH"))))
    out = site.parent / f"{defect or 'none'}.json"
    out.unlink(missing_ok=True)
    done = subprocess.run(
        [str(python), "-m", "evener", "conformance", "--backend", "planted", "--json", str(out), *words],
        env={**os.environ, "PYTHONPATH": path, "PLANTED_DEFECT": defect}, capture_output=True, text=True,
    )  # fmt: skip
    if not out.is_file():
        return False, [f"the kit ended with {done.stderr.strip() or done.returncode}"]
    cases = json.loads(out.read_text())["cases"]
    lost = [each for each in cases if each["outcome"] == "failed"]
    failed = [f"{each['area']}/{each['subject']}: {each['case']}: {each['detail']}" for each in lost]
    return done.returncode == 0, failed


def main() -> int:
    """Run them."""
    names = list(known_defects())
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"of {', '.join(names)}; default: all")
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--seed", type=int, help="the kit's seed; default: a new one for each run")
    wanted = parser.parse_args()
    words = [] if wanted.seed is None else ["--seed", str(wanted.seed)]
    if unknown := set(wanted.names) - set(names):
        parser.error(f"there is no fault {', '.join(sorted(unknown))}")
    missed = []
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(wanted.jobs) as pool:
        site = Path(folder) / "site"
        install(site)
        passes, failed = run_kit(site, "", *words)
        if not passes:
            print("the backend does not pass without a fault: " + "; ".join(failed))
            return 1
        names = wanted.names or names
        for name, (passes, failed) in zip(names, pool.map(lambda n: run_kit(site, n, *words), names), strict=True):
            missed += [name] * passes
            found = f"caught by {len(failed)} cases; {failed[0] if failed else ''}"
            print(f"{name}: {'NOT CAUGHT' if passes else found}", flush=True)
    print(f"{len(names) - len(missed)} of {len(names)} caught")
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
