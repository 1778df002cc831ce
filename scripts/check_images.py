"""Build the images of ``containers/`` on a small base, start each, and record what came of it.

    python scripts/check_images.py [NAME ...]        # writes docs/results/images.jsonl

A vendor's image is not needed: the base is Debian with Python, a C++ compiler and torch's wheel for the CPU, made by
debootstrap. So this shows that a recipe builds, that its entry point starts, and which backend is chosen with no card.

Needs root, buildah and debootstrap (``apt-get install buildah debootstrap``) and 10 GB of disk. Only the base is kept.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from build_wheels import build

# At the end: this folder has a module named like one of Python's own, profile.
sys.path.append(str(Path(__file__).resolve().parent.parent / "benchmarks"))

from machine import cpu_name

ROOT = Path(__file__).resolve().parent.parent
RECIPES = sorted(path.name.partition(".")[0] for path in (ROOT / "containers").glob("*.Dockerfile"))
RECORD = ROOT / "docs/results/images.jsonl"
BASE = "localhost/evener-test-base"
_PACKAGES = "python3,python3-pip,ca-certificates,g++"
#: Mounted where they exist: how this machine reaches a package index.
_PIP = ("/etc/pip.conf", "/etc/ssl/certs/ca-certificates.crt")


def main(argv: Sequence[str]) -> int:
    """Build and start each image; 0 if all do."""
    parser = argparse.ArgumentParser(description="Build the container recipes on a small base.")
    parser.add_argument("recipes", nargs="*", metavar="NAME", help=f"of {', '.join(RECIPES)}; default: all")
    parser.add_argument("--mirror", default="http://deb.debian.org/debian", help="of Debian; default: %(default)s")
    options = parser.parse_args(argv)
    if unknown := [name for name in options.recipes if name not in RECIPES]:
        parser.error(f"there is no containers/{unknown[0]}.Dockerfile; type some of {', '.join(RECIPES)}")
    if missing := [name for name in ("buildah", "debootstrap") if shutil.which(name) is None]:
        parser.error(f"{missing[0]} is not installed; type: apt-get install {' '.join(missing)}")
    os.environ.update(BUILDAH_ISOLATION="chroot", STORAGE_DRIVER=os.environ.get("STORAGE_DRIVER", "vfs"))
    rows = []
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        if BASE not in _out("buildah", "images", "--format", "{{.Name}}").split():
            _make_base(folder / "base", options.mirror)
        shutil.copytree(ROOT / "containers", folder / "context/containers")
        build(sorted(path.parent for path in ROOT.glob("*/pyproject.toml")), folder / "context/dist")
        build(sorted(path.parent for path in ROOT.glob("backends/*/pyproject.toml")), folder / "context/dist")
        for name in options.recipes or RECIPES:
            rows.append(_try(name, folder / "context"))
            print(json.dumps(rows[-1]), flush=True)
            _record(rows[-1])
    return 0 if all(row["builds"] and row["starts"] for row in rows) else 1


def _make_base(root: Path, mirror: str) -> None:
    debian = ["debootstrap", "--variant=minbase", f"--include={_PACKAGES}", "bookworm", str(root), mirror]
    subprocess.run(debian, check=True)
    (wanted,) = [line for line in (ROOT / "constraints.txt").read_text().split() if line.startswith("torch==")]
    version = f"{sys.version_info.major}.{sys.version_info.minor}"
    site = root / f"usr/local/lib/python{version}/dist-packages"
    if not (root / f"usr/bin/python{version}").exists():
        raise SystemExit(f"Debian's Python is not {version}: run this with the Python of the base, 3.11")
    subprocess.run([sys.executable, "-m", "pip", "install", "-q", "--target", str(site), wanted], check=True)
    made = _out("buildah", "from", "scratch").strip()
    subprocess.run(["buildah", "copy", "-q", made, f"{root}/", "/"], check=True, stdout=subprocess.DEVNULL)
    subprocess.run(["buildah", "commit", "-q", "--rm", made, BASE], check=True, stdout=subprocess.DEVNULL)


def _try(name: str, context: Path) -> dict[str, object]:
    """A row for one recipe."""
    image, mounts = f"localhost/evener-{name}", [f"-v={path}:{path}:ro" for path in _PIP if Path(path).exists()]
    command = ["buildah", "bud", "--network=host", *mounts, f"--build-arg=BASE={BASE}", f"-t={image}",
               f"--file={context}/containers/{name}.Dockerfile", str(context)]  # fmt: skip
    today = datetime.date.today().isoformat()
    row: dict[str, object] = {
        "recipe": name, "device": cpu_name(), "model": "none", "date": today, "builds": False, "starts": False,
        "command": f"python scripts/check_images.py {name}",
    }  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        return {**row, "error": done.stderr.strip()[-300:]}
    container = _out("buildah", "from", image).strip()
    try:
        entry = json.loads(_out("buildah", "inspect", "--type=image", image))["OCIv1"]["config"]
        words = [*entry["Entrypoint"], *entry["Cmd"]]
        done = subprocess.run(["buildah", "run", container, "--", *words], capture_output=True, text=True, check=False)
        last = [line for line in done.stdout.splitlines() if line.startswith("backend: ")]
        row.update(builds=True, starts=done.returncode == 0 and bool(last), says="".join(last[-1:]))
    finally:
        for thing in (["rm", container], ["rmi", image]):
            subprocess.run(["buildah", *thing], check=True, stdout=subprocess.DEVNULL)
    return row


def _record(row: dict[str, object]) -> None:
    """Put a row in the place of the recipe's last one."""
    lines = RECORD.read_text("utf-8").splitlines() if RECORD.exists() else []
    rows = {row["recipe"]: row for row in map(json.loads, lines)} | {row["recipe"]: row}
    RECORD.write_text("".join(json.dumps(rows[name]) + "\n" for name in sorted(rows)), "utf-8")


def _out(*command: str) -> str:
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
