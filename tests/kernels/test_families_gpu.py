"""Architectures beyond Qwen3-MoE on the GPU engine, under Triton's interpreter where there is no GPU."""

from __future__ import annotations

import pytest
import torch

from tests.kernels.triton_device import DEVICE  # isort: skip  (first: it sets up the interpreter)
from moeserve.models.open import open_model
from moeserve.worker.gpu_loading import load_gpu_runner
from moeserve.worker.runner import Runner
from tests.conftest import OWN_FIXTURES
from tests.gpu.driver import Driver, small_config
from tests.kernels.test_model import Fixture

MODEL = OWN_FIXTURES / "tiny-qwen2moe-q4_k_m.gguf"
SIZES = {
    "max_num_seqs": 2,
    "max_num_batched_tokens": 32,
    "max_model_len": 64,
    "max_total_tokens": 128,
    "threads": 1,
}
FIXTURE = Fixture.load(MODEL, OWN_FIXTURES)


def errors(runner: Runner, chunk: int) -> torch.Tensor:
    """Of the log-probabilities of `chunk` tokens that are one step: their distance from Hugging Face's in float32."""
    tokens, truth = FIXTURE.tokens[-1][:chunk], FIXTURE.truth[-1].log_softmax(-1)
    found = Driver(runner).score(0, tokens, chunk)[: chunk - 1]
    expected = [truth[i, token].item() for i, token in enumerate(tokens[1:])]
    return torch.tensor([abs(a.logprob - b) for a, b in zip(found, expected, strict=True)])


PLACEMENTS = {
    "all on the GPU": {},
    "half of the experts in RAM": {"num_gpu_experts": 4, "gpu_prefill_token_threshold": 1000},
    "none on the GPU, streamed": {"num_gpu_experts": 0, "gpu_prefill_token_threshold": 1},
    "two layers on the GPU": {"n_gpu_layers": 2, "num_gpu_experts": 2, "gpu_prefill_token_threshold": 1000},
}


@pytest.mark.slow  # three minutes of CPU time each
@pytest.mark.parametrize("options", PLACEMENTS.values(), ids=list(PLACEMENTS))
def test_as_near_the_truth_as_the_way_of_computing_allows(options: dict[str, object]) -> None:
    """Small batches round activations to int8, as experts in RAM do; larger ones keep floats, here of 32 bits."""
    config = small_config(MODEL, **(SIZES | options))
    runner = load_gpu_runner(config, open_model(MODEL), lambda *_: None, torch.device(DEVICE))
    assert errors(runner, 5).median() < 0.1
    large = errors(runner, 20)
    keeps_floats = options.get("num_gpu_experts", 8) == 8 or options.get("gpu_prefill_token_threshold") == 1
    assert large.median() < (2e-3 if keeps_floats else 0.1)
