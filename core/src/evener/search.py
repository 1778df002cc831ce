"""The search for a backend: probes run in child processes while this one goes on importing. Torch-free."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from evener.builtin import BUILTINS
from evener.plugins.choose import choose, requested_backend
from evener.plugins.discover import discover
from evener.plugins.load import Loaded, load
from evener.plugins.probe import ProbeRun
from evener.plugins.target import prepare_torch_import


class Search:
    """Started early, finished with ``load``.

    Args:
        backend: ``--backend``, or None for the best that fits.
    """

    def __init__(self, backend: str | None) -> None:
        # The caller goes on to import torch while the probes run, before ``load`` could see to this.
        prepare_torch_import()
        self._backend = backend
        self._catalog = discover(builtins=BUILTINS)
        self._probes = ProbeRun.start(self._catalog.backends, only=requested_backend(backend)[0])

    def load(self, options: Mapping[str, Mapping[str, Any]]) -> Loaded:
        """Wait for the probes, choose, and import what was chosen.

        Raises:
            PluginError: nothing can run here, or what was asked for is broken.
        """
        return load(choose(self._catalog, self._backend, probes=self._probes), options)
