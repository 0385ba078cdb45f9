"""Drafts by a small model beside the model, through the scheduler: the texts are the same with and without it, whatever
is cached, preempted or lost; and what it drafts depends on the text alone."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from moeserve.messages.steps import Row
from moeserve.models.errors import ModelError
from moeserve.router.core.policy.draft_length import DraftLength
from moeserve.worker.drafts import model_drafter
from moeserve.worker.drafts.draft_rows import DraftRows
from moeserve.worker.drafts.drafter import Reading, Wanted
from moeserve.worker.drafts.foretold import guess
from moeserve.worker.drafts.kv_tags import KvTags, first_tag, tags_of
from moeserve.worker.drafts.model_drafter import ModelDrafter
from moeserve.worker.engines.cpu.small_model import CpuSmallModel
from moeserve.worker.loading.cpu.load import build_cpu_runner
from moeserve.worker.runner import Runner
from moeserve.worker.sequences import Int32s, Sequences, StepLayout
from tests.support.nightly import nightly_after
from tests.support.worker.foreseen_drafts import ANSWER, asked
from tests.support.worker.served_answers import load, lose_at, serve

MOST = 4
CROWDS = [(1, 0.7), (16, 0.0), (16, 0.7), (1, 0.0), (1, 1.5), (16, 1.5)]  # streams and their temperature
FIXTURES = Path(__file__).resolve().parents[2] / "fixtures"
MODEL = FIXTURES / "tiny-qwen2moe-q4_k_m.gguf"
# All of the same vocabulary: the model itself, one with recurrent state, and one with windows and per-layer inputs.
SMALL = {
    "same": MODEL,
    "recurrent": FIXTURES / "tiny-qwen3next-q4_k_m.gguf",
    "windowed": FIXTURES / "tiny-gemma4e-f16.gguf",
}
OTHER = FIXTURES / "tiny-qwen3moe-q4_k_m.gguf"  # of another vocabulary


@pytest.fixture(scope="module")
def plain() -> Runner:
    return build_cpu_runner(load(MODEL))


def drafter_of(runner: Runner) -> ModelDrafter:
    rows = runner._drafts
    assert rows is not None
    drafter = rows._drafter._second  # type: ignore[attr-defined]
    assert isinstance(drafter, ModelDrafter)
    return drafter


def drafting(small: Path, *, least: float = 0.0, model: Path = MODEL, **options: Any) -> Runner:
    """least: the tiny models are never sure."""
    runner = build_cpu_runner(load(model, speculative_model=str(small), **options))
    drafter_of(runner)._least = least
    return runner


@pytest.fixture(scope="module", params=SMALL)
def runner(request: pytest.FixtureRequest) -> Runner:
    return drafting(SMALL[request.param])


@pytest.fixture(autouse=True)
def always(monkeypatch: pytest.MonkeyPatch) -> None:
    """Drafts whether or not they pay, which differs by machine."""
    monkeypatch.setattr(
        DraftLength, "choose", lambda _, records, context, most, budget: ([most] * len(records), 0.0)
    )


@pytest.mark.parametrize(("streams", "temperature"), nightly_after(2, CROWDS))
def test_same_bits(runner: Runner, plain: Runner, streams: int, temperature: float) -> None:
    requests = asked(streams, plain.ready().vocab_size, temperature=temperature)
    expected, _ = serve(plain, requests, 0)
    found, report = serve(runner, requests, MOST)
    assert found == expected
    assert report.draft_tokens > ANSWER * streams / 2


@pytest.mark.parametrize("temperature", [0.0, 1.5])
def test_the_same_model_is_nearly_always_right(
    plain: Runner, temperature: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its drafts are what the model says, with the noise of the request, if its probabilities are taken as exact."""
    monkeypatch.setattr(model_drafter, "guess", partial(guess, spread=1e-9))
    runner = drafting(MODEL)
    requests = asked(4, plain.ready().vocab_size, temperature=temperature)
    expected, before = serve(plain, requests, 0)
    found, report = serve(runner, requests, MOST)
    assert found == expected
    assert report.accepted_draft_tokens > 0.97 * report.draft_tokens > ANSWER
    assert report.steps < before.steps / 3


SCHEMA = {
    "type": "object",
    "properties": {
        "description": {"type": "string", "maxLength": 9},
        "quantity": {"enum": ["hundred", "two"]},
    },
    "required": ["description", "quantity"],
}
PARAMETERS: dict[str, dict[str, Any]] = {
    "penalties": {"presence_penalty": 0.5, "frequency_penalty": 0.3, "repetition_penalty": 1.2},
    "grammar": {"grammar": json.dumps({"grammars": [{"json_schema": SCHEMA}]})},
    "stop": {"stop_token_ids": tuple(range(3, 200)), "min_tokens": 9},
}


# All parameters with one small model, and grammars, which also mask its drafts, with each.
ALL_PARAMETERS = [
    *(("same", name) for name in PARAMETERS),
    *((small, "grammar") for small in SMALL if small != "same"),
    *((small, name) for small in SMALL if small != "same" for name in PARAMETERS if name != "grammar"),
]


@pytest.mark.parametrize(("runner", "name"), nightly_after(5, ALL_PARAMETERS), indirect=["runner"])
def test_parameters(runner: Runner, plain: Runner, name: str) -> None:
    requests = asked(2, plain.ready().vocab_size, temperature=0.9, **PARAMETERS[name])
    expected, _ = serve(plain, requests, 0)
    found, report = serve(runner, requests, MOST)
    assert found == expected
    assert report.draft_tokens > 0


class Checked:
    """A model drafter, some of whose drafts are compared with what its model says of the whole text."""

    def __init__(self, inner: ModelDrafter) -> None:
        self.inner = inner
        self.texts: list[Int32s] = []
        self.drafts: list[list[int]] = []

    def bind(self, slot: int, namespace: str) -> None:
        self.inner.bind(slot, namespace)

    def catch_up(self) -> None:
        self.inner.catch_up()

    def computed(self, layout: StepLayout, accepted: Int32s) -> None:
        self.inner.computed(layout, accepted)

    def draft(self, wanted: Sequence[Wanted]) -> list[Int32s]:
        drafts = self.inner.draft(wanted)
        for one, draft in zip(wanted, drafts, strict=True):
            if len(draft):
                self.texts.append(self.inner._sequences.tokens[one.slot, : one.length].copy())
                self.drafts.append(draft.tolist())
        return drafts

    def check(self, most: int = 8) -> None:
        assert self.drafts
        for at in range(0, len(self.drafts), max(1, len(self.drafts) // most)):
            assert self.drafts[at] == by_hand(self.inner, self.texts[at], len(self.drafts[at]))


def by_hand(drafter: ModelDrafter, text: Int32s, count: int) -> list[int]:
    """What the drafting model says after a text that it computes alone and at once, with nothing cached."""
    slots, positions = drafter._sequences.tokens.shape
    sequences, length = Sequences(slots, positions), len(text)
    sequences.tokens[0, :length] = text
    sequences.kv_slots[0] = np.arange(positions)
    model, size = drafter._model, drafter._vocab_size
    alone = ModelDrafter(
        sequences,
        model,
        size,
        drafter._most_rows,
        positions,
        Reading(),
        lambda logits, slot, position: None,
        least_probability=0.0,
    )
    return [int(token) for token in alone.draft([Wanted(0, length, count)])[0]]


@pytest.fixture
def checked(runner: Runner) -> Iterator[Checked]:
    rows = runner._drafts
    assert rows is not None
    before = rows._drafter
    rows._drafter = drafter = Checked(drafter_of(runner))
    yield drafter
    rows._drafter = before


def test_drafts_depend_on_the_text_alone(runner: Runner, plain: Runner, checked: Checked) -> None:
    """With prompts in chunks, answers that are preempted, and a worker that is lost."""
    requests = asked(6, plain.ready().vocab_size)
    expected, _ = serve(plain, requests, 0)
    found, report = serve(runner, requests, MOST, lose_at(7), num_kv_slots=200, max_num_batched_tokens=60)
    assert found == expected
    assert report.preemptions > 0
    assert report.engine_losses == 1
    checked.check()


def test_long_texts_are_read_in_pieces(
    runner: Runner, plain: Runner, checked: Checked, monkeypatch: pytest.MonkeyPatch
) -> None:
    """While they are read there are no drafts for them, and the router is told so."""
    monkeypatch.setattr(model_drafter, "PIECE", 20)
    noted: list[tuple[int, float, list[int]]] = []
    requests = asked(3, plain.ready().vocab_size, length=200)
    expected, _ = serve(plain, requests, 0)
    place = DraftRows.place

    def note(self: DraftRows, rows: list[Row], **options: bool) -> tuple[list[Row], list[int]]:
        placed, drafted = place(self, rows, **options)
        assert not any(drafted[at] for at in self.lagging_rows)
        noted.append((sum(drafted), self.read_ms, list(self.lagging_rows)))
        return placed, drafted

    monkeypatch.setattr(DraftRows, "place", note)
    found, _ = serve(runner, requests, MOST, reuse_prefixes=False)
    assert found == expected
    checked.check()
    lagging = [step for step in noted if step[2]]
    assert len(lagging) > 8
    assert all(step[1] > 0.0 for step in lagging)
    assert any(step[0] for step in noted[-9:])


def test_a_cached_prefix_is_not_read_again(plain: Runner) -> None:
    """But by a recurrent model, whose state is not cached."""
    (asking,) = asked(1, plain.ready().vocab_size, length=200)
    both = [asking, msgspec.structs.replace(asking, id=1)]
    compute = ModelDrafter._compute
    for name in ("same", "recurrent"):
        runner = drafting(SMALL[name])
        computed: list[int] = []

        def note(
            self: ModelDrafter, pieces: Sequence[tuple[int, int, int]], computed: list[int] = computed
        ) -> StepLayout:
            computed.append(sum(count for _, _, count in pieces))
            return compute(self, pieces)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(ModelDrafter, "_compute", note)
            serve(runner, [asking], MOST)
            once, computed[:] = sum(computed), []
            found, report = serve(runner, both, MOST, max_num_seqs=1)
        assert found[0] == found[1]
        assert report.cached_tokens > 90
        assert once > 95
        # The slots hold it still, of the time before.
        assert sum(computed) - once > 90 if name == "recurrent" else sum(computed) < once


def test_another_namespace_reads_for_itself() -> None:
    tags = KvTags(4)
    slots, tokens = np.arange(4, dtype=np.int32), np.array([5, -9, 7, 7], np.int32)
    mine, other = (tags_of(first_tag(name), tokens, 0) for name in ("a", "b"))
    tags.write(slots, mine)
    assert tags.num_valid(slots, mine) == 4
    assert tags.num_valid(slots, other) == 0
    changed = tokens.copy()
    changed[2] = 8
    assert tags.num_valid(slots, tags_of(first_tag("a"), changed, 0)) == 2
    rest = tags_of(mine[1], tokens[2:], 2)
    assert rest.tolist() == mine[2:].tolist()


def test_look_up_comes_first(plain: Runner) -> None:
    """With "auto"; and the model is asked where that finds nothing, also long after it was last."""
    config = '{"method": "auto", "num_speculative_tokens": 4, "prompt_lookup_min": 2, "prompt_lookup_max": 6}'
    runner = build_cpu_runner(load(MODEL, speculative_model=str(MODEL), speculative_config=config))
    rows = runner._drafts
    assert rows is not None
    both = rows._drafter._second  # type: ignore[attr-defined]
    both._second._least = 0.0
    few = dict.fromkeys((5, 7, 9), 100.0)
    requests = asked(4, plain.ready().vocab_size, length=96, temperature=1.0, logit_bias=few)
    requests += [
        msgspec.structs.replace(one, id=one.id + 4) for one in asked(2, plain.ready().vocab_size, length=31)
    ]
    expected, _ = serve(plain, requests, 0)
    found, report = serve(runner, requests, MOST)
    assert found == expected
    assert report.accepted_draft_tokens > ANSWER


def test_its_kv_and_weights_are_counted(runner: Runner, plain: Runner) -> None:
    model = drafter_of(runner)._model
    assert isinstance(model, CpuSmallModel)
    each, alone = (r.ready().kv_bytes / r.ready().num_kv_slots for r in (runner, plain))
    held = sum(tensor.nbytes for layer in model._model._kv for tensor in layer.tensors if len(layer.keys))
    assert each - alone == held / runner.ready().num_kv_slots > 0
    assert runner.ready().weight_bytes > plain.ready().weight_bytes


def test_another_vocabulary_is_refused() -> None:
    with pytest.raises(ModelError, match=r"token 631 is 'dd' here and .* there") as error:
        load(MODEL, speculative_model=str(OTHER))
    assert "tiny-qwen3moe" in str(error.value)
    assert "ngram" in str(error.value)


@pytest.mark.parametrize("length", [60, 90])
def test_at_the_end_of_the_context(plain: Runner, length: int) -> None:
    """Where drafts have no place beyond the last position, and steps hold fewer tokens than drafts and their texts."""
    options: dict[str, Any] = {"max_model_len": 100, "max_num_batched_tokens": 16, "max_total_tokens": 1000}
    runner, without = drafting(MODEL, **options), build_cpu_runner(load(MODEL, **options))
    requests = asked(5, plain.ready().vocab_size, length=length, max_tokens=100 - length)
    expected, _ = serve(without, requests, 0, max_num_batched_tokens=16)
    found, report = serve(runner, requests, MOST, max_num_batched_tokens=16)
    assert found == expected
    assert all(answer.finish_reason == "length" for answer in found.values())
    assert report.accepted_draft_tokens > 0
