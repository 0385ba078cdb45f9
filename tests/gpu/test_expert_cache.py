"""The expert cache through the runner, under Triton's interpreter or on a GPU: what moves, and when, changes nothing
but which device computes an expert. Random weights of a very small shape."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest
import torch

from tests.kernels.triton_device import DEVICE  # isort: skip  (first: it sets up the interpreter)
from gguf.constants import GGMLQuantizationType as Type
from msgspec.structs import replace

from moeserve.cli.bench.engine import EngineBench
from moeserve.cli.bench.engine_figures import CacheFigure, where_experts_are
from moeserve.kernels import _C
from moeserve.messages.sampling import SamplingParams, TokenLogprob
from moeserve.models.open import open_dummy_model
from moeserve.placement.expert_cache import fetching
from moeserve.placement.expert_cache.policy import DECAY
from moeserve.placement.expert_cache.routing_trace import RoutingTrace
from moeserve.router.core.policy.draft_length import DraftLength
from moeserve.worker.engines.gpu.engine import GpuEngine
from moeserve.worker.engines.gpu.expert_exchange import ExpertCache
from moeserve.worker.engines.gpu.steps.expert_streaming import Streaming
from moeserve.worker.loading.cpu.load import load_cpu_runner
from moeserve.worker.loading.gpu.load import load_gpu_runner
from moeserve.worker.loading.start import Start
from moeserve.worker.runner import Runner
from tests.gpu.driver import TOP, Driver, small_config
from tests.support.models.model_header import qwen3moe, write_header
from tests.support.router.router_world import request
from tests.support.worker.foreseen_drafts import Foreseen
from tests.support.worker.random_promotions import RandomPolicy
from tests.support.worker.served_answers import serve

pytestmark = pytest.mark.slow  # minutes under the interpreter

LAYERS, EXPERTS, SLOTS = 3, 6, 2
PROMPT = [3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5, 8, 9, 7, 9, 3, 2, 3, 8, 4] * 2
# Steps under random promotions: MOESERVE_CACHE_STEPS=10000 is for a GPU.
STEPS = int(os.environ.get("MOESERVE_CACHE_STEPS", "400" if DEVICE == "cuda" else "4"))


def kind_of(name: str, layers: int) -> Type:
    """Two types of experts, so that a batch of promotions has both."""
    if "ffn_gate_inp" in name:
        return Type.F32
    return Type.Q6_K if "blk.1.ffn_down_exps" in name else Type.Q4_K


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model") / "small.gguf"
    shape = qwen3moe(
        hidden_size=256,
        num_layers=LAYERS,
        num_heads=2,
        num_kv_heads=1,
        head_dim=128,
        num_experts=EXPERTS,
        top_k=2,
        expert_width=256,
        context_length=64,
        vocab_size=64,
    )
    write_header(path, shape, kind_of)
    return path


def config_of(model: Path, **options: object):  # type: ignore[no-untyped-def]
    return small_config(
        model, load_format="dummy", threads=2, max_num_seqs=2, max_num_batched_tokens=64, max_model_len=64,
        max_total_tokens=128, **options,
    )  # fmt: skip


@pytest.fixture(scope="module")
def tokens() -> list[int]:
    return PROMPT[:40] if DEVICE == "cuda" else PROMPT[:4]


@pytest.fixture(scope="module")
def truth(model: Path, tokens: list[int]) -> list[TokenLogprob]:
    return Driver(load_cpu_runner(config_of(model), lambda *_: None)).score(0, tokens, 40)


def runner_with(model: Path, **options: object) -> Runner:
    """Its steps of two rows fetch, and with drafts those of three."""
    options = {"num_gpu_experts": SLOTS, "gpu_prefill_token_threshold": 1000} | options
    config = config_of(model, **options)
    with pytest.MonkeyPatch.context() as patched:
        # Two experts a token are too few for the real bounds.
        patched.setattr(fetching, "LEAST_ROUTES", 2.0)
        patched.setattr(fetching, "LEAST_OF_ONE_TEXT", 2.0)
        return load_gpu_runner(
            config, open_dummy_model(model), lambda *_: None, torch.device(DEVICE), Start()
        )


@pytest.fixture(scope="module")
def runner(model: Path) -> Runner:
    return runner_with(model)


def cache_of(runner: Runner) -> ExpertCache:
    assert isinstance(runner.engine, GpuEngine)
    assert runner.engine.expert_cache is not None
    return runner.engine.expert_cache


class NoMoves(RandomPolicy):
    def choose(self, most: int, *, pays: bool, ready: np.ndarray | None = None) -> np.ndarray:
        return np.zeros((0, 3), np.int64)


def let_arrive(runner: Runner) -> np.ndarray:
    """bool [layers, experts]: who is on the GPU, when nobody is on the way any more. A policy begins with that: of a
    slot that is nobody's it would never hear."""
    cache, driver = cache_of(runner), Driver(runner)
    cache.policy = NoMoves(cache._maps.on_gpu, np.ones((LAYERS, EXPERTS), np.bool_))
    while (on_gpu := cache._maps.on_gpu).sum() < LAYERS * SLOTS:
        driver.score(0, PROMPT[:2], 1)
    return on_gpu


def distance(found: list[TokenLogprob], truth: list[TokenLogprob]) -> float:
    return max(abs(a.logprob - b.logprob) for a, b in zip(found, truth, strict=True))


def test_promotions_in_every_step_change_nothing(
    runner: Runner, tokens: list[int], truth: list[TokenLogprob]
) -> None:
    """As near to the CPU's logits as the static placement, for thousands of steps on a GPU."""
    cache, driver = cache_of(runner), Driver(runner)
    assert isinstance(runner.engine, GpuEngine)
    runner.engine.expert_cache = None
    static = distance(driver.score(0, tokens, 1), truth)
    runner.engine.expert_cache = cache
    cache.policy = RandomPolicy(let_arrive(runner), np.ones((LAYERS, EXPERTS), np.bool_))
    seen, worst, steps = set(), 0.0, 0
    while steps < STEPS:
        worst = max(worst, distance(driver.score(0, tokens, 1), truth))
        steps += len(tokens)
        seen.add(runner.expert_use().on_gpu)
    counts = cache.totals
    print(
        f"CACHE {steps} steps, {counts.promotions} promotions: {worst:.4f} from the CPU, static {static:.4f}"
    )
    assert counts.promotions >= LAYERS * steps // 4  # a batch may take more than a step
    assert counts.hits > 0
    assert counts.misses > 0
    assert len(seen) > 1 or steps == len(tokens)
    assert worst < max(0.1, 2 * static)


def test_steps_launched_ahead_find_whole_experts(model: Path, runner: Runner) -> None:
    """A step is launched while the one before is computed, and experts move between the two: each text is as near to
    the CPU's logits as one step after another with experts that stay."""
    cache, driver = cache_of(runner), Driver(runner)
    assert isinstance(runner.engine, GpuEngine)
    cpu = Driver(load_cpu_runner(config_of(model), lambda *_: None))
    cache.policy = RandomPolicy(let_arrive(runner), np.ones((LAYERS, EXPERTS), np.bool_))
    before, steps, length = cache.totals, 0, 40 if DEVICE == "cuda" else 6
    distances, of_static = [], []
    while steps < STEPS:
        drawn = SamplingParams(max_tokens=1 << 20, temperature=1.0, seed=steps, logprobs=TOP)
        found = driver.generate_ahead(0, PROMPT[:2], length, drawn)
        text = PROMPT[:2] + [entry.token_id for entry in found]
        expected = cpu.score(0, text, 42)[1:-1]
        distances.append(distance(found, expected))
        runner.engine.expert_cache = None
        of_static.append(distance(driver.score(0, text, 1)[1:-1], expected))
        runner.engine.expert_cache = cache
        steps += length
    moved = cache.totals.promotions - before.promotions
    far = [sum(each > 0.1 for each in of) for of in (distances, of_static)]
    print(
        f"AHEAD {steps} steps, {moved} promotions: {max(distances):.4f} from the CPU, static {max(of_static):.4f}; "
        f"the texts' mean {np.mean(distances):.4f}, static {np.mean(of_static):.4f}; far: {far[0]}, static {far[1]}"
    )
    assert moved >= LAYERS * steps // 4
    for found_distance, static in zip(distances, of_static, strict=True):
        assert found_distance < max(0.1, 2 * static)


def test_steps_of_several_rows_fetch(model: Path, runner: Runner) -> None:
    """Two texts share steps, whose missed experts come within the step; between them one text goes on alone, and
    experts are promoted at random. Both texts are as near to the CPU's logits as when they are computed as prompts."""
    cache, driver = cache_of(runner), Driver(runner)
    cpu, length = Driver(load_cpu_runner(config_of(model), lambda *_: None)), 40 if DEVICE == "cuda" else 4
    cache.policy = RandomPolicy(let_arrive(runner), np.ones((LAYERS, EXPERTS), np.bool_))
    steps, worst, of_static = 0, 0.0, 0.0
    while steps < STEPS:
        before = cache.totals.promotions
        texts = two_texts(driver, length, seed=steps)
        assert cache.totals.promotions > before
        for found in texts:
            text = PROMPT[:2] + [entry.token_id for entry in found]
            expected = cpu.score(0, text, 42)[1:-1]
            worst = max(worst, distance(found, expected))
            of_static = max(of_static, distance(driver.score(0, text, 42)[1:-1], expected))
        steps += length
    print(f"FETCH {steps} steps: {worst:.4f} from the CPU, as a prompt {of_static:.4f}")
    assert worst < max(0.1, 2 * of_static)


def test_experts_on_two_numa_nodes(model: Path) -> None:
    """Whose halves lie apart: they are streamed for a prompt, fetched within steps, and promoted."""
    runner = runner_with(model, numa_nodes=2, cpu_binding="none", gpu_prefill_token_threshold=8)
    cache, driver = cache_of(runner), Driver(runner)
    cpu, length = Driver(load_cpu_runner(config_of(model), lambda *_: None)), 4
    assert isinstance(runner.engine, GpuEngine)
    assert runner.engine.can_stream
    prompt = PROMPT[:12]
    assert distance(driver.score(0, prompt, 12), cpu.score(0, prompt, 12)) < 0.1
    cache.policy = RandomPolicy(let_arrive(runner), np.ones((LAYERS, EXPERTS), np.bool_))
    assert cache._fetch is not None
    before = cache._fetch.totals[:, 1].sum().item()
    for found in two_texts(driver, length, seed=1):
        text = PROMPT[:2] + [entry.token_id for entry in found]
        assert distance(found, cpu.score(0, text, 42)[1:-1]) < 0.1
    assert cache._fetch.totals[:, 1].sum().item() > before
    assert cache.totals.promotions > 0


@pytest.fixture(scope="module")
def drafting(model: Path) -> Runner:
    return runner_with(model, speculative_config='{"method": "ngram", "num_speculative_tokens": 3}')


def test_drafts_raise_the_rows_from_which_steps_fetch(runner: Runner, drafting: Runner) -> None:
    """A text's tokens share experts."""
    found = []
    for loaded in (runner, drafting):
        fetch = cache_of(loaded)._fetch
        assert fetch is not None
        found.append([rows for rows in range(20) if fetch.takes(rows)])
    assert found == [list(range(2, 17)), list(range(3, 17))]


def test_steps_with_drafts_fetch(model: Path, drafting: Runner, monkeypatch: pytest.MonkeyPatch) -> None:
    """Steps of four rows of one text, of which some are wrong, and of one row: the text is as near to the CPU's logits
    as it is without drafts."""
    cache, cpu = cache_of(drafting), Driver(load_cpu_runner(config_of(model), lambda *_: None))
    length = 40 if DEVICE == "cuda" else 8
    sampling = SamplingParams(max_tokens=length, temperature=0.0, logprobs=TOP)
    asked = [replace(request(0, PROMPT[:4], length), sampling=sampling)]

    def answer(most: int) -> tuple[list[int], float]:
        (found,) = serve(drafting, asked, most, max_num_batched_tokens=64)[0].values()
        text = PROMPT[:4] + found.tokens
        return text, distance(found.logprobs, cpu.score(0, text, 42)[3:-1])  # type: ignore[arg-type]

    text, plain = answer(0)
    assert drafting._drafts is not None
    drafting._drafts._drafter = Foreseen(drafting._sequences.tokens, [text], 0.8)
    monkeypatch.setattr(DraftLength, "choose", lambda self, records, *_: ([3] * len(records), 3.0))
    assert cache._fetch is not None
    before = cache._fetch.totals[:, 1].sum().item()
    _, with_drafts = answer(3)
    assert cache._fetch.totals[:, 1].sum().item() > before
    assert with_drafts < max(0.1, 2 * plain)


def two_texts(driver: Driver, length: int, seed: int) -> list[list[TokenLogprob]]:
    """Generates two texts in steps of two rows; the first one also has steps of its own."""
    drawn = [
        SamplingParams(max_tokens=1 << 20, temperature=1.0, seed=seed + i, logprobs=TOP) for i in range(2)
    ]
    new = [driver.new(slot, PROMPT[:2], drawn[slot]) for slot in range(2)]
    result = driver.step(new, [driver.row(slot, 2, sample=True) for slot in range(2)])
    found: list[list[TokenLogprob]] = [[], []]
    for step in range(length):
        for slot, sampled in enumerate(result.sampled):
            assert sampled.logprob is not None
            found[slot].append(sampled.logprob)
        alone = step % 3 == 2
        result = driver.step([], [driver.row(slot, 1, sample=True) for slot in range(1 if alone else 2)])
    return found


def test_streamed_prompts_beside_a_cache(
    runner: Runner, tokens: list[int], truth: list[TokenLogprob]
) -> None:
    """All or a part of what the pool has at the time is streamed: none twice, none not at all."""
    assert isinstance(runner.engine, GpuEngine)
    driver = Driver(runner)
    for part in (1.0, 0.5, 0.0):
        runner.engine.stream_by(Streaming(((1, part),)), "in part")
        for chunk in (40, 23):
            assert distance(driver.score(0, tokens, chunk), truth) < 0.1
        driver.score(0, tokens[:4], 1)  # experts move between the prompts


def test_text_brings_its_experts(runner: Runner, tokens: list[int]) -> None:
    """With the policy itself: a token again and again finds its experts on the GPU."""
    cache, driver = cache_of(runner), Driver(runner)
    cached = let_arrive(runner)
    cache.policy = _C.ExpertCachePolicy(cached, np.ones_like(cached), DECAY, -1e9)
    driver.generate(0, tokens[:2], 2)
    before = cache.totals
    for _ in range(12 if DEVICE == "cuda" else 3):
        driver.score(1, tokens[:1] * 4, 1)
    hits, misses = cache.totals.hits - before.hits, cache.totals.misses - before.misses
    assert hits + misses > 0
    assert hits > misses


def test_the_benchmark_says_what_the_cache_found(model: Path) -> None:
    """Warm-up and answer read the trace one after the other, whose experts are first those on the GPU, then others. The
    last step of each is counted with the next one."""
    config = config_of(model, num_gpu_experts=SLOTS, gpu_prefill_token_threshold=1000)
    source, device = open_dummy_model(model), torch.device(DEVICE)
    runner = load_gpu_runner(config, source, lambda *_: None, device, Start(), forced_rows=1)
    ids = np.empty((8, LAYERS, 2), np.uint16)
    ids[:4], ids[4:] = (0, 1), (3, 4)
    bench = EngineBench(runner, 64, trace=RoutingTrace("made up", EXPERTS, ids))
    _, warm_up, decode = bench.figures([1], 1, 4, warm_up=4)
    assert (warm_up.phase, decode.phase) == ("warm-up", "decode")
    assert warm_up.cache == CacheFigure(hit_rate=1.0, promotions=0.0)
    assert decode.cache == CacheFigure(hit_rate=0.25, promotions=0.0)
    assert f", {SLOTS} of a layer's {EXPERTS} experts on the GPU" == where_experts_are(runner.expert_use())
