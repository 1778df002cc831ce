"""The disk is busy from the first moment on: the weights are read while modules are imported and a device is opened."""

from __future__ import annotations

from pathlib import Path

from evener.config import Config


def read_weights_ahead(config: Config) -> None:
    """Begin to read the weights of a run into the system's cache of files, as soon as it is sure that it will start."""
    if config.load != "dummy" and config.model_cache is None:
        from evener_formats.read_ahead import begin_reading

        begin_reading(Path(config.model).expanduser())
