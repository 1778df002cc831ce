"""A controller over ranks that are threads of this process: several ranks in one test, under one debugger."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from evener.backend_search import BackendSearch
from evener.config.schema import Config
from evener.config.stages import config_of_stage
from evener.engine.controller.controller import Controller
from evener.engine.processes.start import set_up_controller
from evener_inspection.rank_threads import RankThreads


@contextmanager
def rank_threads(config: Config) -> Iterator[tuple[Controller, RankThreads]]:
    """A context manager: a controller over ranks as threads, which end with the ``with`` block.

    Raises:
        EvenerError: as ``build_controller``.
    """
    executor = RankThreads(config, BackendSearch(config_of_stage(config, 0).backend), timeout=60.0)
    try:
        yield set_up_controller(config, executor, executor.facts), executor
    finally:
        executor.close()
