"""Recognises by name the .gguf files that hold a model; published folders also contain other files."""

from __future__ import annotations

import re
from collections.abc import Iterable

_TOWER = re.compile(r"(?:^|[-_./])mmproj", re.IGNORECASE)
_MATRIX = re.compile(r"(?:^|[-_./])imatrix(?:$|[-_./])", re.IGNORECASE)
# The types that llama.cpp's naming convention ends a name with: an adapter, a vocabulary.
_PART = re.compile(r"[-_.](?:LoRA|vocab)\.gguf$", re.IGNORECASE)
SPLIT_NAME = re.compile(r"(?P<stem>.+)-(?P<part>\d{5})-of-(?P<parts>\d{5})\.gguf")
_MAX_LISTED = 8  # names in an error message


def is_model_file(name: str) -> bool:
    """Returns whether a file, named with or without folders, is a model: no vision projector, importance matrix,
    adapter or vocabulary."""
    return name.endswith(".gguf") and not any(one.search(name) for one in (_TOWER, _MATRIX, _PART))


def is_tower_file(name: str) -> bool:
    """Returns whether a .gguf file is a vision projector (mmproj)."""
    return _TOWER.search(name) is not None


def models_of(names: Iterable[str]) -> list[str]:
    """Returns the names of a folder's models; of a split set, the first part that is there."""
    models: dict[str, str] = {}
    for name in sorted(filter(is_model_file, names)):
        match = SPLIT_NAME.fullmatch(name)
        models.setdefault(f"{match['stem']}-of-{match['parts']}" if match else name, name)
    return list(models.values())


def split_names(name: str) -> list[str]:
    """Returns the names of all files of the split set that `name` belongs to; only `name` if none."""
    match = SPLIT_NAME.fullmatch(name)
    if match is None:
        return [name]
    parts = int(match["parts"])
    return [f"{match['stem']}-{part:05d}-of-{parts:05d}.gguf" for part in range(1, parts + 1)]


def listed(names: list[str]) -> str:
    """Returns the names for a message, of many the first few."""
    more = len(names) - _MAX_LISTED
    return ", ".join(names[:_MAX_LISTED]) + (f" and {more} more" if more > 0 else "")
