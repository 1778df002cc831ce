"""Masks of several texts in one call of their library, which may use several cores for them. Torch-free."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol, runtime_checkable

from evener.contracts.grammar.library import Matcher


@runtime_checkable
class JointMatcher(Protocol):
    """A ``Matcher`` whose class finds the masks of several of its matchers at once."""

    @classmethod
    def masks_of(cls, matchers: Sequence[Matcher]) -> list[bytes | None]:
        """What ``mask`` gives for each of ``matchers``, which are of this class; None: ask that one alone, it raises
        the reason."""


def joint_masks(matchers: Sequence[Matcher]) -> list[bytes | None]:
    """The masks of those that are of a class with at least one other and can be asked together; None for the others."""
    kinds: dict[type[Matcher], list[int]] = {}
    for index, matcher in enumerate(matchers):
        if isinstance(matcher, JointMatcher):
            kinds.setdefault(type(matcher), []).append(index)
    found: list[bytes | None] = [None] * len(matchers)
    for kind, indices in kinds.items():
        if len(indices) > 1 and issubclass(kind, JointMatcher):
            for index, mask in zip(indices, kind.masks_of([matchers[i] for i in indices]), strict=True):
                found[index] = mask
    return found
