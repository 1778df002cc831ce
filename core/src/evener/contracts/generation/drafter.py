"""The drafter contract: propose the next tokens of a text, which the model then checks in one step.

Announce a class in ``Descriptor.drafters``; ``infer.drafter`` chooses it by name. There is one object for each running
request, constructed without arguments. It is called between two steps, so it must be quick: far less than a step takes.
A wrong proposal costs time and changes no answer. Torch-free.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import ClassVar

#: What a drafter ``by_worker`` proposes in place of an id.
BY_WORKER = -1


class Drafter(ABC):
    """Knows the tokens of one text.

    Attributes:
        by_worker: (optional) whether the worker finds the ids (a model or head of ``infer.draft_model``, or the model's
            own layer for multi-token prediction): then each proposed id is ``BY_WORKER``, and only their number counts.
    """

    by_worker: ClassVar[bool] = False

    @abstractmethod
    def extend(self, tokens: Sequence[int]) -> None:
        """The text goes on with these ids: at first all of the prompt, then what was generated."""

    @abstractmethod
    def propose(self, count: int) -> Sequence[int]:
        """At most ``count`` ids that may come next, in order; none where nothing is likely."""
