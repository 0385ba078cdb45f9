"""A model's file that ends where its tensors begin."""

from __future__ import annotations

from pathlib import Path

from moeserve.models.sources.gguf import open_gguf


def write_header_only(model: Path, to: Path) -> Path:
    """Writes `model` without its tensors' bytes; gives `to`."""
    start = min(tensor.offset for tensor in open_gguf(model).tensors.values())
    to.write_bytes(model.read_bytes()[:start])
    return to
