"""An unquantized checkpoint whose matrices are quantized while they are read: ``quant=q4_k`` and its like."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Any

from evener.contracts.checkpoint import Checkpoint, Extent, Headers
from evener.contracts.conversion.quantizer import Quantizer
from evener.contracts.conversion.views import CheckpointView, ViewRequest
from evener.errors import CheckpointError, ConfigError, UnknownNameError
from evener.loading.scheme import Unquantized
from evener.plugins.load import options_by_package
from evener_convert.matrices import ModelMatrices, model_matrices

if TYPE_CHECKING:
    import torch

#: Matrices whose results are kept: one weight may be made of several stacks, which are read in turns.
_KEPT = 3


class QuantizedCheckpoint(CheckpointView):
    """``inner`` with quantized matrices. A matrix is quantized when a tensor of it is asked for, and not kept longer
    than until the next ones; so memory holds one layer's at a time.

    Raises:
        CheckpointError: a head that is quantized is tied to an embedding, and the two differ.
    """

    changes, keys = "numbers", frozenset({"quant"})

    def __init__(self, inner: Checkpoint, quantizer: Quantizer, matrices: ModelMatrices) -> None:
        super().__init__(inner)
        self._quantizer, self._matrices = quantizer, matrices
        stored = {name: quantizer.stored(matrix) for name, matrix in matrices.found.items()}
        self._stored = {name: tensors for name, tensors in stored.items() if tensors}
        self._source = {each: name for name, tensors in self._stored.items() for each in tensors}
        hidden = {name for name, twin in matrices.ties.items() if name in inner.headers and twin in self._stored}
        for name in hidden:
            _check_equal(inner, name, matrices.ties[name])
        kept = {name: each for name, each in inner.headers.items() if name not in self._stored.keys() | hidden}
        made = {name: each for tensors in self._stored.values() for name, each in tensors.items()}
        self._headers: Headers = {**kept, **made}
        self.copied = (inner.copied & kept.keys()) | made.keys()
        self._made: OrderedDict[str, Mapping[str, torch.Tensor]] = OrderedDict()

    @classmethod
    def of(cls, request: ViewRequest) -> QuantizedCheckpoint | None:
        """The quantized checkpoint, if ``quant`` names an installed quantizer and the stored one is not quantized.

        Raises:
            UnknownNameError: no installed package has the scheme or quantizer ``quant``.
            ConfigError: the checkpoint is quantized already, or the quantizer cannot be used with this model.
        """
        from evener.plugins.discover import installed_catalog

        quant, checkpoint = request.quant, request.checkpoint
        if quant in ("auto", "none"):
            return None
        quantizers = installed_catalog().lazy_imports("quantizer")
        if quant not in quantizers or not Unquantized().detect(checkpoint.config):
            _check_name(request, quantizers)
            return None
        matrices = model_matrices(request.architecture, checkpoint.config, checkpoint.headers, request.length)
        package = next(each for each in installed_catalog().packages if quant in each.descriptor.quantizers)
        given = {package.name: request.options.get(package.name, {})}
        options = options_by_package([package], given)[package.key]
        quantizer: Quantizer = quantizers[quant].load()(quant, options, list(matrices.found.values()))
        return cls(checkpoint, quantizer, matrices)

    @property
    def headers(self) -> Headers:
        return self._headers

    @cached_property
    def config(self) -> Mapping[str, Any]:
        return {**self.inner.config, "quantization_config": dict(self._quantizer.settings)}

    @property
    def kept(self) -> Sequence[str]:
        """Matrices that stay as they are stored."""
        return [name for name in self._matrices.found if name not in self._stored]

    def tensor(self, name: str) -> torch.Tensor:
        source = self._source.get(name)
        if source is None:
            return self.inner.tensor(name)
        if source not in self._made:
            while len(self._made) >= _KEPT or (self._made and len(self._matrices.found[source].shape) == 2):
                self._made.popitem(last=False)
            self._made[source] = self._quantize(source)
        return self._made[source][name]

    def _quantize(self, name: str) -> Mapping[str, torch.Tensor]:
        import torch

        values = self.inner.tensor(name)
        if not all(map(torch.isfinite, torch.aminmax(values))):
            raise CheckpointError(
                f"in {self.path}, NaN or infinite somewhere: {name}; fetch or convert the model again"
            )
        values = values.mT if name in self._matrices.transposed else values
        return self._quantizer.quantize(self._matrices.found[name], values)

    def extent(self, name: str) -> Extent | None:
        return None if name in self._source else self.inner.extent(name)

    def close(self) -> None:
        self._made.clear()
        self.inner.close()


def _check_name(request: ViewRequest, quantizers: Iterable[str]) -> None:
    quant = request.quant
    known = {"auto", "none", *(scheme.name for scheme in request.schemes)}
    if quant not in {*known, *quantizers}:
        raise UnknownNameError("quantization scheme", quant, {*known, *quantizers}, "Or leave quant=auto.")
    if quant not in known:
        raise ConfigError(
            f"quant={quant} quantizes an unquantized checkpoint while it is loaded, and {request.checkpoint.path} is "
            "quantized already; leave quant=auto, or give the unquantized model"
        )


def _check_equal(checkpoint: Checkpoint, name: str, twin: str) -> None:
    import torch

    if not torch.equal(checkpoint.tensor(name), checkpoint.tensor(twin)):
        raise CheckpointError(
            f"{checkpoint.path} stores both {name} and {twin}, and they differ, but its config.json says that they are "
            'one; set "tie_word_embeddings": false in it'
        )
