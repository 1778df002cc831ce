"""The constraints of a simulated chip, and the error for a broken one. Torch-free."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from evener.contracts.device import DeviceCapabilities
from evener.errors import EngineError
from evener_conformance.simulated import descriptor


class ConstraintError(EngineError):
    """The engine or a kernel did something that the simulated chip cannot; the message begins with the switch."""


@dataclass(frozen=True)
class Chip:
    """One chip of the backend: its compute dtypes and number of captures; all else is the same for every chip."""

    name: str
    dtypes: frozenset[str]
    captures: int


CHIPS = {
    "older": Chip("older", frozenset({"float32", "float16"}), 8),
    "newer": Chip("newer", frozenset({"float32", "float16", "bfloat16"}), 64),
}


@dataclass(frozen=True)
class Constraints:
    """The backend's options, with the chip's own values; see ``evener_conformance.simulated``."""

    chip: Chip
    block_128: bool
    transposed_values: bool
    host_lengths: bool
    alignment: int
    int64: bool
    graphs: bool
    host_calls: bool
    graph_update: bool
    max_captures: int
    int8_state: bool
    missing: str
    host_reads: bool
    memory: int
    python: bool

    @classmethod
    def of(cls, options: Mapping[str, Any]) -> Constraints:
        """Make it from the package's validated options."""
        chip = CHIPS[options["chip"]]
        captures = chip.captures if options["max_captures"] is None else options["max_captures"]
        return cls(**{**options, "chip": chip, "max_captures": captures})

    @classmethod
    def all_on(cls, **options: Any) -> Constraints:
        """The options' defaults, with every constraint on, and ``changes``."""
        return cls.of({**{name: option.default for name, option in descriptor.options.items()}, **options})

    @property
    def capabilities(self) -> DeviceCapabilities:
        """The device capabilities that follow from the constraints."""
        return DeviceCapabilities(
            dtypes=self.chip.dtypes, alignment=self.alignment, int64=self.int64, host_lengths=self.host_lengths,
            graphs=self.graphs, max_captures=self.max_captures, graph_update=self.graph_update,
            host_calls=self.host_calls, variant=self.chip.name,
        )  # fmt: skip
