"""Hugging Face's cache of downloaded models, which other programs use too."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import NamedTuple

from huggingface_hub import constants


class CacheSpace(NamedTuple):
    folder: Path  # HF_HUB_CACHE; it may not be there yet
    free_bytes: int
    is_writable: bool


def cache_space() -> CacheSpace:
    folder = Path(constants.HF_HUB_CACHE)
    there = next(one for one in (folder, *folder.parents) if one.exists())
    return CacheSpace(folder, shutil.disk_usage(there).free, os.access(there, os.W_OK | os.X_OK))
