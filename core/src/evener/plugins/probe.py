"""Probing: which backends find their hardware here. Marks are read in this process, for they are cheap; what needs a
vendor's runtime runs in child processes, all at the same time."""

from __future__ import annotations

import contextlib
import hashlib
import importlib
import importlib.util
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from types import ModuleType

import msgspec

from evener.backend import torch_marks
from evener.contracts.probe import Marks, ProbeResult
from evener.errors import ConfigError, DescriptorError, PluginError, ProbeError
from evener.folders.cache import cache_folder, is_trusted, make_private
from evener.folders.run import RunFolder
from evener.plugins.catalog import Package
from evener.plugins.discover import core_version, modified
from evener.plugins.guard import guarded
from evener.plugins.probe_child import ProbeAnswer, decode, encode

#: Seconds between two checks of the children. Only the first start after a boot waits for them; later ones are cached.
_POLL = 0.005
_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


@dataclass(frozen=True)
class ProbeOutcome:
    """The outcome of one backend's probe.

    Attributes:
        package: the backend.
        marks: the signs of its hardware that it found; None if they could not be read.
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
        """Whether its marks say that its hardware is here."""
        return self.marks is not None and self.marks.fit


class ProbeRun:
    """Probes that are running. ``start`` returns as soon as marks are read; do other work, then call ``result``.

    The child processes end with this process, and at the latest in ``result`` or ``close``.
    """

    def __init__(self, cache: ProbeCache) -> None:
        self._cache = cache
        self._done: dict[str, ProbeOutcome] = {}
        self._running: dict[str, tuple[ProbeProcess, Marks]] = {}

    @classmethod
    def start(
        cls, backends: Iterable[Package], *, only: str | None = None, fresh: bool = False,
        timeout: float | None = None, environ: Mapping[str, str] | None = None, cache: ProbeCache | None = None,
    ) -> ProbeRun:  # fmt: skip
        """Read every backend's marks and start the probes of those that fit.

        Args:
            backends: ``Catalog.backends``.
            only: probe only this backend: it was asked for, so the others' answers do not matter.
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

    def result(self) -> dict[str, ProbeOutcome]:
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
        self._done[package.name] = ProbeOutcome(package)  # keeps the order; replaced below
        try:
            module, marks = _read_marks(package)
        except PluginError as error:
            self._done[package.name] = ProbeOutcome(package, error=error)
            return
        if not marks.fit:
            self._done[package.name] = ProbeOutcome(package, marks)
        elif hasattr(module, "result_from_marks"):
            self._done[package.name] = _result_from_marks(package, module, marks)
        elif not asked:
            self._done[package.name] = ProbeOutcome(package, marks, note="not probed: another backend was asked for")
        elif not fresh and (cached := self._cache.load(package, marks)) is not None:
            self._done[package.name] = ProbeOutcome(package, marks, cached, source="cache")
        else:
            seconds = package.descriptor.probe_timeout if limit is None else limit
            self._running[package.name] = (ProbeProcess(package, seconds), marks)

    def _finish(self, child: ProbeProcess, marks: Marks) -> ProbeOutcome:
        seconds = time.monotonic() - child.started
        outcome = child.outcome()
        if isinstance(outcome, ProbeError):
            return ProbeOutcome(child.package, marks, error=outcome, seconds=seconds)
        note = self._cache.store(child.package, marks, outcome)
        return ProbeOutcome(child.package, marks, outcome, source="child", note=note, seconds=seconds)


def _read_marks(package: Package) -> tuple[ModuleType, Marks]:
    """Import the probe module and read its marks.

    Raises:
        DescriptorError: the module cannot be imported or lacks what the probe contract asks for.
        ProbeError: ``marks()`` raised. Both carry the cause.
    """
    path = package.descriptor.probe or ""
    try:
        # Of what is imported already nothing runs.
        with contextlib.nullcontext() if path in sys.modules else guarded(f"{package}: its probe {path}"):
            module = importlib.import_module(path)
    except (Exception, SystemExit) as cause:  # a package may raise anything; the cause is kept
        raise DescriptorError(
            f"{package}: importing its probe {path} failed with {type(cause).__name__}: {cause}"
        ) from cause
    if not callable(getattr(module, "marks", None)):
        raise DescriptorError(f"{package}: its probe {path} has no function marks()")
    if hasattr(module, "probe") == hasattr(module, "result_from_marks"):
        raise DescriptorError(f"{package}: its probe {path} must have either probe() or result_from_marks(marks)")
    try:
        with guarded(f"{package}: its marks()"):
            marks = module.marks()
    except (Exception, SystemExit) as cause:
        raise ProbeError(f"{package}: its marks() raised {type(cause).__name__}: {cause}") from cause
    if not isinstance(marks, Marks):
        raise DescriptorError(f"{package}: its marks() returned {marks!r}, not Marks")
    return module, marks


def _result_from_marks(package: Package, module: ModuleType, marks: Marks) -> ProbeOutcome:
    try:
        result = module.result_from_marks(marks)
        encode(result)
    except (Exception, SystemExit) as cause:  # a package may raise anything; the cause is kept
        error = ProbeError(f"{package}: its result_from_marks() raised {type(cause).__name__}: {cause}")
        error.__cause__ = cause
        return ProbeOutcome(package, marks, error=error)
    return ProbeOutcome(package, marks, result, source="marks")


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


class ProbeCache:
    """A folder of answers.

    Args:
        folder: made when first needed.
        boot_id: what identifies this boot of this machine; None (default) reads it from the kernel.
    """

    def __init__(self, folder: Path, boot_id: str | None = None) -> None:
        self._folder = folder
        self._boot_id = read_attribute(_BOOT_ID) if boot_id is None else boot_id

    def load(self, package: Package, marks: Marks) -> ProbeResult | None:
        """The answer that still holds; None if there is none or its file cannot be read."""
        try:
            file = self._file(package, marks)
            return decode(json.loads(file.read_text(encoding="utf-8"))) if is_trusted(file) else None
        except (OSError, ValueError, TypeError):
            return None

    def store(self, package: Package, marks: Marks, result: ProbeResult) -> str:
        """Keep a usable answer. Returns why it was not kept, or an empty string."""
        if result.score == 0:
            return "not cached: the backend cannot run here"
        if not self._boot_id:
            return "not cached: this system has no boot id"
        file = self._file(package, marks)
        part = file.with_suffix(f".{os.getpid()}")
        try:
            make_private(self._folder)
            part.write_text(json.dumps(encode(result)), encoding="utf-8")
            part.replace(file)
        except OSError as error:
            return f"not cached: {error}"
        return ""

    def _file(self, package: Package, marks: Marks) -> Path:
        """The file of an answer; its name is a hash of everything that the answer depends on."""
        key = {
            "boot": self._boot_id,
            "package": [package.name, package.distribution, package.version],
            "source": _source_time(package.descriptor.probe),
            "core": core_version(),
            "torch": torch_marks.read().version,
            # The file is written anew whenever a library of the system is installed, upgraded or removed.
            "libraries": [os.environ.get("LD_LIBRARY_PATH"), *map(modified, ("/etc/ld.so.cache", *sys.path[1:]))],
            "python": [sys.executable, sys.version],
            "marks": {**asdict(marks), "cache_key": sorted(marks.cache_key.items())},
        }
        digest = hashlib.sha256(json.dumps(key, sort_keys=True, default=str).encode()).hexdigest()
        return self._folder / f"{package.name}-{digest[:32]}.json"


def read_attribute(file: Path) -> str:
    """The text of a file that the kernel makes; empty if it is not there, or hidden."""
    try:
        return file.read_text().strip()
    except OSError:
        return ""


def _source_time(module: str | None) -> int:
    """When the probe's source file was changed: an editable install changes without a new version."""
    spec = importlib.util.find_spec(module) if module else None
    return 0 if spec is None or spec.origin is None else modified(spec.origin)


class ProbeProcess:
    """A running probe in a process group and a scratch folder of its own.

    Args:
        package: a backend whose probe module has ``probe()``.
        seconds: its time limit, counted from now.
    """

    def __init__(self, package: Package, seconds: float) -> None:
        self.package = package
        self.seconds = seconds
        self.started = time.monotonic()
        self._scratch = RunFolder()
        self._result = Path(self._scratch.path, "result.json")
        self._output = Path(self._scratch.path, "output.txt")
        try:
            self._process = self._spawn()
        except BaseException:
            self._scratch.close()
            raise

    def _spawn(self) -> subprocess.Popen[bytes]:
        # The parent's whole path, so that the child finds every package that the parent found.
        path = os.pathsep.join(os.path.abspath(entry) for entry in sys.path)
        probe = self.package.descriptor.probe or ""
        with self._output.open("wb") as output:
            return subprocess.Popen(
                [sys.executable, "-m", "evener.plugins.probe_child", probe, str(self._result), str(self.seconds)],
                stdin=subprocess.PIPE, stdout=output, stderr=subprocess.STDOUT, cwd=self._scratch.path,
                env={**os.environ, "PYTHONPATH": path, "EVENER_PROBE": self._scratch.path}, start_new_session=True,
            )  # fmt: skip

    def ended(self) -> bool:
        """Whether the child ended by itself. It is not reaped, so that its process group can still be killed."""
        try:
            flags = os.WEXITED | os.WNOHANG | os.WNOWAIT
            return os.waitid(os.P_PID, self._process.pid, flags) is not None
        except ChildProcessError:  # the host program ignores SIGCHLD: the kernel reaped it
            return True

    def overdue(self) -> bool:
        """Whether it ran longer than its time limit."""
        return time.monotonic() - self.started > self.seconds

    def outcome(self) -> ProbeResult | ProbeError:
        """The probe's result or error; call once, when it ended or is overdue. Ends every process that it started."""
        hung = not self.ended()
        try:
            self._kill()
            if self._process.returncode == -signal.SIGALRM or hung:
                limit = "probe_timeout of its descriptor, or EVENER_PROBE_TIMEOUT"
                return self._error(f"did not answer within {self.seconds:g} seconds ({limit})")
            if not self._result.exists():
                return self._error(f"ended without an answer ({_exit_text(self._process.returncode)})")
            answer = msgspec.convert(json.loads(self._result.read_text()), ProbeAnswer)
            return self._error(f"raised {answer.error}", answer.traceback) if answer.error else decode(answer.result)
        finally:
            self._scratch.close()

    def close(self) -> None:
        """End it and every process that it started, in whatever state it is."""
        self._kill()
        self._scratch.close()

    def _kill(self) -> None:
        with contextlib.suppress(ProcessLookupError):  # already reaped, and nothing of its group is left
            os.killpg(self._process.pid, signal.SIGKILL)
        if self._process.stdin is not None:
            self._process.stdin.close()
        self._process.wait()
        _kill_started_in(self._scratch.path)  # also those that left its process group, as daemons do

    def _error(self, what: str, detail: str = "") -> ProbeError:
        """An error whose cause holds ``detail`` and the end of what the child printed."""
        error = ProbeError(f"{self.package}: its probe {what}")
        printed = self._output.read_text(errors="replace")[-2000:].strip()
        detail = "\n".join(part for part in (detail.strip(), printed and f"it printed:\n{printed}") if part)
        if detail:
            error.__cause__ = RuntimeError(detail)
        return error


def _exit_text(code: int) -> str:
    names = {each.value: each.name for each in signal.Signals}
    return f"exit code {code}" if code >= 0 else f"killed by {names.get(-code, f'signal {-code}')}"


def _kill_started_in(scratch: str) -> None:
    """Kill every process that inherited ``EVENER_PROBE`` from the probe with this scratch folder."""
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):  # it has just ended, or is another user's
            if f"EVENER_PROBE={scratch}".encode() in (folder / "environ").read_bytes():
                os.kill(int(folder.name), signal.SIGKILL)
