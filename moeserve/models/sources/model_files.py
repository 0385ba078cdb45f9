"""Recognises by name the .gguf files that hold a model; published folders also contain other files."""

from __future__ import annotations

import re

_TOWER = re.compile(r"(?:^|[-_.])mmproj(?:$|[-_.])", re.IGNORECASE)
# Names of vision projectors and importance matrices.
_BESIDE = re.compile(r"(?:^|[-_.])(?:mmproj|imatrix)(?:$|[-_.])", re.IGNORECASE)


def is_model_file(name: str) -> bool:
    """Returns whether a file, named with or without folders, is a model."""
    file = name.rpartition("/")[2]
    return file.endswith(".gguf") and _BESIDE.search(file) is None


def is_tower_file(name: str) -> bool:
    """Returns whether a .gguf file is a vision projector (mmproj)."""
    return _TOWER.search(name) is not None
