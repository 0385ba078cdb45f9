"""Ends a start whose model files are not whole, before any process is started."""

from __future__ import annotations

from pathlib import Path

from moeserve.config import ServerConfig
from moeserve.config.speculative import drafts_of
from moeserve.errors import FileError
from moeserve.models.sources.announced_size import cut_short


def refuse_short_files(config: ServerConfig) -> None:
    """Raises FileError for a file of the model, its vision tower or its drafting model that is shorter than its header
    says. The model's own file may be: with random weights (`--load-format dummy`), and where another machine has the
    weights."""
    drafts = drafts_of(config)
    tower = (
        None if config.mmproj == config.model else config.mmproj
    )  # a folder has its tower in its own files
    named = [tower, None if drafts is None else drafts.model]
    if config.load_format != "dummy" and config.worker is None:
        named.append(config.model)
    for path in named:
        if path is not None and (problem := cut_short(Path(path))) is not None:
            raise FileError(problem)
