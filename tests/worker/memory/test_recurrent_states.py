"""A recurrent model on the CPU's worker: nothing around a sequence changes its bits; its state is where plans say."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from moeserve.cli.bench.engine import EngineBench
from moeserve.messages.sampling import TokenLogprob
from moeserve.messages.steps import NewSeq, Row, StepPlan
from moeserve.worker.loading.cpu.load import load_cpu_runner
from moeserve.worker.loading.self_test import check_logits
from moeserve.worker.runner import Runner
from tests.conftest import OWN_FIXTURES, family_models
from tests.gpu.driver import SCORED, Driver, small_config
from tests.kernels.engines.model_engine import Fixture

MODELS = [
    OWN_FIXTURES / "tiny-qwen3next-q4_k_m.gguf",
    OWN_FIXTURES / "tiny-kimilinear-f16.gguf",
    OWN_FIXTURES / "tiny-nemotronhmoe-f16.gguf",
    OWN_FIXTURES / "tiny-falconh1norm-f16.gguf",
    *family_models("qwen35moe")[-1:],
]
PAGE = 48


@pytest.fixture(scope="module", params=MODELS, ids=lambda model: model.stem)
def model(request: pytest.FixtureRequest) -> Path:
    path: Path = request.param
    return path


@pytest.fixture(scope="module")
def runner(model: Path) -> Runner:
    config = small_config(model, device="cpu", threads=2, max_num_seqs=4)
    return load_cpu_runner(config, lambda *_: None)


@pytest.fixture(scope="module")
def tokens(model: Path) -> list[int]:
    return Fixture.load(model, model.parent).tokens[-1]


@pytest.fixture(scope="module")
def alone(runner: Runner, tokens: list[int]) -> list[TokenLogprob]:
    return Driver(runner).score(0, tokens, len(tokens))


@pytest.mark.parametrize("chunk", [1, 7, 33])
def test_chunks_do_not_change_a_bit(
    runner: Runner, tokens: list[int], alone: list[TokenLogprob], chunk: int
) -> None:
    assert Driver(runner).score(1, tokens, chunk) == alone


def test_a_crowd_does_not_change_a_bit(runner: Runner, tokens: list[int], alone: list[TokenLogprob]) -> None:
    """Beside two others in every step, of which one begins again and again in a slot that another has used."""
    driver = Driver(runner)
    found: list[TokenLogprob] = []
    new = [driver.new(slot, tokens, SCORED) for slot in (2, 0)]
    for start in range(0, len(tokens), 30):
        new.append(driver.new(3, tokens[5:15], SCORED))
        count = min(30, len(tokens) - start)
        rows = [driver.row(2, count, sample=False), driver.row(0, count, sample=start + count == len(tokens))]
        result = driver.step(new, [*rows, driver.row(3, 10, sample=True)])
        new = []
        found += result.prompt_logprobs.get(1, [])
        if start + count == len(tokens):
            assert result.sampled[0].logprob is not None
            found.append(result.sampled[0].logprob)
    assert found == alone


def test_a_snapshot_continues_where_it_was_taken(
    runner: Runner, tokens: list[int], alone: list[TokenLogprob]
) -> None:
    """A prefix with its KV and a copy of its state, while the sequence that left them goes on."""
    driver, snapshot = Driver(runner), runner.ready().num_state_slots - 1
    first = driver.new(0, tokens, SCORED)
    driver.step([first], [driver.row(0, PAGE, sample=False)])
    kept = np.array(driver.slots(0), np.int32).tobytes()
    rest = driver.row(0, len(tokens) - PAGE, sample=False)
    copy = np.array([[0, snapshot]], np.int32).tobytes()
    runner.step(StepPlan(100, [], [rest], copy))

    second = NewSeq(1, first.token_ids, len(tokens), kept, SCORED, state_slot=1)
    free = np.array([driver.take() for _ in range(len(tokens) - PAGE)], np.int32).tobytes()
    row = Row(1, PAGE, len(tokens) - PAGE, free, True)
    result = runner.step(StepPlan(101, [second], [row], np.array([[snapshot, 1]], np.int32).tobytes()))
    assert result.prompt_logprobs[0] == alone[PAGE:-1]
    assert result.sampled[0].logprob == alone[-1]


def test_the_worker_says_how_many_states_there_are(runner: Runner) -> None:
    ready = runner.ready()
    # Each sequence's, and as many snapshots as are kept by default.
    assert ready.num_state_slots == 4 * (1 + 4)


def test_the_model_is_tried_before_it_is_served(
    runner: Runner, model: Path, tokens: list[int], alone: list[TokenLogprob]
) -> None:
    """In a state slot that nobody has; nothing of it is left."""
    check_logits(runner, model)
    assert Driver(runner).score(0, tokens, len(tokens)) == alone


def test_the_engines_benchmark_gives_sequences_states(runner: Runner) -> None:
    figures = list(EngineBench(runner, 16).figures([2], 20, 2))
    assert [(each.phase, each.batch) for each in figures] == [("prefill", 2), ("decode", 2)]
    assert all(each.tok_s > 0 for each in figures)
