"""Metadata of the tiny models' GGUF files."""

from __future__ import annotations

import numpy as np
from gguf import GGUFWriter

from moeserve.models.sources.gguf import StringArray, open_gguf
from tests.conftest import TINY_MODEL


def add_tokenizer(writer: GGUFWriter) -> None:
    """Adds the tokenizer of TINY_MODEL."""
    for name, value in open_gguf(TINY_MODEL).metadata.items():
        if name.startswith("tokenizer."):
            _add_entry(writer, name, value)


def _add_entry(writer: GGUFWriter, name: str, value: object) -> None:
    if isinstance(value, StringArray):
        writer.add_array(name, list(value))
    elif isinstance(value, np.ndarray):
        writer.add_array(name, value.tolist())
    elif isinstance(value, str):
        writer.add_string(name, value)
    elif isinstance(value, bool):
        writer.add_bool(name, value)
    elif isinstance(value, int):
        writer.add_uint32(name, value)
