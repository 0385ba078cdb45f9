"""Experts on disk are guessed also where a residual has several streams: the tokens are those of experts in RAM, and
most guesses are right."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from gguf.constants import GGMLQuantizationType as Type

from moeserve.config.units import GIB
from moeserve.kv.layout import KvLayout
from moeserve.messages.steps import StepResult
from moeserve.models.registry import read_shape
from moeserve.models.sources.gguf import open_gguf
from moeserve.placement.expert_ram import expert_bytes
from moeserve.placement.sizes import ModelSizes
from moeserve.worker.loading.cpu.load import load_cpu_runner
from tests.gpu.driver import GREEDY, Driver, small_config
from tests.support.models import deepseek4_model, qwen4exp_model

STEPS = 12
MODULES: dict[str, Any] = {"qwen4exp": qwen4exp_model, "deepseek4": deepseek4_model}


def answer(model: Path, **options: object) -> list[StepResult]:
    config = small_config(model, device="cpu", threads=2, max_num_seqs=2, max_model_len=64, **options)
    driver, tokens = Driver(load_cpu_runner(config, lambda *_: None)), qwen4exp_model.text(8)[:9]
    first = driver.step([driver.new(0, tokens, GREEDY)], [driver.row(0, len(tokens), sample=True)])
    return [first, *(driver.step([], [driver.row(0, 1, sample=True)]) for _ in range(STEPS))]


@pytest.mark.parametrize("family", MODULES)
def test_guesses_change_no_token(family: str, tmp_path: Path) -> None:
    module = MODULES[family]
    model = module.write_model(module.new_model(8), tmp_path / "m.gguf", Type.Q8_0)
    file = open_gguf(model)
    everything = expert_bytes(ModelSizes.of(file.tensors, KvLayout(read_shape(file))))
    plain = answer(model)
    found = answer(model, expert_ram=5.5 / 8 * everything / GIB)
    assert [each.sampled for each in found] == [each.sampled for each in plain]
    counts = [each.expert_disk for each in found if each.expert_disk is not None]
    predicted, right = sum(each.predicted for each in counts), sum(each.predicted_right for each in counts)
    print(f"{family}: {right} of {predicted} guesses were right")
    assert sum(each.misses for each in counts) > 0
    assert predicted >= right > predicted / 2
