"""Tokens that a grammar forces, as some matchers can tell; they are used as drafts. Torch-free."""

from __future__ import annotations

from typing import Protocol, runtime_checkable

from evener.contracts.grammar.library import Matcher


@runtime_checkable
class ForcingMatcher(Protocol):
    """A ``Matcher`` that knows which tokens must come."""

    def forced(self) -> list[int]:
        """Ids that are likely to come next because the grammar leaves no other text; proposed as drafts, so that the
        model may still write the text in other tokens. Takes microseconds."""


def forced_by(matcher: Matcher | None) -> list[int]:
    """The tokens that must come next; none if the matcher cannot tell, or there is no matcher."""
    return matcher.forced() if isinstance(matcher, ForcingMatcher) else []
