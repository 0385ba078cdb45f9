"""The lines of a batch's input. All lines are checked before the first is answered; later they are read one by one."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO, Final

import orjson

from moeserve.httpserver.batches.records import LineError

MAX_LINES: Final = 100_000  # OpenAI takes 50,000, Anthropic 100,000
MAX_LINE_BYTES: Final = 32 << 20
MAX_ERRORS: Final = 100  # most errors reported per file
MAX_CUSTOM_ID_CHARS: Final = 512
_BOM: Final = b"\xef\xbb\xbf"
_PAUSE_EVERY: Final = 200  # lines after which the thread lets the event loop run
_PAUSE_S: Final = 0.001


@dataclass(frozen=True, slots=True)
class Line:
    custom_id: str
    start: int  # offset in the file, in bytes
    size: int


@dataclass
class Lines:
    lines: list[Line] = field(default_factory=list)
    errors: list[LineError] = field(default_factory=list)


def read_lines(path: Path, endpoint: str, knows_model: Callable[[str], bool]) -> Lines:
    """Returns a file's requests, and the errors in them. Accepts blank lines, CRLF and a byte order mark. Raises
    OSError."""
    found = Lines()
    first_lines: dict[str, int] = {}
    with path.open("rb") as file:
        start, number = 0, 0
        while line := file.readline(MAX_LINE_BYTES + 1):
            number += 1
            place, start = start, start + len(line)
            if number == 1 and line.startswith(_BOM):
                line, place = line[len(_BOM) :], place + len(_BOM)
            if not line.strip():
                continue
            if number % _PAUSE_EVERY == 0:
                time.sleep(_PAUSE_S)
            if len(line) > MAX_LINE_BYTES:
                _add(found, "line_too_long", f"This line has more than {MAX_LINE_BYTES} bytes.", number)
                return found
            error = _check(line, number, endpoint, knows_model, first_lines)
            if isinstance(error, LineError):
                found.errors.append(error)
                if len(found.errors) >= MAX_ERRORS:
                    return found
                continue
            if len(found.lines) >= MAX_LINES:
                _add(found, "too_many_tasks", f"The file has more than {MAX_LINES} requests.", number)
                return found
            found.lines.append(Line(error, place, len(line)))
    if not found.lines and not found.errors:
        _add(found, "empty_file", "The batch file is empty: it needs at least one request.", None)
    return found


def read_line(file: BinaryIO, line: Line) -> dict[str, Any]:
    """Reads one of the requests that `read_lines` has found. Raises OSError."""
    request: dict[str, Any] = orjson.loads(os.pread(file.fileno(), line.size, line.start))
    return request


def _add(found: Lines, code: str, message: str, line: int | None) -> None:
    found.errors.append(LineError(code, message, line))


def _check(
    line: bytes, number: int, endpoint: str, knows_model: Callable[[str], bool], first_lines: dict[str, int]
) -> str | LineError:
    """Returns a line's custom_id, or its error. first_lines: first line with each custom_id so far; this line is
    added."""
    try:
        request = orjson.loads(line)
    except orjson.JSONDecodeError as error:
        if line.startswith((b"\xff\xfe", b"\xfe\xff")):
            error_text = "the file is in UTF-16; write it in UTF-8"
        else:
            error_text = str(error)
        return LineError(
            "invalid_json_line", f"This line is not parseable as valid JSON: {error_text}.", number
        )
    if not isinstance(request, dict):
        return LineError(
            "invalid_json_line", "This line is no JSON object: each line is one request.", number
        )
    custom_id, body = request.get("custom_id"), request.get("body")
    if custom_id is None or body is None:
        name = "custom_id" if custom_id is None else "body"
        return LineError("missing_required_parameter", f"Missing required parameter: '{name}'.", number, name)
    if not isinstance(custom_id, str) or not 1 <= len(custom_id) <= MAX_CUSTOM_ID_CHARS:
        message = f"custom_id must be a text of 1 to {MAX_CUSTOM_ID_CHARS} characters."
        return LineError("invalid_type", message, number, "custom_id")
    if not isinstance(body, dict):
        return LineError("invalid_type", "body must be an object.", number, "body")
    if str(request.get("method", "POST")).upper() != "POST":
        return LineError("invalid_method", "The method of each request must be POST.", number, "method")
    url = request.get("url")
    if not isinstance(url, str) or route_of(url) != endpoint:
        message = f"The URL of this request, {str(url)[:80]!r}, is not the batch's endpoint, {endpoint}."
        return LineError("url_mismatch" if url else "missing_required_parameter", message, number, "url")
    model = body.get("model")
    if isinstance(model, str) and model and not knows_model(model):
        message = f"The model {model[:200]!r} is not served here."
        return LineError("model_not_found", message, number, "body.model")
    if custom_id in first_lines:
        message = (
            f"The custom_id {custom_id[:80]!r} for this request is a duplicate of line {first_lines[custom_id]}. "
            "The custom_id must be unique for each request in a batch."
        )
        return LineError("duplicate_custom_id", message, number, "custom_id")
    first_lines[custom_id] = number
    return custom_id


def route_of(url: str) -> str:
    """Returns the route for a line's url or a batch's endpoint. Accepts a host before the path, and Azure's form
    without /v1."""
    if url.startswith(("http://", "https://")):
        url = "/" + url.split("/", 3)[3] if url.count("/") >= 3 else ""
    path = url.split("?")[0].rstrip("/")
    return path if path.startswith("/v1/") else f"/v1{path}"
