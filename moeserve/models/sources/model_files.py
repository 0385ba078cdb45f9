"""Which .gguf files hold a model, by their names: published folders have others beside it."""

from __future__ import annotations

import re

_TOWER = re.compile(r"(?:^|[-_.])mmproj(?:$|[-_.])", re.IGNORECASE)
# The projector of a model that sees, and what a quantiser was steered by.
_BESIDE = re.compile(r"(?:^|[-_.])(?:mmproj|imatrix)(?:$|[-_.])", re.IGNORECASE)


def is_model_file(name: str) -> bool:
    """`name`: a file's, perhaps with folders before it."""
    file = name.rpartition("/")[2]
    return file.endswith(".gguf") and _BESIDE.search(file) is None


def is_tower_file(name: str) -> bool:
    """Whether the .gguf file `name` has the tower of a model that sees."""
    return _TOWER.search(name) is not None
