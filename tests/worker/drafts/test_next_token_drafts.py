"""Drafts by the model's own next-token block, through the scheduler: what it drafts depends on the text alone, and the
text not on what it drafts."""

from __future__ import annotations

import dataclasses
import itertools
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from moeserve.kv.layout import KvLayout
from moeserve.messages.pages import PageOrders
from moeserve.messages.steps import StepPlan
from moeserve.models.blocks.cpu.next_token import NextTokenRows
from moeserve.router.core.policy.draft_length import DraftLength
from moeserve.worker.drafts.drafter import Drafter, Wanted
from moeserve.worker.drafts.next_token_drafter import NextTokenDrafter
from moeserve.worker.drafts.shortlist import Shortlist
from moeserve.worker.loading.cpu.load import CpuModel, build_cpu_runner
from moeserve.worker.runner import Runner
from moeserve.worker.sequences import Int32s, StepLayout
from tests.gpu.driver import GREEDY, Driver
from tests.support.nightly import nightly_after
from tests.support.worker.foreseen_drafts import ANSWER, Foreseen, asked, whole_texts
from tests.support.worker.served_answers import load, lose_at, serve
from tests.worker.drafts.next_token_rows import MODELS, Drafting, model_of

MOST = 3
MTP = '{"method": "mtp", "num_speculative_tokens": 3}'


class Shown:
    """A next-token drafter whose drafts are noted; those that are verified are foreseen ones, some of them right."""

    def __init__(self, inner: NextTokenDrafter, verified: Drafter) -> None:
        self.inner = inner
        self._verified = verified
        self.noted: list[tuple[list[int], list[int]]] = []  # texts, and what was drafted behind them

    def bind(self, slot: int, namespace: str) -> None:
        self.inner.bind(slot, namespace)

    def catch_up(self) -> None:
        self.inner.catch_up()

    def draft(self, wanted: Sequence[Wanted]) -> list[Int32s]:
        tokens = self.inner._sequences.tokens
        texts = [tokens[one.slot, : one.length].tolist() for one in wanted]
        drafts = [draft.tolist() for draft in self.inner.draft(wanted)]
        self.noted += [pair for pair in zip(texts, drafts, strict=True) if pair[1]]
        return self._verified.draft(wanted)

    def computed(self, layout: StepLayout, accepted: Int32s) -> None:
        self.inner.computed(layout, accepted)


def show(runner: Runner, texts: list[list[int]]) -> Shown:
    """Verifies right and wrong drafts of these texts, and notes the block's."""
    rows = runner._drafts
    assert rows is not None
    drafter = rows._drafter
    inner = drafter.inner if isinstance(drafter, Shown) else drafter._second  # type: ignore[attr-defined]
    assert isinstance(inner, NextTokenDrafter)
    inner._least = 0.0  # the tiny models are never sure
    rows._drafter = shown = Shown(inner, Foreseen(rows._sequences.tokens, texts, 0.8))
    return shown


# And experts beside recurrent layers, of which there is no truth.
DRAFTING = MODELS | {"qwen35moe": "families/tiny-qwen35moe-f16"}


@pytest.fixture(scope="module", params=DRAFTING)
def path(request: pytest.FixtureRequest) -> Path:
    return model_of(DRAFTING[request.param], request.getfixturevalue("wide_fixtures"))


@pytest.fixture(scope="module")
def model(path: Path) -> CpuModel:
    return load(path, speculative_config=MTP)


@pytest.fixture(scope="module")
def runner(model: CpuModel) -> Runner:
    return build_cpu_runner(model)


@pytest.fixture(scope="module")
def plain(path: Path) -> Runner:
    return build_cpu_runner(load(path))


def by_hand(path: Path, text: list[int], count: int) -> list[int]:
    """What the block drafts behind a text that is computed at once."""
    drafting = Drafting(path, text)
    length = len(text)
    if length > 2:
        drafting.block.store(drafting.rows(1, length - 1))
    table = np.ascontiguousarray(drafting.kv_slots[None, 1:])
    rows, drafts = drafting.rows(length - 1, length), []
    for number in range(count):
        found = drafting.block.predict(rows, np.zeros(1, np.int32), table)
        drafts.append(int(found.token_ids[0]))
        at = length + number
        positions = np.array([at - 1], np.int32)
        rows = rows._replace(
            token_ids=found.token_ids, states=found.states.clone(), positions=positions,
            kv_slots=drafting.kv_slots[at : at + 1],
        )  # fmt: skip
    return drafts


@pytest.mark.parametrize("streams", nightly_after(1, [3, 1, 16]))
@pytest.mark.parametrize("temperature", nightly_after(1, [0.7, 0.0, 1.5]))
def test_text_and_drafts(path: Path, runner: Runner, plain: Runner, streams: int, temperature: float) -> None:
    """With drafts that are right, wrong and cut, chunks of prompts, and a worker that is lost."""
    requests = asked(streams, runner.ready().vocab_size, temperature=temperature)
    expected, _ = serve(plain, requests, 0, reuse_prefixes=False)
    shown = show(runner, whole_texts(requests, expected))
    found, report = serve(runner, requests, MOST, lose_at(6), reuse_prefixes=False, max_num_batched_tokens=60)
    assert found == expected
    assert report.accepted_draft_tokens > ANSWER * streams / 3
    noted = shown.noted
    assert max(len(draft) for _, draft in noted) == MOST
    for text, draft in noted[:: max(1, len(noted) // 4)]:
        assert draft == by_hand(path, text, len(draft))


WEATHER = {
    "type": "object",
    "properties": {"unit": {"enum": ["celsius", "kelvin"]}, "days": {"type": "integer", "maximum": 99}},
    "required": ["unit", "days"],
    "additionalProperties": False,
    "x-guidance": {"whitespace_flexible": False},
}
NAME = json.dumps('<tool_call>{"name": "weather", "arguments": ')
CALL = json.dumps(
    {
        "grammars": [
            {"lark_grammar": f'start: {NAME} args "}}</tool_call>"\nargs: %json {json.dumps(WEATHER)}'}
        ]
    }
)


def test_calls_of_tools(wide_fixtures: Path) -> None:
    """Masks along the drafts of the block, of a look-up of two tokens, and of the grammar itself, in a crowd."""
    path = model_of(MODELS["qwen35"], wide_fixtures)
    lookup = '{"method": "auto", "num_speculative_tokens": 4, "prompt_lookup_min": 2, "prompt_lookup_max": 6}'
    plain = build_cpu_runner(load(path))
    runner = build_cpu_runner(load(path, speculative_config=lookup))
    requests = asked(4, plain.ready().vocab_size, temperature=0.9)
    calling = [
        msgspec.structs.replace(one, sampling=msgspec.structs.replace(one.sampling, grammar=CALL))
        if one.id % 2
        else one
        for one in requests
    ]
    expected, _ = serve(plain, calling, 0)
    found, report = serve(runner, calling, 4, lose_at(6))
    assert found == expected
    assert report.accepted_draft_tokens > 0


def test_bound_again_and_cached(runner: Runner, plain: Runner) -> None:
    requests = asked(4, runner.ready().vocab_size, temperature=0.7)
    expected, _ = serve(plain, requests, 0)
    shown = show(runner, whole_texts(requests, expected))
    found, report = serve(runner, requests, MOST, lose_at(7), num_kv_slots=150)
    assert found == expected
    assert report.preemptions + report.engine_losses > 0
    assert report.accepted_draft_tokens > ANSWER
    assert len(shown.noted) > ANSWER


def test_drafts_from_a_shortlist(runner: Runner, plain: Runner, monkeypatch: pytest.MonkeyPatch) -> None:
    """Only tokens that are frequent or near those of the request's text are drafted, and the answer stays the same."""
    monkeypatch.setattr("moeserve.worker.drafts.shortlist.LEAST_COVERAGE", 0.0)
    requests = asked(1, runner.ready().vocab_size, temperature=0.7)
    expected, _ = serve(plain, requests, 0)
    shown = show(runner, whole_texts(requests, expected))
    inner, whole = shown.inner, shown.inner._shortlist
    inner._shortlist = Shortlist(inner._sequences.tokens, runner.ready().vocab_size, frequent=64)
    found, _ = serve(runner, requests, MOST)
    inner._shortlist = whole
    assert found == expected
    # Which drafts are made wrong follows from the calls before, and so does the number of steps.
    assert len(shown.noted) > ANSWER / 3
    for text, draft in shown.noted:
        near = {0, 1} | {token // 32 for token in text}
        assert {token // 32 for token in draft} <= near
    assert any(token >= 64 for _, draft in shown.noted for token in draft)


def test_left_and_followed_again(runner: Runner, plain: Runner, monkeypatch: pytest.MonkeyPatch) -> None:
    """While the router does not want it, the block neither follows the texts nor drafts; afterwards it does both."""
    requests = asked(2, runner.ready().vocab_size)
    expected, _ = serve(plain, requests, 0)
    plans = itertools.count()
    monkeypatch.setattr(DraftLength, "keeps_block", property(lambda self: not 4 <= next(plans) < 9))
    shown = show(runner, whole_texts(requests, expected))
    rows = runner._drafts
    assert rows is not None
    keeping = rows._keeping
    monkeypatch.setattr(
        DraftLength, "choose", lambda _, records, *__: ([MOST * keeping.is_on] * len(records), float(MOST))
    )
    steps: list[tuple[bool, int, float]] = []
    block = shown.inner._block
    store, stored = block.store, [0]

    def counted(rows: NextTokenRows) -> None:
        stored.append(len(rows.token_ids))
        store(rows)

    monkeypatch.setattr(block, "store", counted)
    clear, cleared = block.clear, [0]

    def noted(kv_slots: Int32s) -> None:
        cleared.append(len(kv_slots))
        clear(kv_slots)
        tensors = block._kv.tensors  # type: ignore[attr-defined]
        assert not any(tensor[kv_slots.tolist()].any() for tensor in tensors)
        assert sum(stored) == steps[-1][2]  # before the next rows are stored

    monkeypatch.setattr(block, "clear", noted)

    def note(world: object, number: int) -> None:
        steps.append((rows._keeping.is_on, len(shown.noted), sum(stored)))

    found, _ = serve(runner, requests, MOST, note)
    assert found == expected
    assert {is_on for is_on, *_ in steps} == {True, False}
    first = next(at for at, (is_on, *_) in enumerate(steps) if not is_on)
    end = next(at for at in range(first, len(steps)) if steps[at][0])
    assert steps[end][1:] == steps[first][1:]  # the first of them still drafts from what it knows
    assert steps[first][1] > 0
    assert len(cleared[1:]) <= 2 < end - first  # the rows of several steps together
    assert sum(cleared) >= end - first
    assert steps[-1][1] > steps[end][1]
    assert steps[-1][2] > steps[end][2]


def test_its_own_drafts(runner: Runner, plain: Runner) -> None:
    """Which are hardly ever right, where weights are random."""
    requests = asked(2, runner.ready().vocab_size)
    expected, _ = serve(plain, requests, 0)
    rows = runner._drafts
    assert rows is not None
    rows._drafter = show(runner, []).inner
    found, report = serve(runner, requests, MOST)
    assert found == expected
    assert report.draft_tokens > 0


def test_its_kv_is_in_the_pool(model: CpuModel, runner: Runner, plain: Runner) -> None:
    """A layer more for each token; and its weights are counted as loaded."""
    more = dataclasses.replace(model.shape, next_token_layer=None)
    assert more.num_layers == model.shape.num_layers
    expected = KvLayout(model.shape).token_bytes() / KvLayout(more).token_bytes()
    each = {r.ready().kv_bytes / r.ready().num_kv_slots for r in (runner, plain)}
    assert max(each) / min(each) == pytest.approx(expected)
    assert runner.ready().weight_bytes > plain.ready().weight_bytes


def test_its_rows_are_stored_before_a_tier_reads_them(
    wide_fixtures: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rows that are stored for several steps together: else the disk would keep those of another request."""
    runner = build_cpu_runner(
        load(model_of("qwen35", wide_fixtures), speculative_config=MTP, kv_disk=str(tmp_path))
    )
    driver, prompt = Driver(runner), list(range(3, 20))
    driver.step([driver.new(0, prompt, GREEDY)], [driver.row(0, len(prompt), sample=True)])
    inner, pages = show(runner, []).inner, runner._orders._pages
    assert inner._late
    assert pages is not None
    write, late = pages.write, []

    def noted(*orders: Any) -> None:
        late.append(len(inner._late))
        write(*orders)

    monkeypatch.setattr(pages, "write", noted)
    runner.step(StepPlan(1, [], [driver.row(0, 1, sample=True)], pages=PageOrders()))
    assert late == [0]
