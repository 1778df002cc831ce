"""The builder to which an architecture declares its weights, ops and state."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from evener.contracts.communicator import Communicator


class ModelBuilder(Protocol):
    """What an architecture gets to declare itself to. It is a ``Builder`` (see ``evener.layers``), which layers take;
    the members here are what a model reads of its run.

    Attributes:
        dtype: compute dtype of weights and activations.
        max_positions: tokens of the longest sequence that will be run.
        communicator: of this rank's tensor parallel group; None for one rank.
        predicts: whether the run wants the layer of ``Architecture.predict``.
    """

    dtype: str
    max_positions: int
    communicator: Communicator | None
    predicts: bool

    @property
    def first_stage(self) -> bool:
        """Whether this rank's pipeline stage embeds the tokens."""

    @property
    def last_stage(self) -> bool:
        """Whether this rank's pipeline stage computes the logits."""

    def layers(self, count: int) -> Sequence[int]:
        """The numbers of this stage's layers, ascending, out of ``count``. Not always consecutive: a run may have
        only some of the layers (``infer.layers``)."""
