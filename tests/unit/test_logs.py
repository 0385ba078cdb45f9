"""What one log line looks like, whatever is in it."""

from __future__ import annotations

import json
import logging
import subprocess
import sys

from moeserve.processes import logs


def record(message: str, *args: object, **extra: object) -> logging.LogRecord:
    made = logging.LogRecord("a.logger", logging.WARNING, "file.py", 1, message, args, None)
    vars(made).update(extra)
    return made


def test_text_line() -> None:
    line = logs.TextFormatter("router").format(record("%d tokens", 3, request_id="abc"))
    assert line.endswith(" WARNING router: [abc] 3 tokens")
    assert logs.TextFormatter("router").format(record("no request")).endswith(" WARNING router: no request")


def test_a_client_cannot_forge_a_line() -> None:
    for nasty in ("a\nb", "a\r\nb", "a\x1b[2Jb", "a\x85b", "a\u2028b"):
        assert len(logs.TextFormatter("p").format(record("%s", nasty)).splitlines()) == 1
        assert "\x1b" not in logs.TextFormatter("p").format(record("%s", nasty))
        assert json.loads(logs.JsonFormatter("p").format(record("%s", nasty)))["message"] == nasty


def test_nor_by_the_message_of_an_exception() -> None:
    formatter = logs.TextFormatter("p")
    for nasty in ("a\n2026-11-20 b", "a\r2026-11-20 b", "a\x1b[2Jb", "a\u20282026-11-20 b"):
        failed = record("failed")
        try:
            raise ValueError(nasty)
        except ValueError as error:
            failed.exc_info = (type(error), error, error.__traceback__)
        first, *traceback = formatter.format(failed).splitlines()
        assert first.endswith(" WARNING p: failed")
        assert traceback[0] == "  Traceback (most recent call last):"
        assert all(line.startswith("  ") for line in traceback)
        assert "\x1b" not in "".join(traceback)


def test_json_line() -> None:
    token = logs.request_id.set("from-the-task")
    try:
        line = json.loads(logs.JsonFormatter("worker").format(record("hi", fields={"status": 200})))
    finally:
        logs.request_id.reset(token)
    assert line["request_id"] == "from-the-task"
    assert (line["level"], line["process"], line["logger"]) == ("warning", "worker", "a.logger")
    assert line["status"] == 200


def test_a_lone_surrogate_is_no_error() -> None:
    assert json.loads(logs.JsonFormatter("p").format(record("\ud800")))["message"] == "\ud800"


def test_warnings_threads_and_the_end_are_lines_too() -> None:
    program = """
import threading, warnings
from moeserve.processes.logs import set_up_logging
set_up_logging("worker", "info", "json")
warnings.warn("look out")
thread = threading.Thread(target=lambda: 1 / 0)
thread.start(); thread.join()
raise SystemError("the end")
"""
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120)
    assert ended.returncode == 1
    warning, thread, end = (json.loads(line) for line in ended.stderr.splitlines())
    assert "look out" in warning["message"]
    assert "ZeroDivisionError" in thread["exception"]
    assert "SystemError: the end" in end["exception"]
