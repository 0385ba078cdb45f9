"""Hugging Face folders with other settings, beside transformers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch

from tests.kernels.engines.model_engine import Engine
from tests.kernels.families.transformers_logits import (
    TOKENS,
    transformers_logits,
)
from tests.kernels.operations import ISAS, stream_of

if TYPE_CHECKING:
    from transformers import PreTrainedModel


def edit_config(folder: Path, **changes: Any) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | changes))


def assert_is_near_transformers(
    folder: Path, model: type[PreTrainedModel], monkeypatch: pytest.MonkeyPatch
) -> None:
    """At most positions: where a key is rounded to the other side, a router may choose another expert."""
    truth = transformers_logits(model.from_pretrained(folder, dtype=torch.float32), monkeypatch)
    logits = Engine(stream_of(ISAS[0], threads=1), folder).logits(TOKENS)
    errors = ((logits - truth) ** 2).mean(-1) / (truth**2).mean()
    assert errors.median() < 1e-6
    assert (logits.argmax(-1) == truth.argmax(-1)).float().mean() > 0.9
