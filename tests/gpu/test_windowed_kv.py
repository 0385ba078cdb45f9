"""gpt-oss and Gemma 4 on a GPU with a KV pool of their own for windowed layers: crowds that reuse each other's window
slots, turns that continue from segments, and beams get what a server with one pool finds."""

from __future__ import annotations

import random
from array import array
from typing import NamedTuple

import numpy as np
import pytest
import torch

from moeserve.messages.sampling import SamplingParams, TextOptions, TokenLogprob
from moeserve.messages.schema import GenerateRequest, TokensItem
from moeserve.worker.engines.gpu.engine import GpuEngine
from moeserve.worker.loading.load import load_runner
from moeserve.worker.runner import Runner
from tests.conftest import fixtures_dir
from tests.gpu.driver import Driver, small_config
from tests.support.worker.beams import Wanted, requests, scheduler_of, serve

if not torch.cuda.is_available():
    pytest.skip("needs a GPU", allow_module_level=True)

# Windows of 32 and 16 tokens; with all of the 8 experts on the GPU, and with half of them on the CPU.
CASES = [
    ("tiny-gptoss-f16", 8),
    ("tiny-gptoss-mxfp4", 8),
    ("tiny-gptoss-mxfp4", 4),
    ("tiny-gemma4-q4_k_m", 8),
]


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


def differences(one: Runner, prompt: list[int], items: list[TokensItem]) -> list[float]:
    """The difference of each token's log-probability from that with one pool and the whole answer as a prompt, which
    other kernels compute in larger steps."""
    found = logprobs_of(items)
    tokens = prompt + [entry.token_id for entry in found]
    scored = Driver(one).score(0, tokens, 64)[len(prompt) - 1 :]
    return [
        abs(a.logprob - b.logprob)
        for a, b in zip(found, scored[: len(found)], strict=True)
        if a.token_id == b.token_id
    ]


class Conversed(NamedTuple):
    differences: list[float]
    window_hits: int


def converse(runner: Runner, one: Runner) -> Conversed:
    """Three turns of eight conversations that begin alike, decoding far beyond the window in slots that others had."""
    rng = random.Random(0)
    shared = [rng.randrange(3, 600) for _ in range(60)]
    talks = [shared[: 20 + 5 * i] + [rng.randrange(3, 600) for _ in range(9 * i)] for i in range(8)]
    scheduler = scheduler_of(runner)
    found: list[float] = []
    for turn in range(3):
        messages = [ask(10 * turn + i, talk, 70) for i, talk in enumerate(talks)]
        answers = serve(scheduler, runner, messages)
        for i, talk in enumerate(talks):
            items = answers[10 * turn + i]
            found += differences(one, talk, items)
            talk += [entry.token_id for entry in logprobs_of(items)]
            talk += [rng.randrange(3, 600) for _ in range(11)]
    report = scheduler.load_report()
    assert report.window_slots_used == 0
    return Conversed(found, report.window_hits)


def test_crowds_and_turns(runners: Runners) -> None:
    """Decoded tokens are no farther from their prompts' than those of one pool are: kernels of small steps round
    activations to 8 bits."""
    one, two = (converse(runner, runners.one) for runner in runners)
    for pools, of in (("one pool", one), ("two", two)):
        median, high, most = np.quantile(of.differences, [0.5, 0.99, 1.0])
        print(f"WINDOWS {pools}: median {median:.2e}, 99% {high:.2e}, most {most:.2e}; {of.window_hits} hits")
    assert len(two.differences) > 0.9 * len(one.differences) > 1000
    assert two.window_hits >= 8
    for share in (0.5, 0.9, 0.99):
        assert np.quantile(two.differences, share) < 1.5 * np.quantile(one.differences, share)


def test_beams(runners: Runners) -> None:
    """The sum of each beam's log-probabilities is as near to that of its prompt as with one pool."""
    prompt = [1 + (37 * i * i + 11 * i) % 600 for i in range(50)]
    far = []
    for runner in runners:
        items = serve(scheduler_of(runner), runner, requests(1, prompt, Wanted(4, 4, 60)))
        far.append(np.mean([np.mean(differences(runners.one, prompt, each)) for each in items.values()]))
    print(f"WINDOWS beams: mean difference {far[0]:.2e} with one pool, {far[1]:.2e} with two")
    assert far[1] < 1.5 * far[0]
