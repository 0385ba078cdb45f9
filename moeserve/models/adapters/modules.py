"""`--lora-modules name=path`: the adapters' names in the API, and their paths."""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path

from moeserve.errors import ConfigError, FileError

MAX_NAME_CHARS = 200
DEFAULT_MOST = 16  # --max-loras
DEFAULT_MEMORY_GIB = 1.0  # --lora-memory
GPU_RANK = 64  # largest rank that a GPU engine allocates for, unless --lora-modules has a larger one


def is_name(text: str) -> bool:
    """Returns whether an adapter may have this name."""
    return 0 < len(text) <= MAX_NAME_CHARS and text.isprintable()


def parse_modules(texts: Iterable[str]) -> dict[str, str]:
    """Returns name → path. Raises ConfigError for malformed text and for duplicate names."""
    found: dict[str, str] = {}
    for text in texts:
        name, separator, path = text.partition("=")
        if not separator or not path or not is_name(name):
            raise ConfigError(f"--lora-modules: {text[:200]!r} is not of the form name=path; write it so")
        if name in found:
            raise ConfigError(f"--lora-modules: the name {name!r} is given twice; choose another")
        found[name] = path
    return found


def resolve_directory(path: str | None, modules: int, most: int | None, memory: float | None) -> str | None:
    """Returns `--lora-dir` as an absolute path. modules: the adapters that are loaded at the start; most, memory:
    `--max-loras` and `--lora-memory`. Returns None if it is not set. Raises FileError if the folder is missing,
    ConfigError if the other flags contradict it."""
    if path is None:
        for flag, value in (("--max-loras", most), ("--lora-memory", memory)):
            if value is not None:
                raise ConfigError(f"{flag}: has no effect without --lora-dir; leave it out")
        return None
    found = Path(path).expanduser()
    if not os.path.isdir(found):
        raise FileError(f"--lora-dir: there is no folder {path}; name one that exists")
    if modules > (DEFAULT_MOST if most is None else most):
        raise ConfigError(
            f"--max-loras: {modules} adapters are served from the start; allow at least as many"
        )
    return os.path.realpath(found)


def resolve_modules(texts: Iterable[str], served_names: Iterable[str]) -> tuple[str, ...]:
    """Returns the entries with absolute paths. Raises ConfigError for a missing path, or a name that the model has."""
    modules = parse_modules(texts)
    for name, path in modules.items():
        if name in served_names:
            raise ConfigError(f"--lora-modules: {name!r} is a name of the model itself; choose another")
        if not os.path.exists(Path(path).expanduser()):
            raise FileError(f"--lora-modules: there is no file or folder {path}")
    return tuple(f"{name}={os.path.abspath(Path(path).expanduser())}" for name, path in modules.items())
