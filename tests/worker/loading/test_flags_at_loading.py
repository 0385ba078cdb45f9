"""Flags that only the loaded model can judge: none is taken and ignored, none goes wrong without a word."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from moeserve.cli.command_line import resolve
from moeserve.config import ServerConfig
from moeserve.errors import ConfigError
from moeserve.kv.capacity import SHARE_OF_FREE_MEMORY, KvMemoryBudget, plan_capacity
from moeserve.kv.layout import KvLayout
from moeserve.models.open import open_metadata
from moeserve.models.registry import read_shape
from moeserve.worker.loading.load import load_runner


@pytest.mark.parametrize(
    ("config", "flag"),
    [
        (ServerConfig(device="cpu", gpu_prefill_token_threshold=64), "--gpu-prefill-token-threshold"),
        (ServerConfig(device="cpu", gpus="2"), "--gpus"),
        (ServerConfig(device="cpu", parallel="tensor"), "--parallel"),
    ],
)
def test_a_flag_of_the_gpu_is_refused_without_one(config: ServerConfig, flag: str) -> None:
    with pytest.raises(ConfigError, match=f"{flag}: has no effect on the CPU engine"):
        load_runner(config, lambda *_: None)


def test_a_context_beyond_the_models_own_is_told(tiny_model: Path, caplog: pytest.LogCaptureFixture) -> None:
    model = read_shape(open_metadata(tiny_model))
    room = KvMemoryBudget("memory", 1 << 34, range(model.num_layers), SHARE_OF_FREE_MEMORY)
    plan_capacity(ServerConfig(max_model_len=model.context_length), KvLayout(model), [room])
    assert not caplog.records
    plan_capacity(ServerConfig(max_model_len=2 * model.context_length), KvLayout(model), [room])
    (record,) = caplog.records
    assert f"the model was trained for {model.context_length}, " in record.message


def test_the_cpu_engine_refuses_what_places_experts(tiny_model: Path) -> None:
    config = dataclasses.replace(resolve(ServerConfig(model=str(tiny_model))), num_gpu_experts=1)
    with pytest.raises(ConfigError, match="--num-gpu-experts: there is nothing to place"):
        load_runner(config, lambda *_: None)
