"""The search for a backend: probes run in child processes while this process imports other modules. Torch-free."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from evener.builtin import BUILTINS
from evener.plugins.catalog import prepare_torch_import
from evener.plugins.choose import choose, requested_backend
from evener.plugins.discover import installed_catalog
from evener.plugins.load import LoadedPackages, load
from evener.plugins.probe import ProbeRun


class BackendSearch:
    """Starts the probes when it is made; ``load`` waits for them.

    Args:
        backend: the value of ``--backend``, or None for the best one that fits this machine.
    """

    def __init__(self, backend: str | None) -> None:
        # Here and not in ``load``, because the caller imports torch while the probes run.
        prepare_torch_import()
        self._backend = backend
        self._catalog = installed_catalog(builtins=BUILTINS)
        self._probes = ProbeRun.start(self._catalog.backends, only=requested_backend(backend)[0])

    def load(self, options: Mapping[str, Mapping[str, Any]]) -> LoadedPackages:
        """Wait for the probes, choose, and import the chosen packages.

        Raises:
            PluginError: no backend can run here, or the requested one is broken.
        """
        return load(choose(self._catalog, self._backend, probes=self._probes), options)
