"""A path becomes an adapter, whatever its form."""

from __future__ import annotations

from pathlib import Path

from moeserve.models.adapters.read_gguf import GgufAdapter
from moeserve.models.adapters.read_peft import PeftAdapter
from moeserve.models.interface import ModelShape


def open_adapter(name: str, path: Path, shape: ModelShape) -> PeftAdapter | GgufAdapter:
    """A folder of PEFT's, or a GGUF file: checked against the model's shape, not yet read. Raises AdapterError."""
    return PeftAdapter(name, path, shape) if path.is_dir() else GgufAdapter(name, path, shape)
