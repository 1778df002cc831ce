"""Accelerators on the PCI bus, read from sysfs. Core knows classes of devices, not vendors."""

from __future__ import annotations

import fnmatch
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

SYSFS = Path("/sys/bus/pci")
_DISPLAY, _COMPUTE = "0x0300", ("0x0302", "0x1200")

# A server's management controller is a display controller too, with a frame buffer of tens of MiB; anything that
# computes maps at least this much.
_SMALLEST_APERTURE = 256 << 20


@dataclass(frozen=True)
class PciDevice:
    """One device: ``address`` (``0000:17:00.0``) and ``ident`` (``vendor:device`` in lower-case hex)."""

    address: str
    ident: str


def accelerators(root: Path = SYSFS) -> tuple[PciDevice, ...]:
    """Display, 3D and processing accelerators, by address; empty where there is no PCI bus to read.

    Args:
        root: the folder that holds ``devices``.
    """
    found: list[PciDevice] = []
    for folder in sorted(root.glob("devices/*")):
        kind = _text(folder / "class")[:6]
        if kind in _COMPUTE or (kind == _DISPLAY and _largest_aperture(folder) >= _SMALLEST_APERTURE):
            ident = ":".join(_text(folder / name).removeprefix("0x").lower() for name in ("vendor", "device"))
            found.append(PciDevice(folder.name, ident))
    return tuple(found)


def unclaimed(devices: Iterable[PciDevice], claims: Iterable[str]) -> tuple[PciDevice, ...]:
    """The devices that match no claim; a claim is ``vendor:device``, where ``*`` stands for anything."""
    claims = tuple(claim.lower() for claim in claims)
    return tuple(device for device in devices if not any(fnmatch.fnmatchcase(device.ident, claim) for claim in claims))


def _text(path: Path) -> str:
    """A sysfs attribute; empty if the device vanished or hides it."""
    try:
        return path.read_text().strip()
    except OSError:
        return ""


def _largest_aperture(folder: Path) -> int:
    """Bytes of the largest memory range; a device that does not list its ranges may be anything, so it counts."""
    lines = _text(folder / "resource").splitlines()
    sizes = [int(end, 16) - int(start, 16) + 1 for start, end, *_ in (line.split() for line in lines if line.strip())]
    return max(sizes, default=_SMALLEST_APERTURE)
