"""The view contract: a model is read from another checkpoint than the one that is stored.

A view is a checkpoint over another one. It may find tensors in other files, give them other names, or make other
tensors of them, such as quantized ones. What reads weights sees no difference. Announce the class::

    Descriptor(name="my-package", checkpoint_views={"my_view": "my_package.views:MyView"}, …)

When a model is loaded or converted, core asks each installed view once, with ``of``. ``load=dummy`` asks only about
models whose config has a ``quantization_config``, and reads no tensor.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from evener.contracts.checkpoint import Checkpoint, Extent, Headers

if TYPE_CHECKING:
    import torch

    from evener.contracts.architecture import Architecture
    from evener.contracts.declared import Declared
    from evener.contracts.quant import QuantScheme


@dataclass(frozen=True)
class ViewRequest:
    """What a view is asked. The defaults are those of a run on one rank, without options.

    Attributes:
        checkpoint: as it is stored, or the view that answered before.
        architecture: the model's class.
        schemes: the quantization schemes of installed packages.
        length: tokens of the longest sequence.
        quant, weight_map: the configuration keys of these names.
        options: of packages, as far as they are set: ``{package: {option: value}}``, checked.
        tp: (index, count) of this rank among those that share a layer.
        stage: (index, count) of its pipeline stage.
        partition: number of layers of each stage; empty: equal numbers.
        ep_size: groups among which the experts of a layer are divided.
    """

    checkpoint: Checkpoint
    architecture: type[Architecture]
    schemes: Sequence[QuantScheme] = ()
    length: int = 1
    quant: str = "auto"
    weight_map: str | None = None
    options: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    tp: tuple[int, int] = (0, 1)
    stage: tuple[int, int] = (0, 1)
    partition: Sequence[int] = ()
    ep_size: int = 1


class CheckpointView(Checkpoint):
    """A checkpoint over ``inner``. What a view does not override is ``inner``'s.

    Attributes:
        changes: what it changes: the "files" that tensors are found in, their "names", or their "numbers". Views are
            asked in this order, and those of one kind in the order of their packages' names.
        keys: configuration keys that it carries out, of "quant" and "weight_map". Without one for "quant" that key
            names the scheme that reads the checkpoint.
        inner: the checkpoint below.
    """

    changes: ClassVar[Literal["files", "names", "numbers"]]
    keys: ClassVar[frozenset[str]] = frozenset()

    def __init__(self, inner: Checkpoint) -> None:
        self.inner, self.path = inner, inner.path

    @classmethod
    @abstractmethod
    def of(cls, request: ViewRequest) -> CheckpointView | None:
        """The view of ``request.checkpoint``; None if there is nothing to do. It should not read tensors yet.

        Raises:
            CheckpointError: a file is broken.
            ConfigError: a key or an option has a wrong value, or asks for what the view cannot do.
        """

    @classmethod
    def partition(cls, checkpoint: Checkpoint) -> Sequence[int] | None:
        """(optional) How the files of ``checkpoint``, as it is stored, divide the layers among pipeline stages: their
        number of layers, or none for equal numbers. Default: None, they can be read with any division.
        """
        return None

    def reslice(self, weights: Sequence[Declared]) -> None:
        """(optional) Change the ``slices`` of this rank's declared ``weights``, if this view has only spans of the
        tensors that they slice. Called once, before tensors are matched or read. Default: ``inner``'s."""
        if isinstance(self.inner, CheckpointView):
            self.inner.reslice(weights)

    @property
    def headers(self) -> Headers:
        return self.inner.headers

    @cached_property
    def copied(self) -> frozenset[str]:  # type: ignore[override]  # known once the files are read
        return self.inner.copied

    @cached_property
    def config(self) -> Mapping[str, Any]:
        return self.inner.config

    def tensor(self, name: str) -> torch.Tensor:
        return self.inner.tensor(name)

    def extent(self, name: str) -> Extent | None:
        return self.inner.extent(name)

    def text(self, name: str) -> str | None:
        return self.inner.text(name)

    def json(self, name: str) -> dict[str, Any]:
        return self.inner.json(name)

    def names(self, pattern: str) -> Sequence[str]:
        return self.inner.names(pattern)

    def where(self, name: str) -> str:
        return self.inner.where(name)

    def close(self) -> None:
        self.inner.close()
