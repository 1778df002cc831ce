"""Huawei's builds of Triton and of its compiler, in a folder of the cache whose name is a hash of what it depends on.

``python triton_environment.py`` makes the folder if it is not there, and prints its path. They are in no environment of
ours: triton-ascend has the module name ``triton``.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

#: Triton's front end for Ascend, and the compiler of what it makes, down to HIVM. The last step, ``hivmc``, is in CANN.
WHEELS = ("triton-ascend==3.2.0", "ascendnpu-ir==1.2.0", "pybind11==3.1.0")


def environment() -> Path:
    """The folder; its subfolder ``site`` goes first in PYTHONPATH.

    Raises:
        RuntimeError: pip failed; with what it printed.
    """
    key = hashlib.sha256(repr((WHEELS, sys.version_info[:2])).encode()).hexdigest()[:16]
    root = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "evener/vendors"
    folder = root / f"ascend-triton-{key}"
    if folder.is_dir():
        return folder
    root.mkdir(parents=True, exist_ok=True)
    made = Path(tempfile.mkdtemp(dir=root))
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target", str(made / "site"), *WHEELS]
    try:
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode:
            raise RuntimeError(f"{' '.join(command)}:\n{done.stdout}{done.stderr}")
        made.rename(folder)
    finally:
        shutil.rmtree(made, ignore_errors=True)
    return folder


if __name__ == "__main__":
    print(environment())
