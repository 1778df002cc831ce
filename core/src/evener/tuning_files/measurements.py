"""Tuning files: the times of every candidate for a call site, measured offline by ``evener tune``; the resolver takes
the fastest candidate that may serve. A file is found where the user asked for one, in the user's cache folder, or in a
package. Torch-free."""

from __future__ import annotations

import dataclasses
import json
import logging
from collections.abc import Iterable, Iterator, Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import msgspec

from evener.contracts.communicator import Communicator
from evener.contracts.declared import LinearWeight, StateSlot
from evener.contracts.device import Device
from evener.contracts.ops import STATIC_DEFAULTS, OpCall, Variant
from evener.errors import ConfigError
from evener.folders.cache import cache_folder, is_trusted

#: The file format that this version reads and writes.
FORMAT = 1
log = logging.getLogger("evener.tuning")


class Measurement(msgspec.Struct, frozen=True, omit_defaults=True):
    """One candidate: its name as in the manifest, the variant that it ran in, and microseconds of one call."""

    provider: str
    us: float
    variant: dict[str, int | str] = {}

    def __str__(self) -> str:
        return f"{self.us:.1f} µs of {label(self.provider, self.variant)}"


class Entry(msgspec.Struct, frozen=True):
    """The measurements of one op with these static parameters in one bucket, fastest first."""

    op: str
    tokens: str
    static: dict[str, Any]
    measured: list[Measurement]

    @property
    def key(self) -> tuple[str, int, str]:
        """The key of a look-up. It has the bucket's lower end: the upper end of the last bucket depends on the
        configuration."""
        return self.op, int(self.tokens.partition("..")[0]), _static_key(self.static)


class BenchEnvironment(msgspec.Struct, frozen=True):
    """Where times were measured; they are used in the same environment only.

    Attributes:
        device, variant: the device's name, and the variant of its capabilities.
        conditions: versions and other facts that change times, from the device.
        packages: versions of the packages whose kernels were measured.
    """

    device: str
    variant: str
    conditions: dict[str, str]
    packages: dict[str, str]

    @classmethod
    def of(cls, device: Device, packages: Mapping[str, str], torch: str) -> BenchEnvironment:
        """The environment of this run."""
        conditions = {"torch": torch, **device.conditions()}
        return cls(device.name, device.capabilities.variant, conditions, dict(packages))

    def __str__(self) -> str:
        return f"{self.device} {self.variant}".rstrip() + "".join(f", {k} {v}" for k, v in self.conditions.items())

    def differs(self, here: BenchEnvironment) -> str | None:
        """Why times measured in this environment are not used ``here``; None if they are."""
        if (self.device, self.variant) != (here.device, here.variant):
            return f"it was measured on {self}, this is {here}"
        for theirs, ours, part in ((self.conditions, here.conditions, _release), (self.packages, here.packages, str)):
            for name, version in sorted(theirs.items()):
                if part(version) != part(ours.get(name, "")):
                    return f"it was measured with {name} {version}, here is {ours.get(name, 'none')}"
        return None


class TuningFile(msgspec.Struct, frozen=True):
    """The contents of a file."""

    format: int
    bench: BenchEnvironment
    entries: list[Entry]

    def encode(self) -> bytes:
        """JSON, indented for readers."""
        return msgspec.json.format(msgspec.json.encode(self), indent=1) + b"\n"


def decode(data: bytes) -> TuningFile:
    """The file that ``encode`` made.

    Raises:
        ValueError: ``data`` is something else, or of another format.
    """
    found = msgspec.json.decode(data, type=TuningFile)
    if found.format != FORMAT:
        raise ValueError(f"it has format {found.format}, this version reads {FORMAT}")
    if any(not entry.measured or not entry.tokens.partition("..")[0].isdigit() for entry in found.entries):
        raise ValueError("an entry has no bucket, or no measurement")
    return found


class TuningTable:
    """Measurements by call; if two files have the same call, the file that was added first counts.

    Args:
        bench: the environment of this run.

    Attributes:
        notes: for the manifest: which files are used, and why others are not.
    """

    def __init__(self, bench: BenchEnvironment | None = None) -> None:
        self.bench = bench
        self.notes: list[str] = []
        self._found: dict[tuple[str, int, str], tuple[str, Sequence[Measurement]]] = {}

    def add(self, name: str, entries: Iterable[Entry]) -> None:
        """Add the entries of the file ``name``."""
        for entry in entries:
            self._found.setdefault(entry.key, (name, entry.measured))

    def find(self, call: OpCall) -> tuple[str, Sequence[Measurement]] | None:
        """The file's name and its measurements of ``call``; None if no file has any."""
        return self._found.get(call_key(call)) if self._found else None


def call_key(call: OpCall) -> tuple[str, int, str]:
    """The ``Entry.key`` of a call."""
    return call.op, call.bucket.low, _static_key(signature(call))


def signature(call: OpCall) -> dict[str, Any]:
    """The static parameters of ``call`` as plain data; its time depends on them and on the bucket."""
    return {name: _plain(value) for name, value in call.static.items()}


def _static_key(static: Mapping[str, Any]) -> str:
    """Static parameters as text, without defaults, so that files from before a parameter was added are still found."""

    def drop_defaults(value: Any) -> Any:
        if not isinstance(value, Mapping):
            return value
        kept = (item for item in value.items() if item not in STATIC_DEFAULTS.items())
        return {name: drop_defaults(inner) for name, inner in kept}

    return json.dumps(drop_defaults(static), sort_keys=True)


def _plain(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {str(name): _plain(inner) for name, inner in value.items()}
    if isinstance(value, LinearWeight):
        stack = f"{value.experts} x " if value.experts else ""
        parts = ", ".join(f"{part.rows} x {part.columns} {part.format.storage}" for part in value.parts)
        return f"{stack}({parts}) as {value.layout}"
    if isinstance(value, StateSlot):
        assert value.provider is not None, "state units are resolved first"
        tensors = [f"{t.name} {list(t.shape)} {t.dtype}" for t in value.spec.tensors]
        return {"kind": value.spec.kind, "window": value.spec.window, "tensors": tensors,
                "layout": value.provider.layout, **dataclasses.asdict(value.attention)}  # fmt: skip
    if isinstance(value, Communicator):
        return f"{value.size} ranks"
    return value if value is None or isinstance(value, (bool, int, float, str)) else str(value)


def label(provider: str, variant: Variant) -> str:
    """``package/kernel[rows=32 warps=4]``."""
    return provider + (f"[{' '.join(f'{k}={v}' for k, v in variant.items())}]" if variant else "")


def _release(version: str) -> list[str]:
    """The first two numbers of a version: a patch release does not change the speed of kernels."""
    return version.split("+")[0].split(".")[:2]


def default_folder() -> Path:
    """The folder that ``evener tune`` writes to."""
    return cache_folder("tuning")


def tuning_files(packages: Sequence[str]) -> Iterator[tuple[str, Path]]:
    """Every file and its name in messages: the user's first, then those of ``packages`` (dotted paths of folders)."""
    yield from ((file.name, file) for file in sorted(filter(is_trusted, default_folder().glob("*.json"))))
    for package in packages:
        spec = find_spec(package)
        for folder in (spec and spec.submodule_search_locations) or ():
            yield from ((f"{package}/{file.name}", file) for file in sorted(Path(folder).glob("*.json")))


def tuning_lines(packages: Sequence[str]) -> Iterator[str]:
    """For a person: every file and the environment that it was measured in."""
    for name, file in tuning_files(packages):
        try:
            content = decode(file.read_bytes())
            yield f"tuning file {name}: {len(content.entries)} measurements, for {content.bench}"
        except (OSError, ValueError) as error:
            yield f"tuning file {name} cannot be used: {error}"


def read_tuned(asked: str, here: BenchEnvironment, packages: Sequence[str]) -> TuningTable:
    """The measurements that were made in the environment ``here``.

    Args:
        asked: ``infer.tuning``: "off", "auto" or a path.
        packages: folders in the chosen packages.

    Raises:
        ConfigError: the file that was asked for cannot be read. For other files this is a warning.
    """
    tuned = TuningTable(here)
    named = asked not in ("auto", "off")
    found = [(asked, Path(asked))] if named else list(tuning_files(packages)) if asked == "auto" else []
    for name, file in found:
        try:
            content = decode(file.read_bytes())
        except (OSError, ValueError) as error:
            said = f"tuning file {name} cannot be used: {error}; write a new one: evener tune MODEL --out FILE"
            if named:
                raise ConfigError(said) from error
            log.warning("%s", said)
            tuned.notes.append(said)
            continue
        reason = content.bench.differs(here)
        if reason is None:
            tuned.add(name, content.entries)
        log.info("tuning file %s: %s", name, reason or "used")
        tuned.notes.append(f"tuning file {name} is " + (f"not used: {reason}" if reason else "used"))
    return tuned
