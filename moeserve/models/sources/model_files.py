"""Recognises by name the .gguf files that hold a model; published folders also contain other files."""

from __future__ import annotations

import re

_TOWER = re.compile(r"(?:^|[-_./])mmproj", re.IGNORECASE)
_MATRIX = re.compile(r"(?:^|[-_./])imatrix(?:$|[-_./])", re.IGNORECASE)
# The types that llama.cpp's naming convention ends a name with: an adapter, a vocabulary.
_PART = re.compile(r"[-_.](?:LoRA|vocab)\.gguf$", re.IGNORECASE)


def is_model_file(name: str) -> bool:
    """Returns whether a file, named with or without folders, is a model: no vision projector, importance matrix,
    adapter or vocabulary."""
    return name.endswith(".gguf") and not any(one.search(name) for one in (_TOWER, _MATRIX, _PART))


def is_tower_file(name: str) -> bool:
    """Returns whether a .gguf file is a vision projector (mmproj)."""
    return _TOWER.search(name) is not None
