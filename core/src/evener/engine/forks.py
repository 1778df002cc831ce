"""Forks: requests that start from another's state, instead of computing what both have in common once more.

A fork waits until its parent has computed that much. There the parent ends a step, because some state (a recurrent row)
exists only behind a step's last token. The next plan copies the block that both have begun, and shares those before it.
A fork whose parent has ended, or has gone on, starts as anybody else does: from the prefix cache.
"""

from __future__ import annotations

from evener.engine.request import Request
from evener.engine.state import StateManager
from evener.media.items import parted

#: ``(group, source block, target block)``, as in ``Plan.copies``.
Copies = list[tuple[int, int, int]]


def attach(request: Request, parent: Request | None, least: int) -> None:
    """Let ``request`` start from ``parent``'s state (None: nobody's), if it comes to one of ``least`` tokens or more
    that both share."""
    if parent is None or parent.message.cache_salt != request.message.cache_salt or request.to_score:
        return
    # The last token is the request's own to compute: what it samples comes from there.
    pairs = zip(request.tokens[:-1], parent.tokens, strict=False)
    shared = next((i for i, (own, other) in enumerate(pairs) if own != other), len(request.tokens) - 1)
    shared = parted(request.message.media, parent.message.media, min(shared, len(parent.tokens)))
    if parent.parent is not None and parent.shared >= shared:
        parent = parent.parent  # copies of one plan are made at once: none may read what another writes
    if shared >= least and shared > parent.planned:
        request.parent, request.shared = parent, shared
        parent.pauses.add(shared)


def open_state(state: StateManager, request: Request) -> Copies | None:
    """Give a request its table, with what is computed already.

    Returns the copies that the first plan has to make; None if it is nobody's fork (any more).
    """
    parent = request.parent
    if parent is not None and parent.table is not None and parent.planned == request.shared and not request.alone:
        made = state.fork(parent.table, request.shared) if parent.finish is None else None
        if made is not None:
            request.table, copies = made
            request.table.media = request.message.media
            request.planned = request.shared
            return copies
    request.table, request.planned = state.open(
        request.tokens, request.message.cache_salt, alone=request.alone, reuse=not request.to_score,
        media=request.message.media,
    )  # fmt: skip
    return None
