"""The GPU worker as a whole under Triton's interpreter (on a GPU where there is one): it gives what the CPU's gives,
with its experts anywhere. Random weights of a very small shape; `tests/gpu` has the real models."""

from __future__ import annotations

from pathlib import Path

import msgspec
import numpy as np
import pytest
import torch

from tests.kernels.triton_device import DEVICE  # isort: skip  (first: it sets up the interpreter)
from moeserve.config import ServerConfig
from moeserve.errors import ConfigError
from moeserve.kernels.launch import first_launches
from moeserve.messages.sampling import SamplingParams, TokenLogprob
from moeserve.messages.steps import NewSeq, Row, StepPlan, StepResult
from moeserve.models.open import open_dummy_model
from moeserve.worker.engines.gpu.engine import GpuEngine
from moeserve.worker.engines.gpu.steps.expert_streaming import Streaming
from moeserve.worker.engines.gpu.steps.graph_steps import GraphSteps
from moeserve.worker.loading.cpu.load import load_cpu_runner
from moeserve.worker.loading.gpu.load import load_gpu_runner
from moeserve.worker.loading.start import Start
from moeserve.worker.runner import Runner
from tests.gpu.driver import GREEDY, SCORED, Driver, small_config
from tests.support.models.model_header import qwen3moe, write_header
from tests.support.worker.beams import Wanted, check_scores, requests, scheduler_of, serve

pytestmark = pytest.mark.slow  # three minutes of CPU time
DRAWN = SamplingParams(max_tokens=1 << 20, temperature=1.0, seed=3, logprobs=2)
PENALISED = SamplingParams(max_tokens=1 << 20, temperature=0.0, presence_penalty=1.5, frequency_penalty=0.5)
PROMPT = [3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5, 8, 9, 7, 9, 3, 2, 3, 8, 4]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A header: 2 layers, 4 experts of which a token takes 2."""
    path = tmp_path_factory.mktemp("model") / "small.gguf"
    shape = qwen3moe(
        hidden_size=256,
        num_layers=2,
        num_heads=2,
        num_kv_heads=1,
        head_dim=128,
        num_experts=4,
        top_k=2,
        expert_width=256,
        context_length=128,
        vocab_size=128,
    )
    write_header(path, shape)
    return path


def config_of(model: Path, **options: object) -> ServerConfig:
    return small_config(
        model, load_format="dummy", threads=1, max_num_seqs=2, max_num_batched_tokens=32, max_model_len=64,
        max_total_tokens=128, **options,
    )  # fmt: skip


@pytest.fixture(scope="module")
def expected(model: Path) -> list[TokenLogprob]:
    return Driver(load_cpu_runner(config_of(model), lambda *_: None)).score(0, PROMPT, 32)


@pytest.fixture(scope="module")
def all_on_gpu(model: Path) -> Runner:
    config = config_of(model, num_gpu_experts=4)
    return load_gpu_runner(config, open_dummy_model(model), lambda *_: None, torch.device(DEVICE), Start())


def test_all_on_the_gpu(all_on_gpu: Runner, expected: list[TokenLogprob]) -> None:
    check_same(all_on_gpu, expected, experts=4)


def test_q8_0_kv(model: Path) -> None:
    """With one layer on the CPU and one on the GPU."""
    cpu = Driver(load_cpu_runner(config_of(model, kv_cache_dtype="q8_0"), lambda *_: None))
    config = config_of(model, kv_cache_dtype="q8_0", n_gpu_layers=1, num_gpu_experts=4)
    runner = load_gpu_runner(config, open_dummy_model(model), lambda *_: None, torch.device(DEVICE), Start())
    expected, driver = cpu.score(0, PROMPT, 32), Driver(runner)
    for chunk in (1, 17, 20):  # decode's own way of storing, and `rope_store`
        pairs = list(zip(driver.score(0, PROMPT, chunk), expected, strict=True))
        assert max(abs(a.logprob - b.logprob) for a, b in pairs) < 0.1
    assert runner.ready().kv_bytes == cpu.runner.ready().kv_bytes


@pytest.mark.slow  # a minute each in the interpreter
@pytest.mark.parametrize(("kind", "near"), [("bf16", 0.1), ("fp8", 0.4)])
def test_kv_that_a_gpu_alone_reads(kind: str, near: float, model: Path, expected: list[TokenLogprob]) -> None:
    config = config_of(model, kv_cache_dtype=kind, num_gpu_experts=4)
    driver = Driver(
        load_gpu_runner(config, open_dummy_model(model), lambda *_: None, torch.device(DEVICE), Start())
    )
    pairs = list(zip(driver.score(0, PROMPT, 17), expected, strict=True))  # tensor cores, then three rows
    assert max(abs(a.logprob - b.logprob) for a, b in pairs) < near
    with pytest.raises(ConfigError, match=f"{kind}: only a GPU's attention reads this type"):
        load_cpu_runner(config_of(model, kv_cache_dtype=kind), lambda *_: None)
    divided = config_of(model, kv_cache_dtype=kind, n_gpu_layers=1, num_gpu_experts=4)
    with pytest.raises(ConfigError, match=f"{kind}: only a GPU's attention reads this type"):
        load_gpu_runner(divided, open_dummy_model(model), lambda *_: None, torch.device(DEVICE), Start())


@pytest.mark.parametrize("threshold", [1000, 1], ids=["shared", "streamed"])
def test_an_expert_on_the_gpu(model: Path, expected: list[TokenLogprob], threshold: int) -> None:
    config = config_of(model, num_gpu_experts=1, gpu_prefill_token_threshold=threshold)
    runner = load_gpu_runner(config, open_dummy_model(model), lambda *_: None, torch.device(DEVICE), Start())
    check_same(runner, expected, experts=1)
    assert runner.runs_ahead


def check_same(runner: Runner, expected: list[TokenLogprob], *, experts: int) -> None:
    """As the CPU, for a prompt of 20 tokens in a step and in chunks of 17 and 3, which take other kernels."""
    driver = Driver(runner)
    launched = first_launches()
    for chunk in (17, 20):
        found = driver.score(0, PROMPT, chunk)
        pairs = list(zip(found, expected, strict=True))
        assert max(abs(a.logprob - b.logprob) for a, b in pairs) < 0.1
        assert sum(a.top_ids[0] == b.top_ids[0] for a, b in pairs) >= len(pairs) - 1
    use = runner.expert_use()
    assert sum(use.on_gpu) == 2 * experts
    edited = msgspec.structs.replace(GREEDY, logit_bias={3: 1.0}, presence_penalty=0.5)
    driver.step([driver.new(0, PROMPT, edited)], [driver.row(0, len(PROMPT), sample=True)])
    driver.step([], [driver.row(0, 1, sample=True)])
    assert first_launches() == launched  # all was compiled before the first request


def test_a_worker_that_puts_off_its_start(
    all_on_gpu: Runner, expected: list[TokenLogprob], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Steps whose graphs are still to be captured, are captured beside others, or are all captured give the same; what
    is captured between two steps leaves what those before have stored."""
    engine, driver = gpu_engine(all_on_gpu), Driver(all_on_gpu)
    graphs = GraphSteps(engine._model, engine._inputs, engine.facts)
    for part in (engine, engine.warm_up, engine._launcher):
        monkeypatch.setattr(part, "_graphs", graphs)
    engine.warm_up.put_off()
    missed, left = engine.kernels_compiled, True
    for pieces in (0, 2, 100):
        driver.step([driver.new(0, PROMPT, SCORED)], [driver.row(0, 17, sample=False)])
        for _ in range(pieces):
            left = left and all_on_gpu.warm_on(is_idle=True)
        found = driver.step([], [driver.row(0, 3, sample=True)]).prompt_logprobs[0]
        pairs = list(zip(found, expected[17:], strict=False))
        assert len(pairs) == 2
        assert max(abs(a.logprob - b.logprob) for a, b in pairs) < 0.1
    assert not left
    assert engine.kernels_compiled > missed
    missed = engine.kernels_compiled
    driver.score(0, PROMPT, 17)
    assert engine.kernels_compiled == missed


def test_beams_read_what_they_have_forked(all_on_gpu: Runner) -> None:
    """Each token of each answer is as likely as where the whole answer is a prompt."""
    prompt = PROMPT[:3]
    items = serve(scheduler_of(all_on_gpu), all_on_gpu, requests(1, prompt, Wanted(2, 2, 3)))
    check_scores(Driver(all_on_gpu), prompt, items, within=0.1)


def test_a_new_request_reads_a_row_of_its_own_step(all_on_gpu: Runner) -> None:
    """The router lets others read what is planned of a prompt: a row may need the KV that another writes beside it."""
    driver = Driver(all_on_gpu)
    first, second = PROMPT[:4], [*PROMPT[:4], 7]
    driver.step([driver.new(0, first, GREEDY)], [driver.row(0, 3, sample=False)])
    last = driver.row(0, 1, sample=False)
    slots = np.array(driver.slots(0), np.int32).tobytes()
    slot = np.array([driver.take()], np.int32).tobytes()
    reads = NewSeq(1, np.array(second, np.int32).tobytes(), len(second), slots, GREEDY)
    row = Row(1, 4, 1, slot, True)
    together = driver.step([reads], [row, last]).sampled[0].logprob
    alone = driver.step([reads], [row]).sampled[0].logprob
    assert together is not None
    assert alone is not None
    assert together.top_ids == alone.top_ids
    assert np.allclose(together.top_logprobs, alone.top_logprobs, atol=2e-3)


@pytest.mark.parametrize(
    ("rule", "parts"),
    [(None, (0.0, 0.7, 1.0)), ("cpu", (0.7,)), ("cuda", (0.7,))],
    ids=["no rule", "a layer on the CPU", "a layer streamed"],
)
def test_prompts_shared_between_stream_and_pool(
    model: Path, expected: list[TokenLogprob], tmp_path: Path, rule: str | None, parts: tuple[float, ...]
) -> None:
    """None, two or all of three experts in RAM come to the GPU, and the pool computes the others: each is computed
    exactly once."""
    rules = tmp_path / "rules.yaml"
    rules.write_text(f"- {{match: '^blk.1.experts', decode: cpu, prefill: {rule}}}\n")
    config = config_of(
        model,
        num_gpu_experts=1,
        gpu_prefill_token_threshold=1,
        placement_rules=str(rules) if rule else None,
        expert_cache="off",  # the test knows each expert's place in RAM
    )
    runner = load_gpu_runner(config, open_dummy_model(model), lambda *_: None, torch.device(DEVICE), Start())
    driver = Driver(runner)
    launched = first_launches()
    for part in parts:
        gpu_engine(runner).stream_by(Streaming(((1, part),)), "in part")
        routed, pooled = routes(runner), pool_routes(runner)
        found = driver.score(0, PROMPT, len(PROMPT))
        assert max(abs(a.logprob - b.logprob) for a, b in zip(found, expected, strict=True)) < 0.1
        assert first_launches() == launched
        shared = 0
        for layer, way in enumerate((None, rule)):
            in_ram = [e for e in range(4) if not gpu_engine(runner)._model.on_gpu[layer][e]]
            streamed = {"cpu": 0, "cuda": len(in_ram)}.get(way or "", round(part * len(in_ram)))
            new, by_pool = (
                (routes(runner) - routed)[layer][in_ram],
                pool_routes(runner)[layer] - pooled[layer],
            )
            assert torch.equal(by_pool, torch.where(torch.arange(len(in_ram)) < streamed, 0, new))
            shared += bool(new[:streamed].any() and new[streamed:].any())
        assert shared or part != 0.7  # else the parts would not matter


def gpu_engine(runner: Runner) -> GpuEngine:
    assert isinstance(runner.engine, GpuEngine)
    return runner.engine


def routes(runner: Runner) -> torch.Tensor:
    """[layers, experts]: tokens routed to each so far."""
    return gpu_engine(runner)._model.expert_token_counts.cpu().clone()


def pool_routes(runner: Runner) -> list[torch.Tensor]:
    """Tokens that the pool has computed so far, for each layer and each expert in RAM."""
    handoff = gpu_engine(runner)._model._ffn.ram.handoff
    assert handoff is not None
    return [handoff.expert_token_counts(layer)[0].clone() for layer in range(2)]


def plans_of(driver: Driver) -> list[StepPlan]:
    """An answer, and one whose prompt is computed in chunks beside it."""
    new = [driver.new(0, PROMPT[:5], DRAWN), driver.new(1, PROMPT[:8], PENALISED)]
    plans = [StepPlan(1, new, [driver.row(0, 5, sample=True), driver.row(1, 3, sample=False)])]
    for step, chunk in enumerate((5, 1, 1), 2):
        plans.append(StepPlan(step, [], [driver.row(0, 1, sample=True), driver.row(1, chunk, sample=True)]))
    return plans


def told(results: list[StepResult]) -> list[object]:
    """All but the times."""
    return [(result.step, result.sampled) for result in results]


def test_what_is_launched_ahead_is_what_is_launched_one_by_one(all_on_gpu: Runner) -> None:
    runner, driver = all_on_gpu, Driver(all_on_gpu)
    plans = plans_of(driver)
    one_by_one = [runner.step(plan) for plan in plans]
    runner.start(plans[0])
    overlapped = []
    for plan in plans[1:]:
        assert runner.may_follow(plan)
        overlapped.append(runner.advance(plan))
        runner.launch_rest()
    overlapped.append(runner.finish())
    assert not runner.is_under_way
    assert told(overlapped) == told(one_by_one)
    drawn = {result.sampled[0].token_id for result in one_by_one}
    assert len(drawn) > 2  # not always the same token, whatever is read
    assert all(result.compute_ms > 0 for result in overlapped)


def test_a_plan_with_more_than_rows_does_not_follow(all_on_gpu: Runner) -> None:
    runner, driver = all_on_gpu, Driver(all_on_gpu)
    first, second, *_ = plans_of(driver)
    assert not runner.may_follow(second)  # nothing is under way
    runner.start(first)
    assert runner.may_follow(second)
    replaced = [
        msgspec.structs.replace(second, new_seqs=first.new_seqs),
        msgspec.structs.replace(second, state_copies=np.array([[-1, 0]], np.int32).tobytes()),
        msgspec.structs.replace(second, grammars={1: "root ::= 'a'"}),
        msgspec.structs.replace(second, dropped_grammars=[1]),
        msgspec.structs.replace(second, rows=[]),
    ]
    assert not any(runner.may_follow(plan) for plan in replaced)
    runner.finish()
    runner.start(StepPlan(9, [driver.new(0, PROMPT, SCORED)], [driver.row(0, 5, sample=False)]))
    assert not runner.may_follow(StepPlan(10, [], [driver.row(0, 7, sample=True)]))  # it owes prompt logprobs
    runner.finish()
