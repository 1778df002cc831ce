"""Probing: whose hardware is here. Cheap marks in this process; whatever needs a runtime in children, all at once."""

from __future__ import annotations

import importlib
import os
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from types import ModuleType

from evener.cache_folder import cache_folder
from evener.contracts.probe import Marks, ProbeResult
from evener.errors import ConfigError, DescriptorError, PluginError, ProbeError
from evener.plugins import probe_wire
from evener.plugins.catalog import Package
from evener.plugins.guard import torch_free
from evener.plugins.probe_cache import ProbeCache
from evener.plugins.probe_process import ProbeProcess

#: Seconds between two looks at the children. Only the very first start on a boot waits for them.
_POLL = 0.005


@dataclass(frozen=True)
class Probed:
    """What became of one backend's probe.

    Attributes:
        package: the backend.
        marks: what it saw at a glance; None if its marks could not be read.
        result: its answer; None if its marks do not fit, it failed, or it was not asked.
        error: why its marks could not be read or its probe failed, with the cause.
        source: where ``result`` comes from: ``marks``, ``child``, ``cache``, or ``""``.
        note: something worth showing, such as why an answer was not cached.
        seconds: how long the child ran.
    """

    package: Package
    marks: Marks | None = None
    result: ProbeResult | None = None
    error: PluginError | None = None
    source: str = ""
    note: str = ""
    seconds: float = 0.0

    @property
    def hardware_seen(self) -> bool:
        """Its marks fit this machine."""
        return self.marks is not None and self.marks.fit


class ProbeRun:
    """Probes under way. ``start`` returns as soon as marks are read; do other work, then ask for ``result``.

    Children end with this process, and at the latest in ``result`` or ``close``.
    """

    def __init__(self, cache: ProbeCache) -> None:
        self._cache = cache
        self._done: dict[str, Probed] = {}
        self._running: dict[str, tuple[ProbeProcess, Marks]] = {}

    @classmethod
    def start(
        cls,
        backends: Iterable[Package],
        *,
        only: str | None = None,
        fresh: bool = False,
        timeout: float | None = None,
        environ: Mapping[str, str] | None = None,
        cache: ProbeCache | None = None,
    ) -> ProbeRun:
        """Read every backend's marks and start the probes of those that fit.

        Args:
            backends: ``Catalog.backends``.
            only: start no other backend's probe than this one's: it was named, so the others' answers do not matter.
            fresh: ignore earlier answers.
            timeout: seconds a probe may take; default ``EVENER_PROBE_TIMEOUT``, else ``Descriptor.probe_timeout``.
            environ: where ``EVENER_PROBE_TIMEOUT`` and ``XDG_CACHE_HOME`` are read; default ``os.environ``.
            cache: earlier answers; default those of this user.

        Raises:
            ConfigError: ``EVENER_PROBE_TIMEOUT`` is no number above 0.
        """
        environ = os.environ if environ is None else environ
        limit = _limit(environ) if timeout is None else timeout
        run = cls(ProbeCache(cache_folder("probes", environ)) if cache is None else cache)
        try:
            for package in backends:
                run._begin(package, asked=only is None or only == package.name, fresh=fresh, limit=limit)
        except BaseException:
            run.close()
            raise
        return run

    def result(self) -> dict[str, Probed]:
        """Wait for every probe, at most until its time limit; by backend name, in the order given to ``start``."""
        try:
            while self._running:
                ready = [name for name, (child, _) in self._running.items() if child.ended() or child.overdue()]
                for name in ready:
                    child, marks = self._running.pop(name)
                    self._done[name] = self._finish(child, marks)
                if self._running and not ready:
                    time.sleep(_POLL)
        finally:
            self.close()
        return dict(self._done)

    def close(self) -> None:
        """End the probes that are still running, with every process that they started."""
        for child, _ in self._running.values():
            child.close()
        self._running.clear()

    def _begin(self, package: Package, *, asked: bool, fresh: bool, limit: float | None) -> None:
        self._done[package.name] = Probed(package)  # keeps the order; replaced below
        try:
            module, marks = _read_marks(package)
        except PluginError as error:
            self._done[package.name] = Probed(package, error=error)
            return
        if not marks.fit:
            self._done[package.name] = Probed(package, marks)
        elif hasattr(module, "result_from_marks"):
            self._done[package.name] = _judge_marks(package, module, marks)
        elif not asked:
            self._done[package.name] = Probed(package, marks, note="not asked: another backend was named")
        elif not fresh and (cached := self._cache.load(package, marks)) is not None:
            self._done[package.name] = Probed(package, marks, cached, source="cache")
        else:
            seconds = package.descriptor.probe_timeout if limit is None else limit
            self._running[package.name] = (ProbeProcess(package, seconds), marks)

    def _finish(self, child: ProbeProcess, marks: Marks) -> Probed:
        seconds = time.monotonic() - child.started
        outcome = child.outcome()
        if isinstance(outcome, ProbeError):
            return Probed(child.package, marks, error=outcome, seconds=seconds)
        note = self._cache.store(child.package, marks, outcome)
        return Probed(child.package, marks, outcome, source="child", note=note, seconds=seconds)


def _read_marks(package: Package) -> tuple[ModuleType, Marks]:
    """Import the probe module and look at its marks.

    Raises:
        DescriptorError: the module cannot be imported or lacks what the probe contract asks for.
        ProbeError: ``marks()`` raised. Both carry the cause.
    """
    path = package.descriptor.probe or ""
    try:
        with torch_free():
            module = importlib.import_module(path)
    except (Exception, SystemExit) as cause:  # a stranger's module; the cause is kept
        raise DescriptorError(
            f"{package}: importing its probe {path} failed with {type(cause).__name__}: {cause}"
        ) from cause
    if not callable(getattr(module, "marks", None)):
        raise DescriptorError(f"{package}: its probe {path} has no function marks()")
    if hasattr(module, "probe") == hasattr(module, "result_from_marks"):
        raise DescriptorError(f"{package}: its probe {path} must have either probe() or result_from_marks(marks)")
    try:
        with torch_free():
            marks = module.marks()
    except (Exception, SystemExit) as cause:
        raise ProbeError(f"{package}: its marks() raised {type(cause).__name__}: {cause}") from cause
    if not isinstance(marks, Marks):
        raise DescriptorError(f"{package}: its marks() returned {marks!r}, not Marks")
    return module, marks


def _judge_marks(package: Package, module: ModuleType, marks: Marks) -> Probed:
    try:
        result = module.result_from_marks(marks)
        probe_wire.encode(result)
    except (Exception, SystemExit) as cause:  # a stranger's function; the cause is kept
        error = ProbeError(f"{package}: its result_from_marks() raised {type(cause).__name__}: {cause}")
        error.__cause__ = cause
        return Probed(package, marks, error=error)
    return Probed(package, marks, result, source="marks")


def _limit(environ: Mapping[str, str]) -> float | None:
    text = environ.get("EVENER_PROBE_TIMEOUT", "")
    if not text:
        return None
    try:
        seconds = float(text)
    except ValueError:
        seconds = 0.0
    if not 0 < seconds < float("inf"):
        raise ConfigError(f"EVENER_PROBE_TIMEOUT={text!r}: it takes a number of seconds above 0")
    return seconds
