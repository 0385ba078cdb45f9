"""Beam search on a GPU: what its beams read is what they have forked, in steps of 1 to 32 rows, with and without CUDA
graphs."""

from __future__ import annotations

import time

import pytest
import torch

from moeserve.worker.loading.load import load_runner
from moeserve.worker.runner import Runner
from tests.conftest import fixtures_dir
from tests.gpu.driver import Driver, small_config
from tests.support.worker.beams import Wanted, check_scores, requests, scheduler_of, serve

if not torch.cuda.is_available():  # before each of a thousand cases is collected
    pytest.skip("needs a GPU", allow_module_level=True)

PROMPT = [1 + (37 * i * i + 11 * i) % 600 for i in range(40)]  # the fixtures have 640 tokens and more


@pytest.fixture(scope="module", params=["tiny-qwen3moe-f16", "tiny-qwen3next-f16", "tiny-deepseek2-f16"])
def runner(request: pytest.FixtureRequest) -> Runner:
    """Models with attention, with recurrent layers and with latent attention."""
    folder = fixtures_dir()
    models = [] if folder is None else list(folder.rglob(f"{request.param}.gguf"))
    if not models:
        pytest.skip("the wider fixtures are not here (MOESERVE_FIXTURES)")
    config = small_config(models[0], device="cuda", num_gpu_experts=8, threads=4, max_num_seqs=32)
    return load_runner(config, lambda *_: None)


@pytest.mark.parametrize(
    "wanted",
    [Wanted(2, 2, 24), Wanted(8, 8, 24), Wanted(12, 12, 24, num_beam_groups=3, diversity_penalty=0.5)],
)
def test_scores_are_those_of_the_answers(runner: Runner, wanted: Wanted) -> None:
    """As the same GPU scores each answer as a prompt, but for kernels that round differently."""
    scheduler = scheduler_of(runner)
    messages = requests(1, PROMPT, wanted)
    began = time.perf_counter()
    items = serve(scheduler, runner, messages)
    seconds = time.perf_counter() - began
    print(f"BEAMS {wanted.num_beams} beams, {wanted.max_new_tokens} tokens: {seconds * 1e3:.0f} ms")
    check_scores(Driver(runner), PROMPT, items, within=0.1)


def test_two_searches_at_once(runner: Runner) -> None:
    wanted = Wanted(8, 4, 24)
    messages = [*requests(1, PROMPT, wanted), *requests(11, PROMPT[:25], wanted)]
    items = serve(scheduler_of(runner), runner, messages)
    check_scores(Driver(runner), PROMPT, {id: items[id] for id in range(1, 5)}, within=0.1)
    check_scores(Driver(runner), PROMPT[:25], {id: items[id] for id in range(11, 15)}, within=0.1)
