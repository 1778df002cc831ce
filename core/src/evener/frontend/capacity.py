"""How many samples an engine accepts at a time. Each request is checked once here, before any other work."""

from __future__ import annotations

from collections.abc import Callable

from evener.errors import OverloadedError, RequestError


class Capacity:
    """The limit of one engine, and what is reserved. Not thread-safe.

    Args:
        limit: samples that may be open at a time, waiting ones included; None: no limit.
        num_open: counts the samples that were submitted and have not ended.
    """

    def __init__(self, limit: int | None, num_open: Callable[[], int]) -> None:
        self.limit, self.num_open, self.reserved = limit, num_open, 0

    def reserve(self, samples: int, param: str = "n") -> Reservation:
        """Reserve room for the samples of a request, before it is prepared.

        Raises:
            RequestError: more samples than ever fit; ``param`` is the field that asks for them.
            OverloadedError: they do not fit now.
        """
        return Reservation(self).add(samples, param)


class Reservation:
    """Room for samples that are not submitted yet. Leaving the context frees what was not used."""

    def __init__(self, capacity: Capacity) -> None:
        self._capacity, self._left = capacity, 0

    def add(self, samples: int, param: str = "n") -> Reservation:
        """Reserve more room, or free some if ``samples`` is negative; returns itself.

        Raises:
            RequestError, OverloadedError: as ``Capacity.reserve``.
        """
        limit, total = self._capacity.limit, self._left + samples
        taken = self._capacity.num_open() + self._capacity.reserved
        if limit is not None and total > limit:
            message = f"{param} asks for {total} samples, but at most {limit} are taken at a time: ask for fewer"
            raise RequestError(message, param)
        if limit is not None and taken + samples > limit:
            raise OverloadedError(f"{taken} samples are open and {limit} are allowed: try again in a moment")
        self.use(-samples)
        return self

    def use(self, samples: int) -> None:
        """``samples`` were submitted: from now on they count as open, not as reserved."""
        self._capacity.reserved -= samples
        self._left -= samples

    def __enter__(self) -> Reservation:
        return self

    def __exit__(self, *_: object) -> None:
        self.use(self._left)
