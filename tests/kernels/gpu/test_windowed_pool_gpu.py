"""The GPU worker with a KV pool of its own for windowed layers, under Triton's interpreter, or on a GPU where there is
one."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.kernels.triton_device import DEVICE  # isort: skip  (first: it sets up the interpreter)
from gguf.constants import GGMLQuantizationType as Type

from moeserve.models.open import open_model
from moeserve.worker.loading.gpu.load import load_gpu_runner
from moeserve.worker.loading.start import Start
from moeserve.worker.runner import Runner
from tests.gpu.driver import small_config
from tests.support.models.gemma_file import EXPERTS, write_gemma
from tests.support.worker.windowed_requests import talk

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]  # seven minutes of CPU time


def runner_of(model: Path, ratio: float) -> Runner:
    config = small_config(
        model, threads=1, max_num_seqs=2, max_num_batched_tokens=16, max_model_len=64, max_total_tokens=160,
        num_gpu_experts=EXPERTS, kv_window_ratio=ratio,
    )  # fmt: skip
    return load_gpu_runner(config, open_model(model), lambda *_: None, torch.device(DEVICE), Start())


def test_the_same_as_with_one_pool(tmp_path: Path) -> None:
    """Each token as likely, within what the order of sums may change."""
    model = write_gemma(tmp_path / "gemma.gguf", Type.F32)
    one, two = (runner_of(model, ratio) for ratio in (0.0, 0.2))
    assert one.ready().num_window_slots == 0 < two.ready().num_window_slots
    _, expected = talk(one)
    scheduler, found = talk(two)
    assert scheduler.load_report().window_hits >= 2
    for id, answer in found.items():
        assert [token for token, _ in answer] == [token for token, _ in expected[id]]
        for (_, logprob), (_, other) in zip(answer, expected[id], strict=True):
            assert abs(logprob - other) < 1e-3
