"""What transformers computes for a folder, beside the CPU engine."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import torch

from moeserve.kernels.quantize.reference import quantize
from tests.kernels.engines.model_engine import Engine
from tests.kernels.operations import ISAS, stream_of
from tests.kernels.weights import nmse
from tests.support.models.rounded_kv import round_kv

if TYPE_CHECKING:
    from transformers import PreTrainedModel

TOKENS = [(37 * i * i + 11 * i) % 4000 for i in range(60)]


def transformers_logits(model: PreTrainedModel, monkeypatch: pytest.MonkeyPatch) -> torch.Tensor:
    round_kv(model, monkeypatch)
    with torch.no_grad():
        return model(torch.tensor([TOKENS])).logits[0]


# Ends of the names of matrices that the engine keeps in floats, with inputs that it does not round.
_IN_FLOATS = ("gate.weight", "lm_head.weight", "shared_expert_gate.weight", "kv_b_proj.weight")


def logits_of_rounded_inputs(model: PreTrainedModel, monkeypatch: pytest.MonkeyPatch) -> torch.Tensor:
    """The same in float32 with the inputs of quantised matrices rounded to 8 bits in groups of 32, as the engine's
    kernels round them: what of a distance is arithmetic that was chosen."""
    model.set_experts_implementation("eager")  # a product for each expert, which is replaced here
    floats = {weight.data_ptr() for name, weight in model.named_parameters() if name.endswith(_IN_FLOATS)}
    linear = torch.nn.functional.linear

    def rounded(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        if weight.data_ptr() not in floats:
            x = quantize(x.flatten(0, -2)).dequantize().view(x.shape).to(x.dtype)
        return linear(x, weight, bias)

    with monkeypatch.context() as patched, torch.no_grad():
        patched.setattr(torch.nn.functional, "linear", rounded)
        logits: torch.Tensor = model(torch.tensor([TOKENS])).logits[0]
    return logits


def assert_is_what_transformers_computes(
    folder: Path, model: type[PreTrainedModel], monkeypatch: pytest.MonkeyPatch
) -> None:
    truth = transformers_logits(model.from_pretrained(folder, dtype=torch.float32), monkeypatch)
    for isa in ISAS:
        logits = Engine(stream_of(isa), folder).logits(TOKENS)
        assert nmse(logits, truth) < 1e-7
        assert torch.equal(logits.argmax(-1), truth.argmax(-1))
