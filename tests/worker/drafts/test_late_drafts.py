"""Drafts that the host learns only behind the step that verifies them, on a CPU engine that plays the GPU's part: it
puts the drafts in the placeholders' places when a step is computed, and leaves out rows behind unlikely ones."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
from torch import Tensor

from moeserve.router.core.policy.draft_length import DraftLength
from moeserve.worker.drafts.drafter import NO_DRAFT, Wanted
from moeserve.worker.engines.engine import SampledAtOnce
from moeserve.worker.loading.cpu.load import CpuModel, build_cpu_runner
from moeserve.worker.runner import Runner
from moeserve.worker.sequences import Int32s, Sequences, StepLayout
from tests.conftest import OWN_FIXTURES
from tests.support.worker.foreseen_drafts import ANSWER, Foreseen, asked, whole_texts
from tests.support.worker.served_answers import load, lose_at, serve
from tests.support.worker.undrafted_rows import noted_without_drafts

MOST = 3
NGRAM = '{"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_min": 2, "prompt_lookup_max": 6}'


class Late:
    """A drafter whose drafts are late wherever they may be."""

    def __init__(self, runner: Runner, texts: list[list[int]], monkeypatch: pytest.MonkeyPatch) -> None:
        rows = runner._drafts
        assert rows is not None
        self._tokens, self._notes = runner._sequences.tokens, rows._late
        self._foreseen = Foreseen(self._tokens, texts, 0.8)
        self._rng = np.random.default_rng(2)
        self._planted, self._verified = NO_DRAFT, 0
        self.num_late = self.num_waited = self.num_cut = 0
        forward = runner.engine.forward

        def computed(layout: StepLayout, sequences: Sequences, **more: Any) -> None:
            places = layout.sequence, layout.position
            placeholders = sequences.tokens[places]
            is_late = placeholders < 0
            if is_late.any():
                assert len(layout.rows) == 1
                assert placeholders[is_late].tolist() == [-1 - number for number in range(len(self._planted))]
                known = placeholders.copy()
                known[is_late] = self._planted
                sequences.tokens[places] = known
            forward(layout, sequences, **more)
            sequences.tokens[places] = placeholders

        monkeypatch.setattr(runner.engine, "forward", computed)
        monkeypatch.setattr(rows, "_drafter", self)

    def bind(self, slot: int, namespace: str) -> None:
        pass

    def catch_up(self) -> None:
        pass

    def draft(self, wanted: Sequence[Wanted]) -> list[Int32s]:
        drafts = self._foreseen.draft(wanted)
        if not self._notes.is_allowed or not wanted or not len(drafts[0]):
            self.num_waited += sum(len(draft) > 0 for draft in drafts)
            return drafts
        self._planted, self._verified = drafts[0], int(self._rng.integers(0, len(drafts[0]) + 1))
        self._notes.slot, self._notes.read = wanted[0].slot, lambda: self._planted[: self._verified]
        self.num_late += 1
        self.num_cut += self._verified < len(self._planted)
        return [-1 - np.arange(len(self._planted), dtype=np.int32)]

    def computed(self, layout: StepLayout, accepted: Int32s) -> None:
        pass


# One that attends, and one with recurrent states.
@pytest.fixture(scope="module", params=["tiny-qwen3moe-q4_k_m", "tiny-qwen3next-q4_k_m"])
def model(request: pytest.FixtureRequest) -> CpuModel:
    return load(OWN_FIXTURES / f"{request.param}.gguf", speculative_config=NGRAM)


@pytest.fixture(scope="module")
def runner(model: CpuModel) -> Runner:
    return build_cpu_runner(model)


@pytest.fixture(scope="module")
def plain(model: CpuModel) -> Runner:
    config = dataclasses.replace(model.config, speculative_config=None)
    return build_cpu_runner(dataclasses.replace(model, config=config))


@pytest.fixture(autouse=True)
def _always(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        DraftLength, "choose", lambda self, records, *_: ([MOST] * len(records), float(MOST * len(records)))
    )


@pytest.mark.parametrize(
    "sampling",
    [{"temperature": 0.7}, {"temperature": 0.0, "presence_penalty": 0.5}],
    ids=["drawn", "with penalties"],
)
def test_one_request(
    runner: Runner, plain: Runner, sampling: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The answer and its logprobs are those without drafts, also if the worker is lost with late drafts under way."""
    requests = asked(1, runner.ready().vocab_size, **sampling)
    expected, _ = serve(plain, requests, 0)
    late = Late(runner, whole_texts(requests, expected), monkeypatch)
    found, report = serve(runner, requests, MOST, lose_at(6))
    assert found == expected
    assert report.engine_losses == 1
    assert late.num_late > ANSWER / 4
    assert late.num_cut > 0
    assert report.accepted_draft_tokens > ANSWER / 5


def test_tokens_sampled_at_once(runner: Runner, plain: Runner, monkeypatch: pytest.MonkeyPatch) -> None:
    """As a GPU does, which samples behind unlikely drafts too: those tokens do not count."""
    requests = asked(1, runner.ready().vocab_size, logprobs=None)
    expected, _ = serve(plain, requests, 0)
    late = Late(runner, whole_texts(requests, expected), monkeypatch)
    counted: list[int] = []

    def at_once(logits: Tensor, slots: Int32s, ahead: Int32s) -> Callable[[], SampledAtOnce]:
        tokens = logits.argmax(dim=1).int().numpy()
        found = SampledAtOnce(tokens, [None] * len(tokens), lambda _, counts: counted.extend(counts.tolist()))
        return lambda: found

    monkeypatch.setattr(runner.engine, "sample_at_once", at_once)
    others = noted_without_drafts(runner, monkeypatch)
    found, report = serve(runner, requests, MOST)
    assert found == expected
    assert sum(counted) + sum(others) == ANSWER
    assert late.num_cut > 0
    assert report.accepted_draft_tokens > ANSWER / 5


def test_beside_others_a_step_waits(runner: Runner, plain: Runner, monkeypatch: pytest.MonkeyPatch) -> None:
    """And where requests are bound again behind a cached prefix. The longest answer ends alone."""
    requests = [
        *asked(3, runner.ready().vocab_size, temperature=0.7, max_tokens=ANSWER // 2),
        *asked(4, runner.ready().vocab_size, temperature=0.7)[3:],
    ]
    expected, _ = serve(plain, requests, 0)
    late = Late(runner, whole_texts(requests, expected), monkeypatch)
    found, report = serve(runner, requests, MOST, lose_at(7), num_kv_slots=150)
    assert found == expected
    assert report.preemptions + report.engine_losses > 0
    assert late.num_waited > 0
    assert late.num_late > 0
