"""Forks: requests that start from another request's state, because both begin with the same tokens.

A fork waits until its parent has computed the tokens that both share. The parent ends a step exactly there, because
some state (a recurrent row) exists only after the last token of a step. The fork then shares the parent's full blocks,
and the next plan copies the block that is partly filled. If the parent has ended or has computed more by then, the fork
starts as any other request does: from the prefix cache.
"""

from __future__ import annotations

from evener.engine.controller.request import Request
from evener.engine.controller.state import StateManager
from evener.engine.wire.media import shared_prefix_length
from evener.engine.wire.plan import BlockCopy


def start_from_parent(request: Request, parent: Request | None, least: int) -> None:
    """Make ``request`` a fork of ``parent``, if both share at least ``least`` tokens and the parent has not computed
    them yet. Does nothing otherwise, and without a parent."""
    if parent is None or parent.message.cache_salt != request.message.cache_salt or request.needs_whole_prompt:
        return
    # The request computes its last token itself, because it samples from that token's logits.
    pairs = zip(request.tokens[:-1], parent.tokens, strict=False)
    shared = next((i for i, (own, other) in enumerate(pairs) if own != other), len(request.tokens) - 1)
    shared = shared_prefix_length(request.message.media, parent.message.media, min(shared, len(parent.tokens)))
    if parent.parent is not None and parent.shared >= shared:
        parent = parent.parent  # the copies of one plan run together, so none may read what another writes
    if shared >= least and shared > parent.computed:
        request.parent, request.shared = parent, shared
        parent.fork_points.add(shared)


def open_state(state: StateManager, request: Request) -> list[BlockCopy] | None:
    """Give a request its block table, with the state that a parent or the prefix cache has of it. Sets its ``table``
    and ``computed``.

    Returns the copies that the request's first plan has to make; None if the state does not come from a parent.
    """
    parent = request.parent
    if parent is not None and parent.table is not None and parent.computed == request.shared and not request.exclusive:
        made = state.fork(parent.table, request.shared) if parent.finish is None else None
        if made is not None:
            request.table, copies = made
            request.table.media = request.message.media
            request.computed = request.shared
            return copies
    request.table, request.computed = state.open(
        request.tokens, request.message.cache_salt, request.exclusive, reuse=not request.needs_whole_prompt,
        media=request.message.media,
    )  # fmt: skip
    return None
