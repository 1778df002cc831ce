"""The quantizer contract: quantize the matrices of an unquantized checkpoint while they are read.

Announce a class in ``Descriptor.quantizers`` under the name that users type as ``quant=<name>``. What it makes is read
by a scheme (``QuantScheme``), as if the checkpoint had stored it: so it is packed, cut for ranks and computed with like
a checkpoint of that scheme.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    import torch

    from evener.contracts.checkpoint import Headers


@dataclass(frozen=True)
class Matrix:
    """A stored tensor that a model multiplies with.

    Attributes:
        name: in the checkpoint.
        shape: (rows, columns), or (experts, rows, columns).
        kind: "linear"; "expert"; "head": logits over the vocabulary; "router": scores of experts, or a single row;
            "shared": the model also uses it in other ways than as a matrix of a product.
    """

    name: str
    shape: tuple[int, ...]
    kind: Literal["linear", "expert", "head", "router", "shared"] = "linear"


class Quantizer(ABC):
    """Quantizes one matrix after another.

    Args:
        name: the name that it was chosen by.
        options: the options of its package, checked.
        matrices: all matrices of the model.

    Attributes:
        settings: ``quantization_config`` of the result's ``config.json``; a scheme must detect it.

    Raises:
        ConfigError: an option has a wrong value, or asks for a format that a matrix cannot have.
    """

    settings: Mapping[str, Any]

    @abstractmethod
    def __init__(self, name: str, options: Mapping[str, Any], matrices: Sequence[Matrix]) -> None: ...

    @abstractmethod
    def stored(self, matrix: Matrix) -> Headers:
        """The tensors that are stored in place of ``matrix``: ``{name: (dtype, shape)}``, as the scheme reads them. For
        a stack of experts, each tensor has one more axis, the first. Empty: the matrix stays as it is."""

    @abstractmethod
    def quantize(self, matrix: Matrix, values: torch.Tensor) -> Mapping[str, torch.Tensor]:
        """The tensors that ``stored`` describes, on the device of ``values``. ``values``: of shape ``matrix.shape``, in
        a float dtype, all finite; it must not be written into."""
