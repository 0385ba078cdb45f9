"""A model divided among several ranks, each a process, under Triton's interpreter: they give what one gives."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from gguf.constants import GGMLQuantizationType

from tests.kernels.triton_device import DEVICE  # isort: skip  (first: it sets up the interpreter)
from benchmarks.header import qwen3moe, write_header
from moeserve.config import ServerConfig
from moeserve.models.open import open_dummy_model
from moeserve.worker.gpu_loading import load_gpu_runner
from moeserve.worker.group.leader import LeaderGroup
from moeserve.worker.group.loading import lead
from moeserve.worker.runner import Runner
from tests.gpu.driver import Driver, small_config

pytestmark = [
    pytest.mark.slow,  # three minutes of CPU time
    pytest.mark.skipif(DEVICE == "cuda", reason="of the interpreter; tests/gpu has several GPUs"),
]
PROMPT = [3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5, 8, 9, 7, 9, 3, 2, 3, 8, 4]
FOLLOWER = (sys.executable, "-m", "tests.kernels.follower")


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> ServerConfig:
    path = tmp_path_factory.mktemp("model") / "small.gguf"
    shape = qwen3moe(
        hidden_size=128, num_layers=1, num_heads=4, num_kv_heads=2, head_dim=32, num_experts=4, top_k=2,
        expert_width=64, context_length=64, vocab_size=64,
    )  # fmt: skip
    write_header(path, shape, lambda name, layers: GGMLQuantizationType.F32)
    return small_config(
        path, load_format="dummy", threads=1, max_num_seqs=1, max_num_batched_tokens=20, max_model_len=32,
        max_total_tokens=64,
    )  # fmt: skip


@pytest.fixture(scope="module")
def two_ranks(config: ServerConfig) -> Iterator[Runner]:
    group = LeaderGroup(config, [], 2, FOLLOWER)
    yield lead(config, open_dummy_model(Path(config.model)), lambda *_: None, group)
    group.close()


@pytest.fixture(scope="module")
def one_rank(config: ServerConfig) -> Runner:
    source = open_dummy_model(Path(config.model))
    return load_gpu_runner(config, source, lambda *_: None, torch.device(DEVICE))


@pytest.mark.parametrize("chunk", [20, 1], ids=["a large step", "decode steps"])
def test_two_ranks_give_what_one_gives(two_ranks: Runner, one_rank: Runner, chunk: int) -> None:
    tokens = PROMPT[: 20 if chunk > 1 else 2]
    found = Driver(two_ranks).score(0, tokens, chunk)
    expected = Driver(one_rank).score(0, tokens, chunk)
    for a, b in zip(found, expected, strict=True):
        assert a.logprob == pytest.approx(b.logprob, abs=2e-4)
        assert a.top_ids[0] == b.top_ids[0]


def test_sampled_tokens_reach_the_follower(two_ranks: Runner, one_rank: Runner) -> None:
    assert Driver(two_ranks).generate(0, PROMPT[:4], 2) == Driver(one_rank).generate(0, PROMPT[:4], 2)


def test_memory_is_divided(two_ranks: Runner, one_rank: Runner) -> None:
    both, one = two_ranks.ready(), one_rank.ready()
    assert both.kv_bytes == one.kv_bytes
    assert both.num_kv_slots == one.num_kv_slots
    assert (
        one.weight_bytes < both.weight_bytes < 1.5 * one.weight_bytes
    )  # the embedding and the head are twice there
    assert both.device == "cpu (2 x Triton's interpreter)"
