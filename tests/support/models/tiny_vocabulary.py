"""The tiny model's vocabulary, for files that a test writes."""

from __future__ import annotations

import numpy as np
from gguf import GGUFWriter

from moeserve.models.sources.gguf import StringArray, open_gguf
from tests.conftest import TINY_MODEL


def vocabulary_size() -> int:
    return len(open_gguf(TINY_MODEL).metadata.require_strings("tokenizer.ggml.tokens"))


def add_vocabulary(writer: GGUFWriter) -> None:
    """Adds all keys of the tokenizer."""
    for name, value in open_gguf(TINY_MODEL).metadata.items():
        if not name.startswith("tokenizer."):
            continue
        if isinstance(value, bool):
            writer.add_bool(name, value)
        elif isinstance(value, int):
            writer.add_uint32(name, value)
        elif isinstance(value, str):
            writer.add_string(name, value)
        else:
            assert isinstance(value, np.ndarray | StringArray)
            writer.add_array(name, value.tolist() if isinstance(value, np.ndarray) else list(value))
