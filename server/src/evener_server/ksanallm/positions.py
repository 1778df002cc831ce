"""Which of a prompt's tokens a target selects, and how many numbers that makes."""

from __future__ import annotations

from evener.errors import RequestError
from evener_server.ksanallm.body import Target


def ranges_of(target: Target, ids: list[int], place: str) -> list[tuple[int, int]]:
    """Ranges of positions, from the first to before the second; ascending, without overlaps.

    Args:
        ids: the prompt's.
        place: path of the target, for errors.

    Raises:
        RequestError: ``slice_pos`` does not fit the prompt.
    """
    count = len(ids) - target.next_token
    if target.token_id:
        named = set(target.token_id)
        return [(at, at + 1) for at, token in enumerate(ids) if token in named]
    if not target.slice_pos:
        return [(0, count)] if count else []
    name, found, free = f"{place}.slice_pos", list[tuple[int, int]](), 0
    for first, last in target.slice_pos:
        begin, end = (at + len(ids) if at < 0 else at for at in (first, last))
        shown = f"{name} has [{first}, {last}]"
        if target.next_token and end == len(ids) - 1:
            raise RequestError(f"{shown}: no token follows the last one; send -2 or less for its end", name)
        if not 0 <= begin <= end < len(ids):
            raise RequestError(f"{shown}, but the prompt has {len(ids)} tokens: send [first, last] within it", name)
        if begin < free:
            raise RequestError(f"{shown}, which begins before the range before it ends; send ascending ranges", name)
        found.append((begin, end + 1))
        free = end + 1
    return found


def length(ranges: list[tuple[int, int]]) -> int:
    """The number of positions."""
    return sum(end - first for first, end in ranges)
