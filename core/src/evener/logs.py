"""Where log lines go: standard error and a file, as text or as JSON. Torch-free.

Processes of one run append to one file: a line is one write, so lines never mix, and a file that was moved away (by
logrotate) is made anew. ``request_id`` is put around whatever is done for one request, and every line from there
carries it.
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

#: The request that the current task works for; None outside of one.
request_id: ContextVar[str | None] = ContextVar("evener_request_id", default=None)


def set_up_logging(config: LogConfig, quiet: int = logging.WARNING) -> None:
    """Send this process's log where ``config`` says; what an earlier call set up is taken down. A program
    that has handlers of its own keeps them, and gets no others.

    Args:
        quiet: the least level on standard error where ``config`` does not say.

    Raises:
        ConfigError: the file cannot be written.
    """
    root = logging.getLogger()
    ours: list[logging.Handler] = [handler for handler in root.handlers if isinstance(handler, (_Stderr, _Appender))]
    if len(ours) < len(root.handlers):
        return
    asked = None if config.level == "auto" else logging.getLevelName(config.level.upper())
    formatter = _Json() if config.format == "json" else _Text()
    errors = _Stderr(sys.stderr)
    errors.setLevel(quiet if asked is None else asked)
    handlers: list[logging.Handler] = [errors]
    if config.file is not None:
        handlers.append(file_handler(config.file, logging.INFO if asked is None else asked))
    for handler in ours:
        root.removeHandler(handler)
        handler.close()
    for handler in handlers:
        handler.setFormatter(formatter)
        root.addHandler(handler)
    root.setLevel(min(handler.level for handler in handlers))


def stderr_level() -> int:
    """The least level that this process says on standard error; its children say as much."""
    found = (handler.level for handler in logging.getLogger().handlers if isinstance(handler, _Stderr))
    return next(found, logging.getLogger("evener").getEffectiveLevel())


def file_handler(path: str, level: int = logging.INFO) -> logging.Handler:
    """A handler that appends text lines to ``path``; a formatter may be set.

    Raises:
        ConfigError: it cannot be written.
    """
    try:
        handler = _Appender(path)
    except OSError as error:
        raise ConfigError(f"log.file={path} cannot be written: {error.strerror}; name a file that can") from error
    handler.setFormatter(_Text())
    handler.setLevel(level)
    return handler


class _Stderr(logging.StreamHandler[Any]):
    pass


class _Appender(WatchedFileHandler):
    """One ``write`` a line: the kernel keeps lines of several processes whole."""

    stream: Any

    def _open(self) -> Any:
        return open(self.baseFilename, "ab", buffering=0)

    def emit(self, record: logging.LogRecord) -> None:
        try:
            self.reopenIfNeeded()
            self.stream.write(self.format(record).encode("utf-8", "backslashreplace") + b"\n")
        except Exception:
            self.handleError(record)


class _Text(logging.Formatter):
    def __init__(self) -> None:
        super().__init__("%(asctime)s %(levelname)s %(name)s: %(message)s")

    def formatMessage(self, record: logging.LogRecord) -> str:  # logging's name
        line, of = super().formatMessage(record), request_id.get()
        return line if of is None or f"request_id={of}" in line else f"{line} request_id={of}"


class _Json(logging.Formatter):
    """One object a line; a record's ``fields`` stand beside the rest."""

    def format(self, record: logging.LogRecord) -> str:
        line = {
            "time": self.formatTime(record, "%Y-%m-%dT%H:%M:%S") + f".{int(record.msecs):03d}",
            "level": record.levelname.lower(), "logger": record.name, "process": record.process,
            "message": record.getMessage(), "request_id": request_id.get(), **getattr(record, "fields", {}),
        }  # fmt: skip
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        found = {key: value for key, value in line.items() if value is not None}
        return msgspec.json.encode(found, enc_hook=str).decode()
