"""Drafts on a GPU engine under Triton's interpreter: texts are those without drafts, whatever tokens depend on."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.kernels.triton_device import DEVICE  # isort: skip  (first: it sets up the interpreter)
from moeserve.kernels.launch import first_launches
from moeserve.messages.pages import PAGE_KEY_BYTES, PageOrders, StateCopy
from moeserve.messages.sampling import SamplingParams
from moeserve.messages.schema import GenerateRequest
from moeserve.messages.steps import CONTINUES, Row, StepPlan
from moeserve.models.open import open_dummy_model, open_model
from moeserve.router.core.policy.draft_length import DraftLength
from moeserve.worker.drafts.drafter import Wanted
from moeserve.worker.loading.gpu.load import load_gpu_runner
from moeserve.worker.loading.start import Start
from moeserve.worker.runner import Runner
from moeserve.worker.sequences import Int32s, StepLayout
from tests.conftest import OWN_FIXTURES
from tests.gpu.driver import Driver, small_config
from tests.support.models.changed_header import with_number
from tests.support.models.model_header import qwen3moe, write_header
from tests.support.worker.foreseen_drafts import Foreseen, asked, whole_texts
from tests.support.worker.served_answers import serve

MOST = 3
NGRAM = '{"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_min": 2, "prompt_lookup_max": 6}'
ANSWER = 40 if DEVICE == "cuda" else 5  # the interpreter takes seconds for a token

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


def runner_of(model: Path, **options: object) -> Runner:
    config = small_config(
        model, load_format="dummy", threads=1, max_num_seqs=4, max_num_batched_tokens=32, max_model_len=64,
        max_total_tokens=256, speculative_config=NGRAM, **options,
    )  # fmt: skip
    return load_gpu_runner(config, open_dummy_model(model), lambda *_: None, torch.device(DEVICE), Start())


def two_layers(path: Path, to: Path) -> Path:
    """Writes the first and last layer of a model of three recurrent layers and one that attends."""
    data = path.read_bytes()
    in_list = b".recurrent_layers", b".recurrent_unread"  # the interval counts instead
    for name, other in ((b"blk.1.", b"blk.x."), (b"blk.3.", b"blk.1."), (b"blk.x.", b"blk.3."), in_list):
        data = data.replace(name, other)
    to.write_bytes(data)
    for key in ("block_count", "full_attention_interval"):
        with_number(to, to, key, 2)
    return to


class Given:
    """A drafter of these drafts, one after another, and of none at first."""

    def __init__(self, drafts: list[list[int]]) -> None:
        self._drafts = drafts

    def bind(self, slot: int, namespace: str) -> None:
        pass

    def catch_up(self) -> None:
        pass

    def draft(self, wanted: Sequence[Wanted]) -> list[Int32s]:
        return [np.array(self._drafts.pop(0), np.int32) for _ in wanted]

    def computed(self, layout: StepLayout, accepted: Int32s) -> None:
        pass


def through_ram(runner: Runner, slot: int, by: int) -> None:
    """Writes a state to the RAM tier by the plan behind its last step, and replaces it by what is there. by: a state
    slot that is free."""
    key = bytes(PAGE_KEY_BYTES)
    orders = {"stored": PageOrders(state_writes=[StateCopy(key, slot)])}
    orders["loaded"] = PageOrders(state_loads=[StateCopy(key, by)])
    for news, order in orders.items():
        result = runner.step(StepPlan(0, [], [], pages=order))
        until = time.monotonic() + 10.0
        while result.pages is None or key not in getattr(result.pages.ram, news):
            assert time.monotonic() < until
            result = runner.step(StepPlan(0, [], []))
    runner.step(StepPlan(0, [], [], np.array([by, slot], np.int32).tobytes()))


@pytest.mark.parametrize("name", ["qwen3next-q4_k_m", "nemotronhmoe-f16", "falconh1-f16", "lfm2moe-f16"])
def test_recurrent_layers(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The states of DeltaNets, of Mamba-2, of Mamba-2 beside attention, and of short convolutions move by accepted
    drafts alone: a right draft and a wrong one, then a token that tells, from a state that was in the RAM tier
    meanwhile. With two layers of DeltaNets and no more rows than needed, as the interpreter takes seconds for each."""
    path = OWN_FIXTURES / f"tiny-{name}.gguf"
    source = open_model(path)
    if name.startswith("qwen3next"):
        path = two_layers(path, tmp_path / "two.gguf")
        source = open_model(path)
        assert isinstance(source.tensors, dict)
        for tensor in [tensor for tensor in source.tensors if tensor.startswith(("blk.2.", "blk.3."))]:
            del source.tensors[tensor]
    config = small_config(
        path, threads=1, max_num_seqs=2, max_num_batched_tokens=4, max_model_len=16, max_total_tokens=64,
        speculative_config=NGRAM, state_snapshot_budget=0.0, kv_ram=0.01,
    )  # fmt: skip
    runner = load_gpu_runner(config, source, lambda *_: None, torch.device(DEVICE), Start())
    rows = runner._drafts
    assert rows is not None
    sampling = SamplingParams(max_tokens=8, temperature=0.0, logprobs=5)
    plain, drafted = Driver(runner), Driver(runner)
    expected = [plain.step([plain.new(0, [9], sampling)], [plain.row(0, 1, sample=True)])]
    expected += [plain.step([], [plain.row(0, 1, sample=True)]) for _ in range(3)]
    answer = [result.sampled[0].token_id for result in expected]
    given = Given([[answer[1], answer[2] ^ 1], []])
    monkeypatch.setattr(rows, "_drafter", given)
    drafted.step([drafted.new(1, [9], sampling)], [drafted.row(1, 1, sample=True)])
    granted = drafted.row(1, 3, sample=True).kv_slots
    found = drafted.step([], [Row(1, CONTINUES, 3, granted, True)]).sampled[0]
    assert found.accepted is not None
    assert (found.token_id, found.accepted.token_ids) == (answer[1], answer[2:3])
    through_ram(runner, 1, by=0)
    last = drafted.step([], [Row(1, CONTINUES, 1, b"", True)]).sampled[0]
    true = expected[3].sampled[0].logprob
    assert last.logprob is not None
    assert true is not None
    assert last.logprob.top_ids == true.top_ids
    assert last.logprob.top_logprobs == pytest.approx(true.top_logprobs, abs=1e-3)


def test_the_next_plan_is_launched_before_the_result_is_told(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Behind a wrong draft, behind a right one, and a step without drafts behind one that has some."""
    config = small_config(
        model, load_format="dummy", threads=1, max_num_seqs=2, max_num_batched_tokens=4, max_model_len=16,
        max_total_tokens=64, speculative_config=NGRAM, num_gpu_experts=4,
    )  # fmt: skip
    runner = load_gpu_runner(config, open_dummy_model(model), lambda *_: None, torch.device(DEVICE), Start())
    assert runner._drafts is not None
    sampling = SamplingParams(max_tokens=8, temperature=0.0)
    plain, drafted = Driver(runner), Driver(runner)
    expected = [plain.step([plain.new(0, [9], sampling)], [plain.row(0, 1, sample=True)])]
    expected += [plain.step([], [plain.row(0, 1, sample=True)]) for _ in range(4)]
    answer = [result.sampled[0].token_id for result in expected]
    given = Given([[answer[1], answer[2] ^ 1], [answer[3]], []])
    monkeypatch.setattr(runner._drafts, "_drafter", given)
    drafted.step([drafted.new(1, [9], sampling)], [drafted.row(1, 1, sample=True)])
    granted = [drafted.row(1, 3, sample=True).kv_slots for _ in range(2)]
    first, *others = (
        StepPlan(10 + number, [], [Row(1, CONTINUES, count, slots, True)])
        for number, (count, slots) in enumerate(zip((3, 2, 1), [*granted, b""], strict=True))
    )
    runner.start(first)
    results = []
    for plan in others:
        assert runner.may_follow(plan)
        results.append(runner.advance(plan))
        runner.launch_rest()
    results.append(runner.finish())
    text = answer[:1]
    for result in results:
        (sampled,) = result.sampled
        text += [sampled.token_id, *(sampled.accepted.token_ids if sampled.accepted else [])]
    assert [result.step for result in results] == [10, 11, 12]
    assert text[:5] == answer
    assert len(text) == 6


CASES = {
    "drawn, all on the GPU": (4, 2, {"temperature": 1.0, "logprobs": None}),
    "penalties, half in RAM": (2, 1, {"temperature": 0.0, "presence_penalty": 0.5}),
}


@pytest.mark.parametrize(("experts", "streams", "sampling"), CASES.values(), ids=CASES)
def test_same_texts(
    model: Path, experts: int, streams: int, sampling: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Tokens of drafted positions are sampled at once, and in rounds where they depend on one another."""
    runner = runner_of(model, num_gpu_experts=experts)
    requests = asked(streams, runner.ready().vocab_size, length=20, **({"max_tokens": ANSWER} | sampling))
    compare(runner, requests, monkeypatch)


def compare(runner: Runner, requests: list[GenerateRequest], monkeypatch: pytest.MonkeyPatch) -> None:
    """The answers with drafts, some of them right, are those without."""
    expected, _ = serve(runner, requests, 0, max_num_batched_tokens=32)
    assert runner._drafts is not None
    runner._drafts._drafter = Foreseen(
        runner._sequences.tokens, whole_texts(requests, expected), 0.8, seed=11
    )
    launched = first_launches()
    monkeypatch.setattr(
        DraftLength, "choose", lambda self, records, *_: ([MOST] * len(records), float(MOST * len(records)))
    )
    found, report = serve(runner, requests, MOST, max_num_batched_tokens=32)
    assert {id: answer.tokens for id, answer in found.items()} == {
        id: answer.tokens for id, answer in expected.items()
    }
    assert report.accepted_draft_tokens > 0
    assert first_launches() == launched  # all was compiled before the first request
