"""Which is faster: to compute an expert on the host, or to copy it to the device. Torch-free."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np

#: Numbers of experts, or of rows: int64 [n].
Indices: TypeAlias = np.ndarray[Any, np.dtype[np.int64]]


@dataclass(frozen=True)
class ExpertCosts:
    """Seconds that one expert of a layer takes.

    Attributes:
        copy: its copy to the device.
        first, more: the host's product with one row, and each further row.
        bend, further: beyond ``bend`` rows, each further row takes ``further`` instead of ``more``; by default never.
    """

    copy: float
    first: float
    more: float
    bend: int = 1 << 30
    further: float = 0.0

    def on_host(self, rows: Any) -> Any:
        """The host's products with ``rows`` rows, at least one: a number, or an array of them."""
        return (
            self.first + self.more * (np.minimum(rows, self.bend) - 1) + self.further * np.maximum(0, rows - self.bend)
        )

    def times(self, factor: float) -> ExpertCosts:
        """The costs of an expert with ``factor`` times the bytes."""
        copy, first, more, further = (each * factor for each in (self.copy, self.first, self.more, self.further))
        return ExpertCosts(copy, first, more, self.bend, further)


def host_share(missing: Indices, rows: Indices, costs: ExpertCosts, under_way: float = 0.0) -> Indices:
    """The experts that the host computes so that it and the copies of the others, which run at the same time, are done
    soonest. Those with the fewest rows go to the host first (as in HybriMoE, Zhong et al. 2025); of equal ones those
    that come first.

    Args:
        rows: of each of the experts ``missing``.
        under_way: seconds that copies take which have been submitted before.
    """
    order = rows.argsort(kind="stable")
    busy = costs.on_host(rows[order]).cumsum()
    copies = under_way + np.arange(len(rows), 0, -1) * costs.copy
    (late,) = (busy >= copies).nonzero()  # so many, and the next one would be done after the copies
    return missing[order[: late[0] if len(late) else None]]


def least_streamed(
    experts: int, top: int, costs: ExpertCosts, most: int, beside: ExpertCosts | None = None, submitted: float = 0.0
) -> int | None:
    """The tokens, a power of two of at most ``most``, from which on a streamed layer is sooner than computing all of it
    on the host; None: it never is. Each token is expected to choose its ``top`` of the ``experts`` evenly.

    Args:
        beside: what the host takes while others are copied, so that both share the experts; None: all are copied.
        submitted: seconds that a streamed layer takes beside copies.
    """
    tokens = 1
    while tokens <= most:
        needed = experts * (1 - (1 - top / experts) ** tokens)
        host = needed * costs.first + (tokens * top - needed) * costs.more
        streamed = needed * costs.copy
        if beside is not None and streamed:
            shared = needed * beside.first + (tokens * top - needed) * beside.more
            streamed *= shared / (streamed + shared)
        if streamed + submitted < host:
            return tokens
        tokens *= 2
    return None
