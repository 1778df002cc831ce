"""A matcher for texts in which some sequences of tokens must not occur."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from evener.contracts.grammar.library import Matcher
from evener_generation.proposed_tokens import allows


class _Node:
    """The longest begin of a sequence with which a text ends.

    Attributes:
        after: the next nodes, by token.
        last: tokens that would complete a sequence.
        shorter: the node of the next shorter begin with which the text ends too; None: of the empty one.
    """

    __slots__ = ("after", "last", "shorter")

    def __init__(self) -> None:
        self.after: dict[int, _Node] = {}
        self.last: set[int] = set()
        self.shorter: _Node | None = None


class ForbiddenTokens(Matcher):
    """What another matcher allows, but no token that completes one of the sequences. Tokens are followed through the
    automaton of Aho and Corasick (1975), so a long text costs no more than a short one.

    Args:
        sequences: ids, none empty; those of more than the vocabulary are left out.
        vocab_size: ids of the model.
        inner: the other matcher; None: any token may come.
    """

    def __init__(self, sequences: Sequence[Sequence[int]], vocab_size: int, inner: Matcher | None = None) -> None:
        self._inner = inner
        self._any = ((1 << vocab_size) - 1).to_bytes(4 * -(-vocab_size // 32), "little")
        self._node = _automaton([ids for ids in sequences if max(ids) < vocab_size])

    def copy(self) -> Matcher:
        other = object.__new__(ForbiddenTokens)
        other._any, other._node = self._any, self._node
        other._inner = None if self._inner is None else self._inner.copy()
        return other

    def mask(self) -> bytes:
        return _without(self._any if self._inner is None else self._inner.mask(), self._node)

    def fitting(self, tokens: list[int]) -> int:
        return len(tokens) if self._inner is None else self._inner.fitting(tokens)

    def masks(self, tokens: list[int]) -> list[bytes]:
        inner: Sequence[bytes | memoryview] = [self._any] * (1 + len(tokens))
        inner = inner if self._inner is None else self._inner.masks(tokens)
        found, node = [_without(inner[0], self._node)], self._node
        for token, mask in zip(tokens, inner[1:], strict=False):
            if not allows(found[-1], token):
                break
            node = _next(node, token)
            try:
                found.append(_without(mask, node))
            except ValueError:  # the text cannot go on behind this token
                break
        return found

    def accept(self, token: int) -> None:
        if self._inner is not None:
            self._inner.accept(token)
        self._node = _next(self._node, token)


def _without(mask: bytes | memoryview, node: _Node | None) -> bytes:
    """``mask`` without what would complete a sequence.

    Raises:
        ValueError: nothing is left.
    """
    bits = bytearray(mask)
    while node is not None:
        for token in node.last:
            bits[token >> 3] &= ~(1 << (token & 7))
        node = node.shorter
    if bits.count(0) == len(bits):
        raise ValueError("every token that may come next would complete a forbidden word")
    return bytes(bits)


def _next(node: _Node, token: int) -> _Node:
    while token not in node.after and node.shorter is not None:
        node = node.shorter
    # The root has no shorter one: without a next node, the text ends with no begin of a sequence.
    return node.after.get(token, node)


def _automaton(sequences: Sequence[Sequence[int]]) -> _Node:
    """The root."""
    root = _Node()
    for ids in sequences:
        node = root
        for token in ids[:-1]:
            node = node.after.setdefault(token, _Node())
        node.last.add(ids[-1])
    waiting = deque([root])
    while waiting:
        node = waiting.popleft()
        for token, after in node.after.items():
            after.shorter = root if node.shorter is None else _next(node.shorter, token)
            waiting.append(after)
    return root
