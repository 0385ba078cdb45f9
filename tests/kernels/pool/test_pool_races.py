"""A phase of the pool is over when all of it is computed, not before. Many more threads than cores are preempted in the
middle of their work again and again: whatever reads too early reads something else."""

from __future__ import annotations

import pytest
import torch

from tests.conftest import TINY_MODEL
from tests.kernels.engines.model_engine import Engine
from tests.kernels.operations import ISAS, stream_of

THREADS = 16
TOKENS = list(range(3, 43))
PASSES = 6


@pytest.mark.parametrize("isa", ISAS)
def test_sixteen_threads_compute_what_one_does(isa: str) -> None:
    """A chunk of a prompt, then single tokens, whose operations are small."""
    expected = _logits(Engine(stream_of(isa, threads=1), TINY_MODEL))
    engine = Engine(stream_of(isa, threads=THREADS), TINY_MODEL)
    for number in range(PASSES):
        assert torch.equal(_logits(engine), expected), f"pass {number}"


def _logits(engine: Engine) -> torch.Tensor:
    return torch.cat([engine.logits(TOKENS), engine.logits(TOKENS[:24], chunk=1)])
