"""Files in which a process keeps its counts for its successor. They lie in the runtime directory."""

from __future__ import annotations

import logging
import os
from pathlib import Path
from typing import Any, TypeVar

import msgspec

T = TypeVar("T")

log = logging.getLogger(__name__)

_warned: set[Path] = set()


def read_kept(file: Path, kind: type[T]) -> T | None:
    """Returns what the previous process wrote; None if there was none, or if the file cannot be read,
    which is logged."""
    try:
        return msgspec.json.decode(file.read_bytes(), type=kind)
    except FileNotFoundError:
        return None
    except (OSError, msgspec.MsgspecError, UnicodeDecodeError) as error:
        log.warning("the counters begin at 0: %s: %s", file, error)
        return None


def write_kept(file: Path, value: Any) -> None:
    """Replaces the file as a whole. A file that cannot be written is logged once."""
    temporary = file.with_suffix(".new")
    try:
        temporary.write_bytes(msgspec.json.encode(value))
        os.replace(temporary, file)
    except OSError as error:
        if file not in _warned:
            _warned.add(file)
            log.warning("the counters begin at 0 if this process is lost: %s", error)
