"""Logging: every module has `logging.getLogger(__name__)`; a process sets its name once.

INFO is the life of a process, with a line for each HTTP request; DEBUG is the life of a request.
Neither tokens nor prompts are logged. Python's warnings, and records of libraries, are written in
the same form, from WARNING on. Some libraries add handlers, which `adopt_loggers` removes.
"""

from __future__ import annotations

import json
import logging
import sys
import time
from datetime import UTC, datetime
from typing import TextIO

_REPEAT_INTERVAL_S = 10.0
_TIME_FORMAT = "%Y-%m-%d %H:%M:%S"


def set_up_logging(process: str, level: str = "INFO", *, as_json: bool = False) -> None:
    """Write this process's records to stderr under its name. Replaces an earlier call."""
    text_format = f"%(asctime)s [{process}] %(levelname)s %(message)s"
    handler = _ProcessHandler(sys.stderr)
    handler.setFormatter(
        JsonFormatter(process) if as_json else logging.Formatter(text_format, _TIME_FORMAT)
    )
    own = logging.getLogger("minisgl")
    own.handlers[:] = [handler]
    own.propagate = False
    own.setLevel(level)

    root = logging.getLogger()
    others = [each for each in root.handlers if not isinstance(each, _ProcessHandler)]
    root.handlers[:] = [*others, handler]
    root.setLevel(max(own.level, logging.WARNING))
    logging.captureWarnings(True)


def rename_in_log(process: str) -> None:
    """Write this process's records under another name from now on, after `set_up_logging`."""
    own = logging.getLogger("minisgl")
    as_json = isinstance(own.handlers[0].formatter, JsonFormatter)
    set_up_logging(process, logging.getLevelName(own.level), as_json=as_json)


def adopt_loggers(*libraries: str) -> None:
    """Write the records of libraries like our own; call it when they are imported.

    Their own handlers would write them in another form, or twice. A level that the user chose
    (`TORCH_LOGS`, `TRANSFORMERS_VERBOSITY`) stays. Without `set_up_logging`, as for an `LLM` in
    another program, nothing changes.
    """
    root = logging.getLogger()
    if not any(isinstance(each, _ProcessHandler) for each in root.handlers):
        return
    for library in map(logging.getLogger, libraries):
        if library.level == logging.WARNING:  # their default
            library.setLevel(root.level)
    for name in list(logging.root.manager.loggerDict):
        if name.partition(".")[0] in libraries:
            _adopt(logging.getLogger(name))


def _adopt(logger: logging.Logger) -> None:
    """Remove a logger's handlers that write to stderr, so that its records go to the root's."""
    others = [each for each in logger.handlers if not _writes_to_stderr(each)]
    if len(others) < len(logger.handlers):
        logger.handlers[:] = others
        logger.propagate = True


def _writes_to_stderr(handler: logging.Handler) -> bool:
    """Whether a library made the handler to write to stderr. torch's traces go to files."""
    return type(handler) is logging.StreamHandler and handler.stream is sys.stderr


class _ProcessHandler(logging.StreamHandler[TextIO]):
    """The handler of `set_up_logging`."""


class JsonFormatter(logging.Formatter):
    """Writes a record as one line of JSON.

    A record may have fields of its own: `logger.info(..., extra={"fields": {...}})`.
    """

    def __init__(self, process: str) -> None:
        super().__init__()
        self._process = process

    def format(self, record: logging.LogRecord) -> str:
        time_of_day = datetime.fromtimestamp(record.created, UTC)
        line: dict[str, object] = {
            "time": time_of_day.isoformat(timespec="milliseconds"),
            "level": record.levelname,
            "process": self._process,
            "logger": record.name,
            "message": record.getMessage(),
            **getattr(record, "fields", {}),
        }
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return json.dumps(line, ensure_ascii=False)


def limit_repeats(*names: str) -> None:
    """Limit how often these loggers write the warnings of one line of code."""
    for name in names:
        limited = logging.getLogger(name)
        if not any(isinstance(each, RepeatLimit) for each in limited.filters):
            limited.addFilter(RepeatLimit())


class RepeatLimit(logging.Filter):
    """Lets one warning per line of code and `interval_s` through, and counts the others.

    Warnings that clients can cause at any rate would otherwise fill the disk.
    """

    def __init__(self, interval_s: float = _REPEAT_INTERVAL_S) -> None:
        super().__init__()
        self._interval_s = interval_s
        self._next_time: dict[tuple[str, int], float] = {}
        self._num_left_out: dict[tuple[str, int], int] = {}

    def filter(self, record: logging.LogRecord) -> bool:
        if record.levelno < logging.WARNING:
            return True
        call_site = (record.pathname, record.lineno)
        now = time.monotonic()
        if now < self._next_time.get(call_site, now):
            self._num_left_out[call_site] = self._num_left_out.get(call_site, 0) + 1
            return False
        self._next_time[call_site] = now + self._interval_s
        num_left_out = self._num_left_out.pop(call_site, 0)
        if num_left_out:
            record.msg = f"{record.getMessage()} ({num_left_out} more before this one)"
            record.args = ()
        return True
