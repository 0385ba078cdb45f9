"""Experts on disk: fewer slots in RAM than experts, and the bits of a model that is all in RAM."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.conftest import OWN_FIXTURES, family_models
from tests.kernels.engines.model_engine import Engine, Fixture
from tests.kernels.operations import stream_of

MODELS = [
    *(OWN_FIXTURES / f"tiny-{name}-q4_k_m.gguf" for name in ("qwen2moe", "qwen3next", "llama4")),
    OWN_FIXTURES / "tiny-nemotronhmoe-f16.gguf",
    *(model for family in ("gptoss", "deepseek2", "gemma4", "glm4moe") for model in family_models(family)),
]

TOKENS = 64  # of the fixture's, each of which chooses its experts


@pytest.mark.parametrize("model", MODELS, ids=lambda model: model.stem)
def test_slots_do_not_change_a_bit(model: Path) -> None:
    """With the fewest slots token by token, with one more and with all but one in steps that want more than these."""
    tokens = Fixture.load(model, model.parent).tokens[-1][:TOKENS]
    in_ram = Engine(stream_of("", 2), model)
    whole = in_ram.logits(tokens)
    top_k = in_ram.config.top_k
    chunks = {top_k: (1, len(tokens)), top_k + 1: (7,), in_ram.config.num_experts - 1: (33, len(tokens))}
    for slots, lengths in chunks.items():
        engine = Engine(stream_of("", 2), model, slots=slots)
        assert engine.model.disk is not None
        for chunk in lengths:
            assert torch.equal(engine.logits(tokens, chunk), whole), (slots, chunk)
        counts = engine.model.disk.native.counts()
        assert counts.misses > 0
        assert not engine.model.disk.native.take_failures()
