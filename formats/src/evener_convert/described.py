"""The view of a folder that has a quantized model's ``config.json`` and no weights: the tensors that its scheme would
store, without their numbers. ``load=dummy`` and ``evener explain`` see the formats of the real checkpoint."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from evener.contracts.checkpoint import Headers
from evener.contracts.conversion.views import CheckpointView, ViewRequest
from evener.contracts.declared import Weight
from evener.layers.builder import Builder
from evener.loading.scheme import pick_scheme
from evener_convert.matrices import kinds_of, stored_names
from evener_formats.described import described

_WEIGHTS = ("*.safetensors*", "*.bin*", "*.gguf")
#: What no tool quantizes: products in float32, and matrices that are also used in other ways.
_PLAIN = ("router", "shared")


class DescribedCheckpoint(CheckpointView):
    """Headers of the model's tensors; reading one is an error that says that there are no weights."""

    changes = "files"
    _described: Headers

    @classmethod
    def of(cls, request: ViewRequest) -> DescribedCheckpoint | None:
        """The view of a folder without weights, whose config says that they are quantized.

        Raises:
            CheckpointError: in a way of which the tensors are not known.
        """
        checkpoint, settings = request.checkpoint, request.checkpoint.config.get("quantization_config")
        if not checkpoint.path.is_dir() or not isinstance(settings, Mapping):
            return None
        if any(checkpoint.names(pattern) for pattern in _WEIGHTS):
            return None
        scheme = pick_scheme(checkpoint.config, request.schemes, "auto", None)
        build = Builder("bfloat16", request.length)
        vocabulary = request.architecture(checkpoint.config, build).vocab_size
        found: dict[str, tuple[str, tuple[int, ...]]] = {}
        for item, part, kind in kinds_of(build.weights, vocabulary):
            sizes = part.rows, part.columns
            for name in stored_names(item, part):
                if kind in _PLAIN:
                    found[name] = ("bfloat16", sizes)
                    continue
                stack = item.experts if "{}" not in part.name else 0
                found.update(described(scheme, settings, name, *sizes, experts=stack, head=kind == "head"))
        for weight in build.weights:
            if isinstance(weight, Weight):
                shapes = zip(weight.sources, _shapes(weight, found), strict=True)
                found.update((name, (weight.dtype, shape)) for name, shape in shapes if name not in found)
        view = cls(checkpoint)
        view._described, view.copied = found, frozenset(found)  # nothing of it is in a file
        return view

    @property
    def headers(self) -> Headers:
        return self._described


def _shapes(weight: Weight, matrices: Headers) -> Sequence[tuple[int, ...]]:
    """The shapes of a weight's tensors; those of a merged bias have the rows of the matrices beside them."""
    if weight.shapes or len(weight.sources) < 2:
        return weight.shapes or [weight.shape]
    found = [_rows(name.removesuffix("bias"), matrices) for name in weight.sources]
    known = all(found) and sum(map(int, found)) == weight.shape[0]
    each = weight.shape[0] // len(weight.sources)
    return [(rows if known else each, *weight.shape[1:]) for rows in found]


def _rows(stem: str, matrices: Headers) -> int:
    """Rows of a matrix, by the names that its tensors begin with."""
    for end, axis in (("weight", 0), ("weight_packed", 0), ("scales", 1)):
        if f"{stem}{end}" in matrices:
            return matrices[f"{stem}{end}"][1][axis]
    return 0
