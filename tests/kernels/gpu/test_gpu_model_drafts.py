"""A small model that drafts on the GPU of the large one (--speculative-model), under Triton's interpreter."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
import torch
from msgspec.structs import replace

from tests.kernels.triton_device import DEVICE  # isort: skip  (first: it sets up the interpreter)
from moeserve.messages.sampling import SamplingParams
from moeserve.messages.steps import CONTINUES, Row
from moeserve.models.open import open_dummy_model
from moeserve.worker.drafts.model_drafter import ModelDrafter
from moeserve.worker.loading.gpu.load import load_gpu_runner
from moeserve.worker.loading.start import Start
from moeserve.worker.runner import Runner
from moeserve.worker.sequences import StepLayout
from tests.gpu.driver import Driver, small_config
from tests.support.models.model_header import qwen3moe, write_header

MOST = 2

pytestmark = pytest.mark.slow  # minutes in the interpreter


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model") / "small.gguf"
    shape = qwen3moe(
        hidden_size=256, num_layers=1, num_heads=2, num_kv_heads=1, head_dim=128, num_experts=4, top_k=2,
        expert_width=256, context_length=128, vocab_size=128,
    )  # fmt: skip
    write_header(path, shape)
    return path


def runner_of(model: Path, start: Start) -> Runner:
    config = small_config(
        model, load_format="dummy", threads=1, max_num_seqs=2, max_num_batched_tokens=4, max_model_len=16,
        max_total_tokens=64, num_gpu_experts=4,
        speculative_config=f'{{"model": "{model}", "num_speculative_tokens": {MOST}}}',
    )  # fmt: skip
    return load_gpu_runner(config, open_dummy_model(model), lambda *_: None, torch.device(DEVICE), start)


@pytest.fixture(scope="module")
def runner(model: Path) -> Runner:
    return runner_of(model, Start())


def drafter_of(runner: Runner) -> ModelDrafter:
    assert runner._drafts is not None
    drafter = runner._drafts._drafter._second  # type: ignore[attr-defined]
    assert isinstance(drafter, ModelDrafter)
    return drafter


def drafted_step(driver: Driver, slot: int) -> list[int]:
    """The tokens of a step with as many drafts as may be."""
    granted = driver.row(slot, 1 + MOST, sample=True).kv_slots
    (found,) = driver.step([], [Row(slot, CONTINUES, 1 + MOST, granted, True)]).sampled
    return [found.token_id, *(() if found.accepted is None else found.accepted.token_ids)]


def noted_passes(drafter: ModelDrafter, monkeypatch: pytest.MonkeyPatch) -> list[list[int]]:
    """The rows of each request in each later pass of the small model."""
    passes: list[list[int]] = []
    compute = drafter._compute

    def note(pieces: Sequence[tuple[int, int, int]]) -> StepLayout:
        passes.append([count for _, _, count in pieces])
        return compute(pieces)

    monkeypatch.setattr(drafter, "_compute", note)
    return passes


def test_the_same_model_is_always_right(runner: Runner, monkeypatch: pytest.MonkeyPatch) -> None:
    """The small model has the large one's weights. Its first pass reads a whole text, the next one only the tokens that
    it has not computed yet: the drafts that were right are in its KV cache."""
    drafter = drafter_of(runner)
    sampling = SamplingParams(max_tokens=12, temperature=0.0)
    plain, drafted = Driver(runner), Driver(runner)
    expected = [plain.step([plain.new(0, [9, 4, 7], sampling)], [plain.row(0, 3, sample=True)])]
    expected += [plain.step([], [plain.row(0, 1, sample=True)]) for _ in range(5)]
    answer = [result.sampled[0].token_id for result in expected]
    text = [
        drafted.step([drafted.new(1, [9, 4, 7], sampling)], [drafted.row(1, 3, sample=True)])
        .sampled[0]
        .token_id
    ]
    passes = noted_passes(drafter, monkeypatch)
    for _ in range(2):
        text += drafted_step(drafted, 1)
    assert len(text) == 1 + 2 * (1 + MOST)
    assert text[: len(answer)] == answer
    assert passes == [[4], *[[1]] * (MOST - 1), [2], *[[1]] * (MOST - 1)]


def test_a_sampled_request_that_begins_with_anothers_text(
    runner: Runner, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What the small model has read of the other's text is not read again. Right or wrong, drafts leave each text as it
    is without them."""
    drafter, prompt = drafter_of(runner), [3, 8, 5]
    monkeypatch.setattr(drafter, "_least", 0.0)  # at random weights every draft is improbable
    sampled = [SamplingParams(max_tokens=12, temperature=1.0, seed=seed) for seed in (3, 5)]
    longer = [*prompt, 11]
    plain = Driver(runner)
    expected = [plain.generate(0, prompt, 4, sampled[0]), plain.generate(1, longer, 4, sampled[1])]
    driver = Driver(runner)
    passes = noted_passes(drafter, monkeypatch)
    (found,) = driver.step([driver.new(0, prompt, sampled[0])], [driver.row(0, 3, sample=True)]).sampled
    texts = [[found.token_id, *drafted_step(driver, 0)]]
    assert passes[0] == [4]
    prefix = driver.slots(0)[: len(prompt)]
    new = replace(driver.new(1, longer, sampled[1]), prefix_slots=np.array(prefix, np.int32).tobytes())
    driver.adopt(1, prefix)
    passes.clear()
    (found,) = driver.step([new], [driver.row(1, 1, sample=True)]).sampled
    texts.append([found.token_id, *drafted_step(driver, 1)])
    assert passes[0] == [len(longer) + 1 - len(prompt)]
    for text, whole in zip(texts, expected, strict=True):
        assert text == whole[: len(text)]


def test_a_worker_in_the_place_of_a_lost_one_drafts_before_it_is_warm(model: Path) -> None:
    """Nothing of the small model is captured when it is ready; later all is, and steps say what they miss before."""
    start = Start(is_first=False)
    runner = runner_of(model, start)
    assert "small model" in start.clock.seconds
    graphs = drafter_of(runner)._model._engine._graphs  # type: ignore[attr-defined]
    assert not graphs._captured
    driver = Driver(runner)
    sampling = SamplingParams(max_tokens=12, temperature=0.0)
    driver.step([driver.new(0, [9, 4, 7], sampling)], [driver.row(0, 3, sample=True)])
    missed = runner.engine.kernels_compiled
    assert len(drafted_step(driver, 0)) == 1 + MOST
    assert runner.engine.kernels_compiled > missed
    while runner.warm_on(is_idle=True):
        pass
    assert len(graphs._captured) > 2
    missed = runner.engine.kernels_compiled
    assert len(drafted_step(driver, 0)) == 1 + MOST
    assert runner.engine.kernels_compiled == missed
