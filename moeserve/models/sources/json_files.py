"""Reads the folder's JSON files, as untrusted input."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import msgspec

from moeserve.models.errors import ModelError, SettingError
from moeserve.models.sources.regular_file import map_file

MAX_BYTES = 128 << 20  # tokenizer.json of today's largest vocabularies takes 33 MB


def read_json(path: Path, most_bytes: int = MAX_BYTES) -> dict[str, Any]:
    """Reads a file and returns its JSON object. Infinity counts as a number, because Python writes it (Nemotron).
    Raises ModelError for a file that is missing, larger than `most_bytes`, no JSON, or not an object."""
    content = _read(path, most_bytes)
    try:
        found = _decoded(content)
    except (ValueError, RecursionError) as error:  # msgspec's and Unicode's are ValueErrors, too
        raise ModelError(path, f"is not valid JSON ({error}); download it again") from error
    if not isinstance(found, dict):
        raise ModelError(path, "does not hold a JSON object; download it again")
    return found


def _decoded(content: bytes) -> Any:
    try:
        return msgspec.json.decode(content)
    except msgspec.DecodeError:
        if b"Infinity" not in content:
            raise
        return json.loads(content)


def read_text(path: Path) -> str:
    """Reads a text file. Raises ModelError, also for invalid UTF-8."""
    try:
        return _read(path).decode("utf-8")
    except UnicodeDecodeError as error:
        raise SettingError(path, f"is not valid UTF-8 ({error.reason} at byte {error.start})") from error


def _read(path: Path, most_bytes: int = MAX_BYTES) -> bytes:
    try:
        with map_file(path) as content:
            if len(content) > most_bytes:
                raise SettingError(path, f"has {len(content)} bytes; {most_bytes} at most are supported")
            return content[:]
    except FileNotFoundError as error:
        raise ModelError(path, "is missing; download the whole repository") from error
    except OSError as error:
        raise ModelError(
            path, f"cannot be opened: {error.strerror or error}; let the server's user read it"
        ) from error
