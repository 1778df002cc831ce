"""Whether the host computes an expert faster than the expert is copied to the device. Does not import torch."""

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
        first: the host's product with one row.
        more: each further row, up to ``bend`` rows.
        further: each row beyond ``bend`` rows.
    """

    copy: float
    first: float
    more: float
    bend: int = 1 << 30
    further: float = 0.0

    def on_host(self, rows: Any) -> Any:
        """Seconds of the host's product with ``rows`` rows, at least 1. A number, or an array for several experts."""
        return (
            self.first + self.more * (np.minimum(rows, self.bend) - 1) + self.further * np.maximum(0, rows - self.bend)
        )

    def times(self, factor: float) -> ExpertCosts:
        """The costs of an expert with ``factor`` times the bytes."""
        copy, first, more, further = (each * factor for each in (self.copy, self.first, self.more, self.further))
        return ExpertCosts(copy, first, more, self.bend, further)


def host_share(missing: Indices, rows: Indices, costs: ExpertCosts, under_way: float = 0.0) -> Indices:
    """The ``missing`` experts that the host computes, so that the host and the copies of the others, which run at the
    same time, both end as soon as possible. The experts with the fewest rows go to the host first (as in HybriMoE,
    Zhong et al. 2025); of experts with equally many rows, those that come first.

    Args:
        rows: the rows of each missing expert.
        under_way: seconds until the copies end that were submitted before.
    """
    order = rows.argsort(kind="stable")
    busy = costs.on_host(rows[order]).cumsum()
    copies = under_way + np.arange(len(rows), 0, -1) * costs.copy
    (late,) = (busy >= copies).nonzero()  # experts at which the host would not end before the copies
    return missing[order[: late[0] if len(late) else None]]


def least_streamed(
    experts: int, top: int, costs: ExpertCosts, most: int, beside: ExpertCosts | None = None, submitted: float = 0.0
) -> int | None:
    """The smallest number of tokens, a power of two up to ``most``, for which a streamed layer takes less time than
    computing all of its experts on the host. None: there is none. Each token is assumed to choose its ``top`` of
    ``experts`` experts evenly.

    Args:
        costs: of the host alone.
        beside: costs of the host while other experts are copied, if the host computes some; None: all are copied.
        submitted: seconds that a streamed layer takes in addition to copies.
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
