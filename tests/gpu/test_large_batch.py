"""Prompts of thousands of tokens in one step, whose weights are unpacked first, on a GPU."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from moeserve.models.step_buffers import UNPACK_ROWS
from moeserve.worker.loading import load_runner
from tests.conftest import OWN_FIXTURES
from tests.gpu.driver import Driver, small_config

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")

LENGTH = 3 * UNPACK_ROWS
PLACEMENTS = {
    "all on the GPU": {},
    "half of the experts in RAM": {"num_gpu_experts": 4, "gpu_prefill_token_threshold": 1},
}


@pytest.mark.parametrize("placement", PLACEMENTS)
@pytest.mark.parametrize("model", sorted(OWN_FIXTURES.glob("tiny-*.gguf")), ids=lambda path: path.stem)
def test_a_prompt_at_once_gives_what_its_chunks_give(model: Path, placement: str) -> None:
    """What lies between is rounded alike, sums end otherwise: log-probabilities differ by little, at all positions."""
    sizes = {"max_num_batched_tokens": LENGTH, "max_model_len": LENGTH + 8, "max_total_tokens": 2 * LENGTH}
    config = small_config(model, device="cuda", threads=4, **(sizes | PLACEMENTS[placement]))
    driver = Driver(load_runner(config, lambda *_: None))
    tokens = np.random.default_rng(0).integers(5, 500, LENGTH).tolist()
    at_once, in_chunks = (
        np.array([entry.logprob for entry in driver.score(0, tokens, chunk)])
        for chunk in (LENGTH, UNPACK_ROWS)
    )
    apart = np.abs(at_once - in_chunks)
    print(
        f"LARGE {model.stem}, {placement}: median {np.median(apart):.1e}, 99% {np.quantile(apart, 0.99):.1e}"
    )
    assert np.median(apart) < 5e-3
    assert np.quantile(apart, 0.99) < 0.1
