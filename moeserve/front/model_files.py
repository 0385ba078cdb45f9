"""The versions of the files from which a model is loaded. A model whose load failed is tried again at once when one of
them has changed."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Final

from moeserve.config import ServerConfig

# Options that name one more file or folder that a load reads.
_OPTIONS: Final = ("mmproj", "speculative_model", "chat_template", "generation_config", "placement_rules")
_SUFFIXES: Final = frozenset((".gguf", ".json", ".safetensors", ".jinja", ".model", ".txt"))
_PART = re.compile(r"(.+)-\d{5}-of-(\d{5})\.gguf")

Version = tuple[int, int, int]  # inode, size in bytes, time of the last change in ns
Versions = tuple[tuple[str, Version | None], ...]  # by path; None: there is no such file


def versions_of(config: ServerConfig) -> Versions | None:
    """Returns the versions of a model's files: of a split set all parts, of a folder the files in it. None if the model
    itself is not there."""
    model = Path(config.model)
    if _version(model) is None:
        return None
    named = [getattr(config, option) for option in _OPTIONS]
    named += [module.partition("=")[2] for module in config.lora_modules]
    paths = [*_files(model), *(file for name in named if name for file in _files(Path(name)))]
    return tuple((str(path), _version(path)) for path in paths)


def _files(path: Path) -> list[Path]:
    try:
        if path.is_dir():
            return sorted(file for file in path.iterdir() if file.suffix in _SUFFIXES)
        part = _PART.fullmatch(path.name)
        if part is not None:
            return sorted(path.parent.glob(f"{_literal(part[1])}-?????-of-{part[2]}.gguf"))
    except OSError:
        pass
    return [path]


def _literal(text: str) -> str:
    """Returns the glob pattern that matches exactly this text."""
    return re.sub(r"([*?[])", r"[\1]", text)


def _version(path: Path) -> Version | None:
    try:
        found = os.stat(path)
    except OSError:
        return None
    return found.st_ino, found.st_size, found.st_mtime_ns
