"""Folders of 8-bit floats and of NVFP4 on the GPU engine, under Triton's interpreter where there is no GPU."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.kernels.triton_device import DEVICE  # isort: skip  (first: it sets up the interpreter)
from moeserve.models.open import open_folder
from moeserve.worker.loading.gpu.load import load_gpu_runner
from moeserve.worker.loading.start import Start
from tests.gpu.driver import Driver, small_config
from tests.kernels.model_engine import Engine
from tests.kernels.operations import stream_of
from tests.kernels.transformers_logits import TOKENS
from tests.support.hugging_face_model import write_model
from tests.support.quantized_folders import BY_NAME, quantize_folder

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


@pytest.mark.slow  # a minute of CPU time each
@pytest.mark.parametrize("placement", PLACEMENTS)
@pytest.mark.parametrize("scheme", ["fp8-block", "nvfp4"])
def test_the_gpu_computes_what_the_cpu_does(scheme: str, placement: str, tmp_path: Path) -> None:
    """Small batches round activations to int8, larger ones keep floats; the CPU's are compared without rounding."""
    sizes = {"num_hidden_layers": 1, "hidden_size": 256, "moe_intermediate_size": 128, "num_experts": 4}
    write_model(tmp_path / "floats", torch.float32, **sizes)
    quantize_folder(tmp_path / "floats", tmp_path / "quantized", BY_NAME[scheme])
    truth = Engine(stream_of("plain"), tmp_path / "floats").logits(TOKENS).log_softmax(-1)
    config = small_config(tmp_path / "quantized", **(SIZES | PLACEMENTS[placement]))
    source = open_folder(tmp_path / "quantized")
    runner = load_gpu_runner(config, source, lambda *_: None, torch.device(DEVICE), Start())
    for chunk, most in ((5, 0.1), (20, 0.1 if placement == "half of the experts in RAM" else 2e-3)):
        tokens = list(TOKENS[:chunk])
        found = Driver(runner).score(0, tokens, chunk)[: chunk - 1]
        errors = [
            abs(a.logprob - truth[i, t].item())
            for i, (a, t) in enumerate(zip(found, tokens[1:], strict=True))
        ]
        assert torch.tensor(errors).median() < most
