"""Where log lines go: standard error and a file, as text or as JSON. Torch-free.

All processes of a run append to one file. A line is one write, so lines never mix; a file that was moved away (by
logrotate) is created again. If it can no longer be written, as on a full disk, the run goes on, and one line on
standard error says so. ``request_id`` is set while a request is handled, and every log line then has it.
"""

from __future__ import annotations

import logging
import sys
from contextvars import ContextVar
from logging.handlers import WatchedFileHandler
from typing import TYPE_CHECKING, Any

import msgspec

from evener.errors import ConfigError

if TYPE_CHECKING:
    from evener.config.schema import LogConfig

_TEXT = "%(asctime)s %(levelname)s %(name)s: %(message)s"
#: The request that the current task handles; None outside of requests.
request_id: ContextVar[str | None] = ContextVar("evener_request_id", default=None)


def set_up_logging(config: LogConfig, default_level: int = logging.WARNING) -> None:
    """Set up this process's log as ``config`` says; handlers from an earlier call are removed. If the program has set
    up handlers itself, nothing changes.

    Args:
        default_level: the minimum level on standard error if ``config`` does not set one.

    Raises:
        ConfigError: the file cannot be written.
    """
    root = logging.getLogger()
    ours = [handler for handler in root.handlers if isinstance(handler, (_StderrHandler, _AppendHandler))]
    if len(ours) < len(root.handlers):
        return
    configured = None if config.level == "auto" else logging.getLevelName(config.level.upper())
    formatter = _JsonFormatter() if config.format == "json" else _TextFormatter(_TEXT)
    handlers: list[logging.Handler] = [_StderrHandler(sys.stderr)]
    handlers[0].setLevel(default_level if configured is None else configured)
    if config.file is not None:
        try:
            handlers.append(_AppendHandler(config.file))
        except OSError as error:
            raise ConfigError(f"log.file={config.file} cannot be written: {error.strerror}; set another one") from error
        handlers[-1].setLevel(logging.INFO if configured is None else configured)
    for old in ours:
        root.removeHandler(old)
        old.close()
    for handler in handlers:
        handler.setFormatter(formatter)
        root.addHandler(handler)
    root.setLevel(min(handler.level for handler in handlers))


def stderr_level() -> int:
    """This process's minimum log level on standard error; its child processes use the same."""
    found = (handler.level for handler in logging.getLogger().handlers if isinstance(handler, _StderrHandler))
    return next(found, logging.getLogger("evener").getEffectiveLevel())


class _StderrHandler(logging.StreamHandler):  # type: ignore[type-arg]  # Python 3.10 cannot subscript it
    pass


class _AppendHandler(WatchedFileHandler):
    """One ``write`` call per line: so the kernel never mixes lines of several processes."""

    stream: Any
    #: The last line could not be written.
    _failed = False

    def _open(self) -> Any:
        return open(self.baseFilename, "ab", buffering=0)

    def emit(self, record: logging.LogRecord) -> None:
        try:
            if self.stream is None:  # An earlier line could not open the file again.
                self.stream = self._open()
            self.reopenIfNeeded()
            self.stream.write(self.format(record).encode("utf-8", "backslashreplace") + b"\n")
            self._failed = False
        except OSError as error:
            first, self._failed = not self._failed, True
            if first:  # This line goes through the log too; here it fails like the others, without another line.
                text = "log.file=%s cannot be written: %s; its lines are lost until it can be; free space for it"
                logging.getLogger(__name__).error(text, self.baseFilename, error.strerror)
        except Exception:
            self.handleError(record)


class _TextFormatter(logging.Formatter):
    def formatMessage(self, record: logging.LogRecord) -> str:  # logging's name
        line, of = super().formatMessage(record), request_id.get()
        return line if of is None or f"request_id={of}" in line else f"{line} request_id={of}"


class _JsonFormatter(logging.Formatter):
    """One JSON object per line; a record's ``fields`` are added to it."""

    def format(self, record: logging.LogRecord) -> str:
        line = {
            "time": self.formatTime(record, f"%Y-%m-%dT%H:%M:%S.{int(record.msecs):03d}%z"),
            "level": record.levelname.lower(), "logger": record.name, "process": record.process,
            "message": record.getMessage(), "request_id": request_id.get(), **getattr(record, "fields", {}),
            "exception": self.formatException(record.exc_info) if record.exc_info else None,
        }  # fmt: skip
        return msgspec.json.encode({k: value for k, value in line.items() if value is not None}, enc_hook=str).decode()
