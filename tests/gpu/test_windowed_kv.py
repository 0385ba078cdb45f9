"""gpt-oss and Gemma 4 on a GPU with a KV pool of their own for windowed layers: crowds that reuse each other's window
slots, turns that continue from islands, and beams get what a server with one pool finds."""

from __future__ import annotations

import random
from array import array
from typing import NamedTuple

import pytest
import torch

from moeserve.messages.sampling import SamplingParams, TextOptions, TokenLogprob
from moeserve.messages.schema import GenerateRequest, TokensItem
from moeserve.worker.engines.gpu import GpuEngine
from moeserve.worker.loading import load_runner
from moeserve.worker.runner import Runner
from tests.conftest import fixtures_dir
from tests.gpu.driver import Driver, small_config
from tests.support.beams import Wanted, check_scores, requests, scheduler_of, serve

if not torch.cuda.is_available():
    pytest.skip("needs a GPU", allow_module_level=True)

# Windows of 32 and 16 tokens; with all of the 8 experts on the GPU, and with half of them on the CPU.
CASES = [
    ("tiny-gptoss-f16", 8),
    ("tiny-gptoss-mxfp4", 8),
    ("tiny-gptoss-mxfp4", 4),
    ("tiny-gemma4-q4_k_m", 8),
]
WITHIN = 0.1  # of a log-probability: kernels that round differently


class Runners(NamedTuple):
    one: Runner
    two: Runner


@pytest.fixture(scope="module", params=CASES, ids=lambda case: f"{case[0]}-{case[1]}")
def runners(request: pytest.FixtureRequest) -> Runners:
    name, experts = request.param
    folder = fixtures_dir()
    models = [] if folder is None else list(folder.rglob(f"{name}.gguf"))
    if not models:
        pytest.skip("the wider fixtures are not here (MOESERVE_FIXTURES)")

    def runner_of(ratio: float) -> Runner:
        config = small_config(
            models[0],
            device="cuda",
            num_gpu_experts=experts,
            threads=4,
            max_num_seqs=8,
            max_num_batched_tokens=64,
            gpu_prefill_token_threshold=1 << 20,
            kv_window_ratio=ratio,
        )
        return load_runner(config, lambda *_: None)

    runners = Runners(runner_of(0.0), runner_of(0.05))
    assert all(isinstance(runner.engine, GpuEngine) for runner in runners)
    one, two = (runner.ready() for runner in runners)
    print(
        f"WINDOWS {name}: {one.kv_bytes} bytes of one pool, {two.kv_bytes} of two, {two.num_window_slots} slots"
    )
    assert one.num_window_slots == 0 < two.num_window_slots < two.num_kv_slots == one.num_kv_slots
    assert two.kv_bytes < one.kv_bytes
    return runners


def ask(id: int, prompt: list[int], max_tokens: int) -> GenerateRequest:
    greedy = SamplingParams(max_tokens=max_tokens, temperature=0.0, logprobs=0)
    return GenerateRequest(id, array("i", prompt).tobytes(), greedy, TextOptions(), float(id))


def logprobs_of(items: list[TokensItem]) -> list[TokenLogprob]:
    return [entry for item in items for entry in item.logprobs or []]


def check(one: Runner, prompt: list[int], items: list[TokensItem]) -> float:
    """Each token is as likely as with one pool, where the whole answer is a prompt. Returns the largest difference."""
    found = logprobs_of(items)
    tokens = prompt + [entry.token_id for entry in found]
    scored = Driver(one).score(0, tokens, 64)[len(prompt) - 1 :]
    assert [entry.token_id for entry in found] == [entry.token_id for entry in scored[: len(found)]]
    differences = [abs(a.logprob - b.logprob) for a, b in zip(found, scored, strict=False)]
    assert max(differences) < WITHIN
    return max(differences)


def test_crowds_and_turns(runners: Runners) -> None:
    """Three turns of eight conversations that begin alike, decoding far beyond the window in slots that others had."""
    rng = random.Random(0)
    shared = [rng.randrange(3, 600) for _ in range(60)]
    talks = [shared[: 20 + 5 * i] + [rng.randrange(3, 600) for _ in range(9 * i)] for i in range(8)]
    scheduler = scheduler_of(runners.two)
    furthest = 0.0
    for turn in range(3):
        messages = [ask(10 * turn + i, talk, 70) for i, talk in enumerate(talks)]
        answers = serve(scheduler, runners.two, messages)
        for i, talk in enumerate(talks):
            items = answers[10 * turn + i]
            furthest = max(furthest, check(runners.one, talk, items))
            talk += [entry.token_id for entry in logprobs_of(items)]
            talk += [rng.randrange(3, 600) for _ in range(11)]
    report = scheduler.load_report()
    print(f"WINDOWS largest difference {furthest:.2e}; {report.window_hits} hits")
    assert report.window_hits >= 8
    assert report.window_slots_used == 0


def test_beams(runners: Runners) -> None:
    prompt = [1 + (37 * i * i + 11 * i) % 600 for i in range(50)]
    items = serve(scheduler_of(runners.two), runners.two, requests(1, prompt, Wanted(4, 4, 60)))
    check_scores(Driver(runners.one), prompt, items, within=WITHIN)
