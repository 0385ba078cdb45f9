"""Decides whether a checkpoint's head is its embedding, like transformers: by `tie_word_embeddings`, unless the
tensors contradict it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from moeserve.models.errors import SettingError

from .safetensors_file import StoredTensor

EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"
_AT_ONCE = 1 << 24  # bytes compared at a time


def settle_head(
    path: Path, config: Mapping[str, Any], stored: dict[str, StoredTensor], *, tied_by_default: bool
) -> None:
    """Leaves a separate head in `stored`. In a tied model, a head that differs from the embedding stays, an equal
    one is removed, and a head without an embedding becomes the embedding. tied_by_default: if config.json does not
    say. Raises ModelError if there is no head."""
    tied = config.get("tie_word_embeddings")
    if tied if tied is not None else tied_by_default:
        head = stored.get(HEAD)
        if head is None:
            return
        embedding = stored.setdefault(EMBEDDING, replace(head, name=EMBEDDING))
        if _are_equal(head, embedding):
            del stored[HEAD]
    elif HEAD not in stored:
        raise SettingError(path, f"tensor {HEAD!r} is missing, and tie_word_embeddings is false")


def _are_equal(one: StoredTensor, other: StoredTensor) -> bool:
    """Compares bitwise. Different types count as different, which costs only memory."""
    if (one.dtype, one.shape) != (other.dtype, other.shape) or any(
        each.scales or each.packed for each in (one, other)
    ):
        return False
    a, b = (np.frombuffer(each.buffer, np.uint8, each.end - each.start, each.start) for each in (one, other))
    return all(
        np.array_equal(a[first : first + _AT_ONCE], b[first : first + _AT_ONCE])
        for first in range(0, a.size, _AT_ONCE)
    )
