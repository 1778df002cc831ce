"""The masks after each proposed token, for matchers that cannot take tokens back."""

from __future__ import annotations

from evener.contracts.grammar.library import Matcher


def masks_behind(matcher: Matcher, tokens: list[int]) -> list[bytes]:
    """As ``Matcher.masks``, of a matcher whose state may change: a copy.

    Raises:
        ValueError: as ``Matcher.mask``.
    """
    found = [matcher.mask()]
    for token in tokens:
        if not allows(found[-1], token):
            break
        matcher.accept(token)
        try:
            found.append(matcher.mask())
        except ValueError:  # the text is complete, or cannot go on behind this token
            break
    return found


def allows(mask: bytes, token: int) -> bool:
    """Whether ``token`` is in a mask."""
    return bool(mask[token >> 3] >> (token & 7) & 1)
