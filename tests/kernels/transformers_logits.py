"""What transformers computes for a folder, beside the CPU engine."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import torch

from tests.kernels.model_engine import Engine
from tests.kernels.operations import ISAS, stream_of
from tests.kernels.weights import nmse
from tests.support.rounded_kv import round_kv

if TYPE_CHECKING:
    from transformers import PreTrainedModel

TOKENS = [(37 * i * i + 11 * i) % 4000 for i in range(60)]


def transformers_logits(model: PreTrainedModel, monkeypatch: pytest.MonkeyPatch) -> torch.Tensor:
    round_kv(model, monkeypatch)
    with torch.no_grad():
        return model(torch.tensor([TOKENS])).logits[0]


def assert_is_what_transformers_computes(
    folder: Path, model: type[PreTrainedModel], monkeypatch: pytest.MonkeyPatch
) -> None:
    truth = transformers_logits(model.from_pretrained(folder, dtype=torch.float32), monkeypatch)
    for isa in ISAS:
        logits = Engine(stream_of(isa), folder).logits(TOKENS)
        assert nmse(logits, truth) < 1e-7
        assert torch.equal(logits.argmax(-1), truth.argmax(-1))
