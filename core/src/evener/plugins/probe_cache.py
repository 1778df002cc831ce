"""Answers of earlier probes, in the user's cache folder. Only usable ones are kept: a failure is asked again."""

from __future__ import annotations

import hashlib
import importlib.util
import json
import os
import sys
from dataclasses import asdict
from pathlib import Path

import importlib_metadata

from evener.contracts.probe import Marks, ProbeResult
from evener.plugins import probe_wire, torch_marks
from evener.plugins.catalog import Package

_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


class ProbeCache:
    """A folder of answers.

    Args:
        folder: made when first needed.
        boot_id: what identifies this boot of this machine; None (default) reads it from the kernel.
    """

    def __init__(self, folder: Path, boot_id: str | None = None) -> None:
        self._folder = folder
        self._boot_id = _read_boot_id() if boot_id is None else boot_id

    def load(self, package: Package, marks: Marks) -> ProbeResult | None:
        """The answer that still holds, or None. A file that cannot be understood is no answer."""
        try:
            return probe_wire.decode(json.loads(self._file(package, marks).read_text(encoding="utf-8")))
        except (OSError, ValueError, TypeError):
            return None

    def store(self, package: Package, marks: Marks, result: ProbeResult) -> str:
        """Keep a usable answer. Returns why it was not kept, or an empty string."""
        if result.score == 0:
            return "not cached: it says that the backend cannot run here"
        if not self._boot_id:
            return "not cached: this system has no boot id"
        file = self._file(package, marks)
        part = file.with_suffix(f".{os.getpid()}")
        try:
            self._folder.mkdir(parents=True, exist_ok=True, mode=0o700)
            part.write_text(json.dumps(probe_wire.encode(result)), encoding="utf-8")
            part.replace(file)
        except OSError as error:
            return f"not cached: {error}"
        return ""

    def _file(self, package: Package, marks: Marks) -> Path:
        """Named after all that the answer depends on."""
        key = {
            "boot": self._boot_id,
            "package": [package.name, package.distribution, package.version, _stamp(package.descriptor.probe)],
            "core": importlib_metadata.version("evener"),
            "torch": torch_marks.read().version,
            "python": [sys.executable, sys.version],
            "marks": {**asdict(marks), "cache_key": sorted(marks.cache_key.items())},
        }
        digest = hashlib.sha256(json.dumps(key, sort_keys=True, default=str).encode()).hexdigest()
        return self._folder / f"{package.name}-{digest[:32]}.json"


def _read_boot_id() -> str:
    try:
        return _BOOT_ID.read_text().strip()
    except OSError:
        return ""


def _stamp(module: str | None) -> str:
    """Changes when the probe's source does: an editable install keeps its version."""
    spec = importlib.util.find_spec(module) if module else None
    if spec is None or spec.origin is None:
        return ""
    status = Path(spec.origin).stat()
    return f"{status.st_mtime_ns}:{status.st_size}"
