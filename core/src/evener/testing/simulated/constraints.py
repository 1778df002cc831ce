"""What a simulated chip insists on, and the error that says it was broken. Torch-free."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from evener.contracts.device import DeviceCapabilities
from evener.errors import EngineError
from evener.testing.simulated import descriptor


class ConstraintError(EngineError):
    """The engine or a kernel did what the simulated chip cannot do; the message begins with the switch."""


@dataclass(frozen=True)
class Chip:
    """One chip of the backend: compute types and captures are the chip's, all else is common."""

    name: str
    dtypes: frozenset[str]
    captures: int


CHIPS = {
    "older": Chip("older", frozenset({"float32", "float16"}), 8),
    "newer": Chip("newer", frozenset({"float32", "float16", "bfloat16"}), 64),
}


@dataclass(frozen=True)
class Constraints:
    """The backend's options with the chip looked up; see ``evener.testing.simulated``."""

    chip: Chip
    block_128: bool
    transposed_values: bool
    host_lengths: bool
    alignment: int
    int64: bool
    graphs: bool
    graph_update: bool
    max_captures: int
    missing: str
    host_reads: bool
    memory: int
    python: bool

    @classmethod
    def of(cls, options: Mapping[str, Any]) -> Constraints:
        """From the package's checked options."""
        chip = CHIPS[options["chip"]]
        captures = chip.captures if options["max_captures"] is None else options["max_captures"]
        return cls(**{**options, "chip": chip, "max_captures": captures})

    @classmethod
    def hard(cls, **options: Any) -> Constraints:
        """Every constraint on, but for what is said otherwise: the options' defaults."""
        return cls.of({**{name: option.default for name, option in descriptor.options.items()}, **options})

    @property
    def capabilities(self) -> DeviceCapabilities:
        """What core is told."""
        return DeviceCapabilities(
            dtypes=self.chip.dtypes, alignment=self.alignment, int64=self.int64, host_lengths=self.host_lengths,
            graphs=self.graphs, max_captures=self.max_captures, graph_update=self.graph_update,
            variant=self.chip.name,
        )  # fmt: skip
