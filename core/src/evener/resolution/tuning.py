"""Tuning files: what every candidate for a call site took, measured offline by ``evener tune``; the resolver takes the
fastest that may serve. Torch-free."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import msgspec

from evener.contracts.communicator import Communicator
from evener.contracts.device import Device
from evener.contracts.ops import USUAL, OpCall, Variant
from evener.layers.declared import LinearWeight, StateSlot

#: Of the files that this version reads and writes.
FORMAT = 1


class Measured(msgspec.Struct, frozen=True, omit_defaults=True):
    """One candidate: its name as in the manifest, the variant that it ran in, and microseconds of one call."""

    provider: str
    us: float
    variant: dict[str, int | str] = {}

    def __str__(self) -> str:
        return f"{self.us:.1f} µs of {label(self.provider, self.variant)}"


class Entry(msgspec.Struct, frozen=True):
    """What was measured for one op with these static parameters in one bucket, fastest first."""

    op: str
    tokens: str
    static: dict[str, Any]
    measured: list[Measured]

    @property
    def key(self) -> tuple[str, int, str]:
        """What is looked up: the last bucket's upper end follows from the configuration, so the lower one counts."""
        return self.op, int(self.tokens.partition("..")[0]), _telling(self.static)


class Bench(msgspec.Struct, frozen=True):
    """Where times were measured; elsewhere they say nothing.

    Attributes:
        device, variant: the device's name, and the variant of its capabilities.
        conditions: versions and whatever else counts, as the device says.
        packages: those whose kernels took part, with their versions.
    """

    device: str
    variant: str
    conditions: dict[str, str]
    packages: dict[str, str]

    @classmethod
    def of(cls, device: Device, packages: Mapping[str, str], torch: str) -> Bench:
        """This one."""
        conditions = {"torch": torch, **device.conditions()}
        return cls(device.name, device.capabilities.variant, conditions, dict(packages))

    def __str__(self) -> str:
        return f"{self.device} {self.variant}".rstrip() + "".join(f", {k} {v}" for k, v in self.conditions.items())

    def differs(self, here: Bench) -> str | None:
        """Why what was measured there does not hold ``here``; None if it does."""
        if (self.device, self.variant) != (here.device, here.variant):
            return f"it was measured on {self}, this is {here}"
        for name, version in sorted(self.conditions.items()):
            if _release(version) != _release(here.conditions.get(name, "")):
                return f"it was measured with {name} {version}, here is {here.conditions.get(name, 'none')}"
        for name, version in sorted(self.packages.items()):
            if version != here.packages.get(name):
                return f"it was measured with {name} {version}, here is {here.packages.get(name, 'none')}"
        return None


class TuningFile(msgspec.Struct, frozen=True):
    """What a file holds."""

    format: int
    bench: Bench
    entries: list[Entry]

    def encode(self) -> bytes:
        """For a person and for ``decode``."""
        return msgspec.json.format(msgspec.json.encode(self), indent=1) + b"\n"


def decode(data: bytes) -> TuningFile:
    """What ``encode`` made.

    Raises:
        ValueError: it is something else, or of another format.
    """
    found = msgspec.json.decode(data, type=TuningFile)
    if found.format != FORMAT:
        raise ValueError(f"it has format {found.format}, this version reads {FORMAT}")
    if any(not entry.measured or not entry.tokens.partition("..")[0].isdigit() for entry in found.entries):
        raise ValueError("an entry has no bucket, or no measurement")
    return found


class Tuned:
    """Measurements by call; of several for one call the first that came holds.

    Args:
        bench: where this run is.

    Attributes:
        notes: for the manifest: which files hold, and why others do not.
    """

    def __init__(self, bench: Bench | None = None) -> None:
        self.bench = bench
        self.notes: list[str] = []
        self._found: dict[tuple[str, int, str], tuple[str, Sequence[Measured]]] = {}
        self._ops: set[str] = set()

    def add(self, name: str, entries: Iterable[Entry]) -> None:
        """Take in what the file ``name`` holds."""
        for entry in entries:
            self._found.setdefault(entry.key, (name, entry.measured))
            self._ops.add(entry.op)

    def find(self, call: OpCall) -> tuple[str, Sequence[Measured]] | None:
        """The name of a file and what it holds for ``call``; None if there is none."""
        if call.op not in self._ops:
            return None
        return self._found.get(call_key(call))


def call_key(call: OpCall) -> tuple[str, int, str]:
    """As ``Entry.key``."""
    return call.op, call.bucket.low, _telling(signature(call))


def signature(call: OpCall) -> dict[str, Any]:
    """The static parameters of ``call`` as plain data: what its time depends on beside the bucket."""
    return {name: _plain(value) for name, value in call.static.items()}


def _telling(static: Mapping[str, Any]) -> str:
    """Static parameters as text, without what almost every model has: files from before a parameter was added hold."""

    def few(value: Any) -> Any:
        if not isinstance(value, Mapping):
            return value
        return {name: few(inner) for name, inner in value.items() if name not in USUAL or inner != USUAL[name]}

    return json.dumps(few(static), sort_keys=True)


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
    """The first two numbers of a version: those within which nobody makes kernels faster or slower."""
    return version.split("+")[0].split(".")[:2]
