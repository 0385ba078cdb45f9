"""Log output: all processes write one line per record to stderr, as text or as JSON objects (`--log-format`).

    2026-11-20 12:00:00,123 INFO    router: [7f3a...] queued: 120 tokens
    {"time": "2026-11-20T12:00:00.123Z", "level": "info", "process": "router", "message": "queued: ...", ...}

A line about a request has its id, from the context variable `request_id` (set in the request's own task) or from the
call's `extra={"request_id": ...}`. `extra={"fields": {...}}` adds members to the JSON object; text lines leave them
out, because the message says the same.
"""

from __future__ import annotations

import json
import logging
import os
import sys
import threading
import time
from contextvars import ContextVar
from types import TracebackType
from typing import Any, Final

from moeserve.config import LOGGED_MODEL_ENV

# id of the request that the current task handles
request_id: ContextVar[str] = ContextVar("request_id", default="")

# Control characters are escaped: a path or an error may contain client input, which must not start a new log line.
_CONTROLS: Final = {code: f"\\x{code:02x}" for code in (*range(32), 127, *range(128, 160))} | {
    ord("\n"): "\\n",
    ord("\r"): "\\r",
    ord("\t"): "\t",
    0x2028: "\\u2028",
    0x2029: "\\u2029",
}


class TextFormatter(logging.Formatter):
    """Formats a record as text: time, level, process, the request's id if any, message; then an indented traceback,
    if any."""

    def __init__(self, process: str) -> None:
        super().__init__(f"%(asctime)s %(levelname)-7s {process}: %(message)s")

    def formatMessage(self, record: logging.LogRecord) -> str:
        identity = _request_id(record)
        message = record.message.translate(_CONTROLS)
        record.message = f"[{identity}] {message}" if identity else message
        return super().formatMessage(record)

    def formatException(self, ei: Any) -> str:
        return "\n".join("  " + line.translate(_CONTROLS) for line in super().formatException(ei).split("\n"))


class JsonFormatter(logging.Formatter):
    """Formats a record as one JSON object per line: time (UTC), level, process, pid, logger, message, and where
    present request_id, exception and the call's `fields`."""

    def __init__(self, process: str) -> None:
        super().__init__()
        self._process = process

    def format(self, record: logging.LogRecord) -> str:
        seconds = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created))
        line: dict[str, Any] = {
            "time": f"{seconds}.{int(record.msecs):03d}Z",
            "level": record.levelname.lower(),
            "process": self._process,
            "pid": record.process,
            "logger": record.name,
            "message": record.getMessage(),
        }
        if identity := _request_id(record):
            line["request_id"] = identity
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return json.dumps(line | getattr(record, "fields", {}), default=str)


def _request_id(record: logging.LogRecord) -> str:
    return getattr(record, "request_id", None) or request_id.get()


def set_up_logging(process: str, level: str, log_format: str = "text") -> None:
    """Sends all output of this process to stderr in `log_format`, including Python's warnings and the exceptions
    that end a thread or the process. With several models, the process is named with its model."""
    if model := os.environ.get(LOGGED_MODEL_ENV):
        process = f"{process} of {model}"
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JsonFormatter(process) if log_format == "json" else TextFormatter(process))
    logging.basicConfig(level=level.upper(), handlers=[handler], force=True)
    logging.captureWarnings(True)
    sys.excepthook = _log_end
    threading.excepthook = _log_thread_end


def _log_end(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    logging.getLogger("moeserve").critical("ended by an error", exc_info=(kind, error, trace))


def _log_thread_end(args: threading.ExceptHookArgs) -> None:
    name = args.thread.name if args.thread is not None else "?"
    if args.exc_value is not None:
        cause = (args.exc_type, args.exc_value, args.exc_traceback)
        logging.getLogger("moeserve").error("thread %s ended by an error", name, exc_info=cause)
