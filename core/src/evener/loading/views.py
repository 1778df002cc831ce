"""Asking installed packages how a checkpoint is read, if not as it is stored. Torch-free."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import replace

from evener.contracts.checkpoint import Checkpoint
from evener.contracts.conversion.views import CheckpointView, ViewRequest
from evener.contracts.quant import QuantScheme
from evener.errors import ConfigError
from evener.loading.scheme import pick_scheme

_ORDER = ("files", "names", "numbers")


def view_checkpoint(request: ViewRequest) -> tuple[Checkpoint, QuantScheme]:
    """What is read, and the scheme that reads it.

    Args:
        request: with the checkpoint as it is stored.

    Raises:
        ConfigError: the checkpoint or a key needs a view that is not installed.
        UnknownNameError: no installed package has the scheme ``quant``.
        CheckpointError: no scheme fits the checkpoint, or ``quant`` does not.
        EvenerError: what a view raises.
    """
    from evener.plugins.discover import installed_catalog

    announced = installed_catalog().lazy_imports("checkpoint view")
    _check_files(request.checkpoint, announced)
    classes: list[type[CheckpointView]] = [each.load() for each in announced.values()]
    carried: set[str] = set()
    for cls in sorted(classes, key=lambda cls: _ORDER.index(cls.changes)):
        view = cls.of(request)
        if view is not None:
            request, carried = replace(request, checkpoint=view), carried | cls.keys
    if request.weight_map is not None and "weight_map" not in carried:
        raise _missing_view(f"weight_map={request.weight_map}")
    quant = "auto" if "quant" in carried else request.quant
    return request.checkpoint, pick_scheme(request.checkpoint.config, request.schemes, quant, request.checkpoint)


def stored_partition(checkpoint: Checkpoint) -> Sequence[int] | None:
    """``CheckpointView.partition`` of the first installed view that knows it."""
    from evener.plugins.discover import installed_catalog

    announced = installed_catalog().lazy_imports("checkpoint view").values()
    answers: Iterator[Sequence[int] | None] = (each.load().partition(checkpoint) for each in announced)
    return next((found for found in answers if found is not None), None)


def _check_files(checkpoint: Checkpoint, announced: Collection[str]) -> None:
    """Without the view that reads them, these files would be ignored, or the tensors be reported as missing."""
    files = {"split": "evener_split.json", "weight_map": f"{checkpoint.config.get('model_type')}_weight_map.json"}
    for view, file in files.items():
        if view not in announced and checkpoint.text(file) is not None:
            raise _missing_view(checkpoint.where(file))


def _missing_view(what: str) -> ConfigError:
    return ConfigError(f"{what} needs a package that is not installed; type: pip install evener-formats")
