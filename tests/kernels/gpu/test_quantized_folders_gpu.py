"""Folders of 8-bit floats, NVFP4, 2 and 3 bits, and in act-order, on the GPU engine or under Triton's interpreter."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.kernels.triton_device import DEVICE  # isort: skip  (first: it sets up the interpreter)
from moeserve.models.open import open_folder
from moeserve.worker.engines.gpu.engine import GpuEngine
from moeserve.worker.loading.gpu.load import load_gpu_runner
from moeserve.worker.loading.start import Start
from moeserve.worker.runner import Runner
from tests.gpu.driver import Driver, small_config
from tests.kernels.engines.model_engine import Engine
from tests.kernels.families.transformers_logits import TOKENS
from tests.kernels.operations import stream_of
from tests.support.models import quantized_folders
from tests.support.models.hugging_face_model import write_model
from tests.support.models.quantized_folders import BY_NAME, quantize_folder
from tests.support.worker.random_promotions import RandomPolicy

SIZES = {
    "max_num_seqs": 2,
    "max_num_batched_tokens": 32,
    "max_model_len": 64,
    "max_total_tokens": 64,
    "threads": 1,
}
PLACEMENTS: dict[str, dict[str, Any]] = {
    "all on the GPU": {},
    "half of the experts in RAM": {"num_gpu_experts": 2, "gpu_prefill_token_threshold": 1000},
    "none on the GPU, streamed": {"num_gpu_experts": 0, "gpu_prefill_token_threshold": 1},
}


def write_folder(tmp_path: Path, scheme: str, num_experts: int = 4) -> torch.Tensor:
    """Writes the folder `quantized`. Returns the log-probabilities of its own values, float32 [tokens, vocab]."""
    sizes = {
        "num_hidden_layers": 1,
        "hidden_size": 256,
        "moe_intermediate_size": 128,
        "num_experts": num_experts,
    }
    write_model(tmp_path / "floats", torch.float32, **sizes)
    quantize_folder(tmp_path / "floats", tmp_path / "quantized", BY_NAME[scheme])
    return Engine(stream_of("plain"), tmp_path / "floats").logits(TOKENS).log_softmax(-1)


def runner_of(folder: Path, placement: str) -> Runner:
    config = small_config(folder, **(SIZES | PLACEMENTS[placement]))
    return load_gpu_runner(config, open_folder(folder), lambda *_: None, torch.device(DEVICE), Start())


def median_error(runner: Runner, truth: torch.Tensor, tokens: list[int], chunk: int) -> float:
    found = Driver(runner).score(0, tokens, chunk)[: len(tokens) - 1]
    errors = [
        abs(a.logprob - truth[i, t].item()) for i, (a, t) in enumerate(zip(found, tokens[1:], strict=True))
    ]
    return torch.tensor(errors).median().item()


@pytest.mark.slow  # a minute of CPU time each
@pytest.mark.parametrize("placement", PLACEMENTS)
@pytest.mark.parametrize("scheme", ["fp8-block", "nvfp4", "gptq-order", "gptq-2", "gptq-3"])
def test_the_gpu_computes_what_the_cpu_does(scheme: str, placement: str, tmp_path: Path) -> None:
    """Small batches round activations to int8, larger ones keep floats; the CPU's are compared without rounding."""
    truth = write_folder(tmp_path, scheme)
    runner = runner_of(tmp_path / "quantized", placement)
    for chunk, most in ((5, 0.1), (20, 0.1 if placement == "half of the experts in RAM" else 2e-3)):
        assert median_error(runner, truth, list(TOKENS[:chunk]), chunk) < most


@pytest.mark.slow
def test_a_router_in_the_order_of_its_activations(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    matrices = re.compile(rf"{quantized_folders.LINEAR.pattern}|model\.layers\..*mlp\.gate\.weight")
    monkeypatch.setattr(quantized_folders, "LINEAR", matrices)
    truth = write_folder(tmp_path, "gptq-order", num_experts=8)  # eight rows' zero points are a word
    assert open_folder(tmp_path / "quantized").tensors["blk.0.ffn_gate_inp.weight"].order is not None
    runner = runner_of(tmp_path / "quantized", "all on the GPU")
    for chunk, most in ((5, 0.1), (20, 2e-3)):
        assert median_error(runner, truth, list(TOKENS[:chunk]), chunk) < most


@pytest.mark.slow
def test_experts_that_move_keep_the_order_of_their_columns(tmp_path: Path) -> None:
    truth = write_folder(tmp_path, "gptq-order")
    runner = runner_of(tmp_path / "quantized", "half of the experts in RAM")
    assert isinstance(runner.engine, GpuEngine)
    cache = runner.engine.expert_cache
    assert cache is not None
    cache.policy = RandomPolicy(cache._maps.on_gpu.copy(), np.ones((1, 4), np.bool_))
    assert median_error(runner, truth, list(TOKENS[:6]), 1) < 0.1
    assert cache.totals.promotions > 0
