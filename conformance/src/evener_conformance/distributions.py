"""Temporary distributions for tests: a folder on ``sys.path`` with metadata and entry points, as pip writes them."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path


def write_distribution(
    folder: Path, name: str, entry_points: Mapping[str, Mapping[str, str]], version: str = "1.0"
) -> Path:
    """Write ``<name>-<version>.dist-info`` into ``folder``, with ``{group: {name: value}}``.

    ``folder`` on ``sys.path`` (and in PYTHONPATH, for child processes) installs it. Returns the new folder in it.
    """
    info = folder / f"{name.replace('-', '_')}-{version}.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
    lines = []
    for group, entries in entry_points.items():
        lines.append(f"[{group}]")
        lines += [f"{key} = {value}" for key, value in entries.items()]
    (info / "entry_points.txt").write_text("\n".join(lines) + "\n")
    return info


def install_reference_backend(folder: Path) -> Path:
    """Write the entry point of ``evener_conformance.reference.backend``; choose it with ``backend="reference"``."""
    return write_distribution(
        folder,
        "evener-backend-reference",
        {"evener.backends": {"reference": "evener_conformance.reference.backend:descriptor"}},
    )
