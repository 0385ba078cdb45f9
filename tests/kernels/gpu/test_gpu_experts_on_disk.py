"""A GPU worker with experts in three tiers (GPU slots, RAM slots, disk), under Triton's interpreter or on a GPU: its
tokens are those of a worker with all of them in RAM, whatever moves. Random weights of a very small shape."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch

from tests.kernels.triton_device import DEVICE  # isort: skip  (first: it sets up the interpreter)
from gguf.constants import GGMLQuantizationType as Type

from moeserve.config.units import GIB
from moeserve.errors import ConfigError
from moeserve.kv.layout import KvLayout
from moeserve.messages.expert_disk import ExpertDiskCounts
from moeserve.messages.sampling import SamplingParams
from moeserve.messages.steps import StepResult
from moeserve.models.registry import read_shape
from moeserve.models.sources.gguf import open_gguf
from moeserve.placement.sizes import ModelSizes
from moeserve.worker.engines.gpu.engine import GpuEngine
from moeserve.worker.loading.gpu.load import load_gpu_runner
from moeserve.worker.loading.start import Start
from moeserve.worker.runner import Runner
from tests.gpu.driver import Driver, small_config
from tests.support.models.model_header import qwen3moe, write_header, write_weights
from tests.support.worker.random_promotions import RandomPolicy

pytestmark = pytest.mark.slow  # a minute and a half of CPU time under the interpreter

LAYERS, EXPERTS, TOP_K = 2, 8, 2
ON_GPU = 2  # of a layer
GREEDY = SamplingParams(max_tokens=1 << 20, temperature=0.0)
PROMPT = [3, 1, 4, 1, 5]
STEPS = 40 if DEVICE == "cuda" else 3


def kind_of(name: str, layers: int) -> Type:
    """A type that the interpreter is quick with."""
    return Type.F32 if "ffn_gate_inp" in name else Type.Q8_0


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model") / "small.gguf"
    shape = qwen3moe(
        hidden_size=64,
        num_layers=LAYERS,
        num_heads=2,
        num_kv_heads=1,
        head_dim=64,
        num_experts=EXPERTS,
        top_k=TOP_K,
        expert_width=64,
        context_length=64,
        vocab_size=64,
    )
    write_header(path, shape, kind_of)
    write_weights(path)
    return path


def ram_for(model: Path, experts: int) -> float:
    """GiB for as many of each layer's experts."""
    file = open_gguf(model)
    sizes = ModelSizes.of(file.tensors, KvLayout(read_shape(file)))
    return (experts + 0.5) * sum(layer.expert.cpu for layer in sizes.layers) / GIB


def runner_of(model: Path, **options: object) -> Runner:
    config = small_config(
        model, threads=2, max_num_seqs=2, max_num_batched_tokens=32, max_model_len=64, max_total_tokens=128,
        num_gpu_experts=ON_GPU, gpu_prefill_token_threshold=1000, **options,
    )  # fmt: skip
    return load_gpu_runner(config, open_gguf(model), lambda *_: None, torch.device(DEVICE), Start())


def answer(driver: Driver, steps: int = STEPS) -> list[StepResult]:
    """A prompt that uses more experts than RAM has slots, and its answer."""
    results = [driver.step([driver.new(0, PROMPT, GREEDY)], [driver.row(0, len(PROMPT), sample=True)])]
    return results + [driver.step([], [driver.row(0, 1, sample=True)]) for _ in range(steps)]


def tokens(results: list[StepResult]) -> list[int]:
    return [entry.token_id for result in results for entry in result.sampled]


@pytest.fixture(scope="module")
def expected(model: Path) -> list[int]:
    return tokens(answer(Driver(runner_of(model, expert_cache="off"))))


@pytest.fixture(scope="module")
def cached(model: Path) -> Runner:
    """Three tiers."""
    return runner_of(model, expert_ram=ram_for(model, 4))


def test_ram_slots_change_no_token(model: Path, expected: list[int]) -> None:
    driver = Driver(runner_of(model, expert_cache="off", expert_ram=ram_for(model, TOP_K)))
    results = answer(driver)
    assert tokens(results) == expected
    counts = ExpertDiskCounts()
    for result in results:
        assert not result.failed_rows
        assert result.expert_disk is not None
        counts = counts.plus(result.expert_disk)
    assert counts.misses > 0
    assert counts.bytes > 0


def test_promotions_come_from_ram_and_change_no_token(cached: Runner, expected: list[int]) -> None:
    assert isinstance(cached.engine, GpuEngine)
    cache, driver = cached.engine.expert_cache, Driver(cached)
    assert cache is not None
    cache.policy = PromotesWhatRamHas(cache._maps.on_gpu)
    for _ in range(1 if DEVICE == "cpu" else 20):
        driver.free(0)
        results = answer(driver)
        assert tokens(results) == expected
        assert not any(result.failed_rows for result in results)
    use = cached.expert_use()
    on_gpu, on_disk = (np.frombuffer(of, np.uint8) for of in (use.on_gpu, use.on_disk))
    assert not (on_gpu & on_disk).any()
    assert LAYERS * (EXPERTS - ON_GPU - 4) <= on_disk.sum() < LAYERS * (EXPERTS - ON_GPU)
    assert cache.totals.promotions >= LAYERS


class PromotesWhatRamHas(RandomPolicy):
    """Each step one expert of each layer, as the cache's own policy: only of those that can be promoted now."""

    def __init__(self, cached: np.ndarray) -> None:
        super().__init__(cached, np.ones_like(cached))

    def choose(self, most: int, *, pays: bool, ready: np.ndarray | None = None) -> np.ndarray:
        assert ready is not None
        moves = []
        for layer, (here, may) in enumerate(zip(self._cached, ready, strict=True)):
            coming = np.flatnonzero(may & ~here)
            if not len(coming):
                continue
            incoming, outgoing = int(coming[0]), int(self._rng.choice(np.flatnonzero(here)))
            here[incoming], here[outgoing] = True, False
            moves.append((layer, incoming, outgoing))
        return np.array(moves, np.int64).reshape(-1, 3)


def test_a_truncated_file_ends_the_rows_that_needed_it(tmp_path: Path, model: Path) -> None:
    own = Path(shutil.copy(model, tmp_path / "model.gguf"))
    driver = Driver(runner_of(own, expert_cache="off", expert_ram=ram_for(model, TOP_K)))
    whole, changed_ns = own.read_bytes(), own.stat().st_mtime_ns
    os.truncate(own, 4096)
    failed = driver.step(
        [driver.new(0, PROMPT, GREEDY)], [driver.row(0, len(PROMPT), sample=True)]
    ).failed_rows
    assert "could not be read from disk: the file ends at byte" in failed[0]
    own.write_bytes(whole)
    os.utime(own, ns=(changed_ns, changed_ns))
    driver.free(0)
    again = driver.step([driver.new(0, PROMPT, GREEDY)], [driver.row(0, len(PROMPT), sample=True)])
    assert not again.failed_rows


def test_too_little_ram_for_one_token_is_refused(model: Path) -> None:
    with pytest.raises(ConfigError, match="the experts of one token take"):
        runner_of(model, expert_ram=ram_for(model, 1))
