"""The first loading steps, the same on every device."""

from __future__ import annotations

from pathlib import Path

import torch

from moeserve.config import ServerConfig
from moeserve.models.open import open_dummy_model, open_model
from moeserve.models.sources.source import ModelSource


def open_weights(config: ServerConfig) -> ModelSource:
    """Opens and returns the model, or a dummy with its shapes and random weights (--load-format). Raises ModelError for
    a file that cannot be read or served."""
    path = Path(config.model)
    return open_dummy_model(path) if config.load_format == "dummy" else open_model(path)


def set_up_torch() -> None:
    torch.set_num_threads(1)  # the pool computes; torch only moves a few rows
    torch.set_grad_enabled(False)
