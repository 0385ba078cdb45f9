"""A model divided among several ranks, each a process, under Triton's interpreter: they give what one gives."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from gguf.constants import GGMLQuantizationType

from tests.kernels.triton_device import DEVICE  # isort: skip  (first: it sets up the interpreter)
from moeserve.config import ServerConfig
from moeserve.messages.steps import StepPlan, StepResult
from moeserve.models.open import open_dummy_model
from moeserve.worker.engines.gpu.engine import GpuEngine
from moeserve.worker.engines.gpu.steps import step_path
from moeserve.worker.group.leader import LeaderGroup
from moeserve.worker.group.ranks import RankGroup
from moeserve.worker.loading.gpu.load import load_gpu_runner
from moeserve.worker.loading.group.load import lead
from moeserve.worker.loading.start import Start
from moeserve.worker.runner import Runner
from tests.gpu.driver import GREEDY, Driver, small_config
from tests.kernels.group.follower import LEAST_ROWS
from tests.kernels.group.shared_sums import connect, connected
from tests.support.models.model_header import qwen3moe, write_header

pytestmark = [
    pytest.mark.slow,  # ten minutes of CPU time
    pytest.mark.timeout(900),
    pytest.mark.skipif(DEVICE == "cuda", reason="of the interpreter; tests/gpu has several GPUs"),
]
PROMPT = [3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5, 8, 9, 7, 9, 3, 2, 3, 8, 4]
FOLLOWER = (sys.executable, "-m", "tests.kernels.group.follower")


LAYERS = 2


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> ServerConfig:
    path = tmp_path_factory.mktemp("model") / "small.gguf"
    shape = qwen3moe(
        hidden_size=128, num_layers=LAYERS, num_heads=4, num_kv_heads=2, head_dim=32, num_experts=4, top_k=2,
        expert_width=64, context_length=64, vocab_size=64,
    )  # fmt: skip
    write_header(path, shape, lambda name, layers: GGMLQuantizationType.F32)
    return small_config(
        path, load_format="dummy", threads=1, max_num_seqs=4, max_num_batched_tokens=20, max_model_len=32,
        max_total_tokens=64,
    )  # fmt: skip


# How a model is divided, and how many of a rank's experts of a layer are not in RAM.
WAYS = [("tensor", None), ("layers", None)]
WITH_RAM = [("tensor", 1), ("layers", 2)]
WITHIN_NORMS = ("tensor, sums within norms", None)
both_ways = pytest.mark.parametrize("two_ranks", WAYS, indirect=True, ids=str)


@pytest.fixture(scope="module")
def two_ranks(config: ServerConfig, request: pytest.FixtureRequest) -> Iterator[Runner]:
    way, num_gpu_experts = request.param
    parallel, _, within_norms = way.partition(", ")
    command = (*FOLLOWER, "sums-within-norms") if within_norms else FOLLOWER
    divided = replace(config, parallel=parallel, num_gpu_experts=num_gpu_experts, threads=2)
    group = LeaderGroup(divided, [], 2, command)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(step_path, "LEAST_PART_ROWS", LEAST_ROWS)
        if within_norms:
            patch.setattr(RankGroup, "connect", connect)
        runner = lead(divided, open_dummy_model(Path(config.model)), lambda *_: None, group, Start())
    assert isinstance(runner.engine, GpuEngine)
    assert (runner.engine.micro_batches is not None) == (request.param == ("layers", None))
    yield runner
    group.close()


@pytest.fixture(scope="module")
def one_rank(config: ServerConfig) -> Runner:
    source = open_dummy_model(Path(config.model))
    return load_gpu_runner(config, source, lambda *_: None, torch.device(DEVICE), Start())


@pytest.mark.parametrize(
    ("two_ranks", "chunk"),
    [*((way, 20) for way in [*WAYS, *WITH_RAM, WITHIN_NORMS]), *((way, 1) for way in [*WAYS, WITHIN_NORMS])],
    indirect=["two_ranks"],
    ids=str,
)
def test_two_ranks_give_what_one_gives(two_ranks: Runner, one_rank: Runner, chunk: int) -> None:
    tokens = PROMPT[: 20 if chunk > 1 else 2]
    found = Driver(two_ranks).score(0, tokens, chunk)
    expected = Driver(one_rank).score(0, tokens, chunk)
    for a, b in zip(found, expected, strict=True):
        assert a.logprob == pytest.approx(b.logprob, abs=2e-4)
        assert a.top_ids[0] == b.top_ids[0]


@pytest.mark.parametrize("two_ranks", [WITHIN_NORMS], indirect=True, ids=str)
def test_sums_are_within_norms(two_ranks: Runner) -> None:
    Driver(two_ranks).score(0, PROMPT[:2], 1)
    assert connected[-1].total(1).any()


@both_ways
def test_sampled_tokens_reach_the_follower(two_ranks: Runner, one_rank: Runner) -> None:
    assert Driver(two_ranks).generate(0, PROMPT[:4], 2) == Driver(one_rank).generate(0, PROMPT[:4], 2)


@both_ways
def test_rows_that_decode_together(two_ranks: Runner, one_rank: Runner) -> None:
    """Three of a step of four: divided by layers they go in two parts."""
    found, expected = (decoded_together(runner) for runner in (two_ranks, one_rank))
    assert found == expected


def decoded_together(runner: Runner) -> list[list[int]]:
    driver = Driver(runner)
    starts = [PROMPT[:2], PROMPT[2:4], PROMPT[4:6]]
    new = [driver.new(slot, tokens, GREEDY) for slot, tokens in enumerate(starts)]
    driver.step(new, [driver.row(slot, 2, sample=True) for slot in range(3)])
    steps = [driver.step([], [driver.row(slot, 1, sample=True) for slot in range(3)]) for _ in range(1)]
    return [[entry.token_id for entry in step.sampled] for step in steps]


@pytest.mark.parametrize("two_ranks", [WAYS[0]], indirect=True, ids=str)
def test_steps_launched_ahead(two_ranks: Runner, one_rank: Runner) -> None:
    """Each GPU takes the tokens of the step before from the first one, while the host has not seen them."""
    drivers = [Driver(runner) for runner in (two_ranks, one_rank)]
    found: list[StepResult] = []
    expected: list[StepResult] = []
    for slot in range(2):  # the second request comes when all has been told
        start = PROMPT[4 * slot : 4 * slot + 4]
        for driver, steps in zip(drivers, (found, expected), strict=True):
            plans = [StepPlan(1, [driver.new(slot, start, GREEDY)], [driver.row(slot, 4, sample=True)])]
            plans += [StepPlan(2 + i, [], [driver.row(slot, 1, sample=True)]) for i in range(3)]
            steps += run_ahead(driver.runner, plans)
    assert [step.sampled[0].token_id for step in found] == [step.sampled[0].token_id for step in expected]
    assert len({step.sampled[0].token_id for step in expected}) > 2


def run_ahead(runner: Runner, plans: list[StepPlan]) -> list[StepResult]:
    runner.start(plans[0])
    results = []
    for plan in plans[1:]:
        assert runner.may_follow(plan)
        results.append(runner.advance(plan))
        runner.launch_rest()
    return [*results, runner.finish()]


@both_ways
def test_counts_of_experts(two_ranks: Runner, one_rank: Runner) -> None:
    """In every layer each token has been routed to two experts, on whichever rank they are."""
    before = two_ranks.expert_use(), one_rank.expert_use()
    for runner in (two_ranks, one_rank):
        Driver(runner).score(0, PROMPT, 20)
    counted = [
        np.frombuffer(runner.expert_use().tokens, np.int64) - np.frombuffer(use.tokens, np.int64)
        for runner, use in zip((two_ranks, one_rank), before, strict=True)
    ]
    assert counted[0].tolist() == counted[1].tolist()
    assert counted[0].sum() == LAYERS * 2 * len(PROMPT)
    assert two_ranks.expert_use().layers == LAYERS


@both_ways
def test_memory_is_divided(two_ranks: Runner, one_rank: Runner) -> None:
    both, one = two_ranks.ready(), one_rank.ready()
    assert both.kv_bytes == one.kv_bytes
    assert both.num_kv_slots == one.num_kv_slots
    assert isinstance(two_ranks.engine, GpuEngine)
    if two_ranks.engine.micro_batches is not None:  # by layers nothing is there twice
        assert both.weight_bytes == one.weight_bytes
    else:  # the embedding and the head are
        assert one.weight_bytes < both.weight_bytes < 1.5 * one.weight_bytes
    assert both.device == "cpu (2 x Triton's interpreter)"
