"""A fingerprint of a model by which two machines check that they have the same one, computed without reading the
weights."""

from __future__ import annotations

import hashlib

import numpy as np

from moeserve.models.sources.gguf import StringArray
from moeserve.models.sources.source import ModelSource


def fingerprint(source: ModelSource) -> str:
    """Returns a hash of all metadata (tokenizer and chat template included) and of every tensor's name, shape and type.
    For GGUF, a file without its tensors' data is enough."""
    digest = hashlib.blake2b(digest_size=16)

    def add(part: bytes) -> None:
        digest.update(len(part).to_bytes(8))
        digest.update(part)

    for key, value in sorted(source.metadata.items()):
        add(key.encode())
        if isinstance(value, StringArray):
            for string in value:
                add(string)
        elif isinstance(value, np.ndarray):
            add(f"{value.dtype} {value.shape}".encode())
            add(value.tobytes())
        else:
            add(repr(value).encode())
    for name, info in sorted(source.tensors.items()):
        add(repr((name, tuple(info.shape), info.type.name)).encode())
    return digest.hexdigest()
