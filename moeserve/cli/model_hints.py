"""Suggestions for a model that does not exist: the end of an error's message."""

from __future__ import annotations

import difflib
import os
import re
from collections.abc import Iterable, Iterator
from itertools import islice
from pathlib import Path
from typing import Final

MAX_NAMED: Final = 3
_MOST_ENTRIES: Final = 10_000  # entries of a folder that are searched


def for_missing(path: Path) -> str:
    """Returns a hint for a path that does not exist: similar names beside it, else how models are named."""
    folder = next(one for one in path.parents if one.is_dir())
    wrong = path.relative_to(folder).parts[0]
    names = [entry.name for entry in islice(_entries(folder), _MOST_ENTRIES)]
    if close := difflib.get_close_matches(wrong, names, MAX_NAMED):
        return f"; did you mean {_either(str(folder / name) for name in close)}?"
    if re.fullmatch(r"[\w.-]+(:[\w.-]+)?", path.name) and path.suffix != ".gguf":  # as in Ollama
        return "; a model of the Hugging Face Hub is named as org/repo, org/repo:Q4_K_M or org/repo:file.gguf"
    return ""


def for_folder(folder: Path) -> str:
    """Returns a hint for a folder that holds no model: the folders in it that do."""
    inside = (entry for entry in islice(_entries(folder), _MOST_ENTRIES) if entry.is_dir())
    models = [entry for entry in inside if os.path.exists(entry / "config.json") or any(entry.glob("*.gguf"))]
    if not models:
        return ""
    return f"; did you mean {_either(str(entry) for entry in sorted(models)[:MAX_NAMED])}?"


def _entries(folder: Path) -> Iterator[Path]:
    try:
        yield from folder.iterdir()
    except OSError:
        return


def _either(names: Iterable[str]) -> str:
    return " or ".join(names)
