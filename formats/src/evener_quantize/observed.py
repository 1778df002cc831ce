"""What is remembered of the inputs of linear weights: XᵀX and magnitudes, whatever the number of tokens. Two kernels,
for the ops ``linear`` and ``grouped_linear``, compute as the reference does and show their inputs."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from evener.contracts.declared import LinearWeight
from evener.contracts.ops import Kernel, OpCall, OpFunction
from evener.contracts.quant import PackedWeight
from evener.ops.reference import linear as reference
from evener.plugins.catalog import Provided

#: A linear weight's name, and the number of the expert; -1 if it is no stack.
Key = tuple[str, int]


@dataclass
class Inputs:
    """The inputs of one matrix.

    Attributes:
        gram: XᵀX, float32 [columns, columns].
        magnitudes: sums of magnitudes, float32 [columns].
        count: rows of X.

    With no columns they are only counted.
    """

    gram: torch.Tensor
    magnitudes: torch.Tensor
    count: int = 0

    @classmethod
    def none(cls, columns: int, device: torch.device) -> Inputs:
        """Nothing seen yet."""
        return cls(torch.zeros(columns, columns, device=device), torch.zeros(columns, device=device))

    @property
    def remembered(self) -> bool:
        """Whether more than their number is remembered."""
        return len(self.magnitudes) > 0

    def see(self, x: torch.Tensor) -> None:
        """Add the rows of ``x`` [n, columns]."""
        self.count += len(x)
        if not self.remembered:
            return
        x = x.float()
        self.gram.addmm_(x.T, x)
        self.magnitudes += x.abs().sum(0)


class Observer:
    """Remembers the inputs of the matrices that are watched. ``watched`` may be changed between steps."""

    def __init__(self) -> None:
        self.watched: dict[Key, Inputs] = {}

    def kernels(self) -> tuple[Provided[Kernel], ...]:
        """The kernels that show their inputs."""
        return tuple(Provided(each, "quantize", "evener-formats", "") for each in (_Linear(self), _Grouped(self)))


class _Linear(Kernel):
    op, name, priority = "linear", "observed", 1000

    def __init__(self, observer: Observer) -> None:
        self._observer = observer

    def supports(self, call: OpCall) -> str | None:
        del call
        return None

    def build(self, call: OpCall) -> OpFunction:
        weight: LinearWeight = call.static["weight"]
        run, watched, key = reference.linear(call.static, _no_use), self._observer, (weight.name, -1)

        def observe(x: torch.Tensor, packed: PackedWeight, bias: torch.Tensor | None = None) -> torch.Tensor:
            if (inputs := watched.watched.get(key)) is not None:
                inputs.see(x)
            return run(x, packed, bias)  # type: ignore[no-any-return]

        return observe


class _Grouped(_Linear):
    op, name = "grouped_linear", "observed_experts"

    def build(self, call: OpCall) -> OpFunction:
        weight: LinearWeight = call.static["weight"]
        run, watched = reference.grouped_linear(call.static, _no_use), self._observer

        def observe(
            x: torch.Tensor, packed: PackedWeight, slots: torch.Tensor, bias: torch.Tensor | None = None
        ) -> torch.Tensor:
            for (name, expert), inputs in watched.watched.items():
                if name == weight.name:
                    inputs.see(x[(slots == expert).any(1)])
            return run(x, packed, slots, bias)  # type: ignore[no-any-return]

        return observe


def _no_use(op: str, /, **static: object) -> OpFunction:
    raise AssertionError(f"the reference of a linear op uses no other op, not {op} {sorted(static)}")
