"""The router's scheduler and a CPU worker that drafts: texts and logprobs are those without drafts, bit for bit."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from gguf.constants import GGMLQuantizationType as Type
from torch import Tensor

from moeserve.messages.sampling import SamplingParams
from moeserve.messages.schema import TokensItem
from moeserve.messages.steps import NewSeq
from moeserve.placement.engine_memory import draft_record_bytes
from moeserve.router.core.policy.draft_length import DraftLength
from moeserve.router.core.request import DraftRecord
from moeserve.worker.constraints import guided_answer, slot_guides
from moeserve.worker.constraints.slot_guides import Constraints
from moeserve.worker.drafts.forced_drafter import ForcedDrafter
from moeserve.worker.engines.cpu.engine import CpuEngine
from moeserve.worker.engines.engine import SampledAtOnce
from moeserve.worker.engines.gpu.steps.slot_tables import SlotTables
from moeserve.worker.loading.cpu.load import CpuModel, build_cpu_runner
from moeserve.worker.runner import Runner
from moeserve.worker.sequences import Int32s, Sequences, StepLayout
from tests.support.models.deepseek4_model import new_model, write_model
from tests.support.models.gemma_file import WINDOW, write_gemma
from tests.support.nightly import nightly_after
from tests.support.worker.foreseen_drafts import ANSWER, Foreseen, asked, whole_texts
from tests.support.worker.served_answers import Told, load, lose_at, serve
from tests.support.worker.undrafted_rows import noted_without_drafts

MOST = 4
CROWDS = [(1, 0.7), (16, 0.0), (16, 0.7), (1, 0.0), (1, 1.5), (16, 1.5)]  # streams and their temperature
NGRAM = '{"method": "ngram", "num_speculative_tokens": 4, "prompt_lookup_min": 2, "prompt_lookup_max": 6}'


def foresee(runner: Runner, texts: list[list[int]], right: float) -> None:
    rows = runner._drafts
    assert rows is not None
    rows._drafter = Foreseen(rows._sequences.tokens, texts, right)


FIXTURES = Path(__file__).resolve().parents[2] / "fixtures"
# One that attends, one with recurrent state, and one with a pool of its own for windowed layers. Nightly runs add one
# whose state has a window's keys.
MODELS = {
    "qwen3moe": FIXTURES / "tiny-qwen3moe-q4_k_m.gguf",
    "qwen3next": FIXTURES / "tiny-qwen3next-q4_k_m.gguf",
    "gptoss": Path("families/tiny-gptoss-mxfp4.gguf"),
}


@pytest.fixture(scope="module", params=[*MODELS, pytest.param("deepseek4", marks=pytest.mark.slow)])
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> CpuModel:
    path = MODELS.get(request.param, Path())
    if request.param == "deepseek4":
        path = write_model(new_model(8), tmp_path_factory.mktemp("model") / "deepseek4.gguf", Type.F16)
    elif not path.is_absolute():
        path = request.getfixturevalue("wide_fixtures") / path
    return load(path, speculative_config=NGRAM)


@pytest.fixture(scope="module")
def runner(model: CpuModel) -> Runner:
    return build_cpu_runner(model)


@pytest.fixture(scope="module")
def plain(model: CpuModel) -> Runner:
    """Without drafts."""
    config = dataclasses.replace(model.config, speculative_config=None)
    return build_cpu_runner(dataclasses.replace(model, config=config))


@pytest.mark.parametrize(("streams", "temperature"), nightly_after(2, CROWDS))
def test_same_bits(runner: Runner, plain: Runner, streams: int, temperature: float) -> None:
    requests = asked(streams, runner.ready().vocab_size, temperature=temperature)
    expected, before = serve(plain, requests, 0)
    foresee(runner, whole_texts(requests, expected), 0.8)
    found, report = serve(runner, requests, MOST)
    assert found == expected
    assert report.accepted_draft_tokens > ANSWER * streams / 3
    assert report.draft_tokens > report.accepted_draft_tokens
    assert report.steps < before.steps


def test_steps_without_drafts(runner: Runner, plain: Runner, monkeypatch: pytest.MonkeyPatch) -> None:
    """They are sampled as where there are none, which costs less, between steps that have some."""
    requests = asked(1, runner.ready().vocab_size, temperature=0.7)
    expected, _ = serve(plain, requests, 0)
    foresee(runner, whole_texts(requests, expected), 0.5)
    without, with_drafts, in_rounds = noted_without_drafts(runner, monkeypatch), [], runner._runs.launch

    def noted(layout: StepLayout, drafted: Sequence[int], computed_s: float) -> None:
        with_drafts.append(max(drafted))
        in_rounds(layout, drafted, computed_s)

    monkeypatch.setattr(runner._runs, "launch", noted)
    found, report = serve(runner, requests, MOST)
    assert found == expected
    assert min(with_drafts) > 0
    assert len(without) > 2
    assert len(without) + len(with_drafts) + report.accepted_draft_tokens == ANSWER


def test_tokens_sampled_at_once(runner: Runner, plain: Runner, monkeypatch: pytest.MonkeyPatch) -> None:
    """As a GPU does, which is told how many of them count: as many as the text has."""
    requests = asked(4, runner.ready().vocab_size, logprobs=None)
    expected, _ = serve(plain, requests, 0)
    foresee(runner, whole_texts(requests, expected), 0.8)
    counted: list[int] = []

    def at_once(logits: Tensor, slots: Int32s, ahead: Int32s) -> Callable[[], SampledAtOnce]:
        assert len(logits) == len(slots) == len(ahead)
        assert len({*zip(slots.tolist(), ahead.tolist(), strict=True)}) == len(slots)
        tokens = logits.argmax(dim=1).int().numpy()
        found = SampledAtOnce(tokens, [None] * len(tokens), lambda _, counts: counted.extend(counts.tolist()))
        return lambda: found

    monkeypatch.setattr(runner.engine, "sample_at_once", at_once)
    others = noted_without_drafts(runner, monkeypatch)
    found, report = serve(runner, requests, MOST)
    assert found == expected
    assert sum(counted) + sum(others) == 4 * ANSWER
    assert report.accepted_draft_tokens > ANSWER


def test_there_are_windows_and_states(model: CpuModel, runner: Runner) -> None:
    """What the other tests are about, as far as the models have it."""
    ready = runner.ready()
    has_states = any(name in model.config.model for name in ("qwen3next", "deepseek4"))
    assert (ready.num_state_slots > 0) == has_states
    assert (ready.num_window_slots > 0) == ("gptoss" in model.config.model)


SCHEMA = {
    "type": "object",
    "properties": {
        "description": {"type": "string", "maxLength": 9},
        "quantity": {"enum": ["hundred", "thousand"]},
    },
    "required": ["description", "quantity"],
    "additionalProperties": False,
}
GRAMMAR = json.dumps({"grammars": [{"json_schema": SCHEMA | {"x-guidance": {"whitespace_flexible": False}}}]})
PARAMETERS = {
    "penalties": {"presence_penalty": 0.5, "frequency_penalty": 0.3, "repetition_penalty": 1.2},
    "bias": {"logit_bias": {5: 3.0, 11: -100.0}},
    "filters": {"top_k": 20, "top_p": 0.9, "min_p": 0.02},
    "bad sequences": {"bad_sequences": ((7, 5), (9, 11, 5))},
    "grammar": {"grammar": GRAMMAR},
}


@pytest.mark.parametrize("sampling", PARAMETERS.values(), ids=PARAMETERS)
@pytest.mark.parametrize("temperature", nightly_after(1, [0.9, 0.0]))
def test_parameters(runner: Runner, plain: Runner, sampling: dict[str, Any], temperature: float) -> None:
    requests = asked(2, runner.ready().vocab_size, temperature=temperature, **sampling)
    expected, _ = serve(plain, requests, 0)
    foresee(runner, whole_texts(requests, expected), 0.8)
    found, report = serve(runner, requests, MOST)
    assert found == expected
    # A mask that is late on a busy machine ends a run of drafts.
    assert report.accepted_draft_tokens > (0 if "grammar" in sampling else ANSWER / 2)


def test_preempted_and_cached(runner: Runner, plain: Runner) -> None:
    """A pool so small that answers are preempted, and prompts that find what others have left."""
    requests = asked(8, runner.ready().vocab_size, temperature=0.7)
    expected, _ = serve(plain, requests, 0)
    foresee(runner, whole_texts(requests, expected), 0.8)
    found, report = serve(runner, requests, MOST, num_kv_slots=260)
    assert found == expected
    assert report.preemptions > 0
    assert report.accepted_draft_tokens > ANSWER


def test_lost_worker(runner: Runner, plain: Runner, model: CpuModel) -> None:
    """It is lost with drafts in flight; the next one goes on from the tokens that were delivered."""
    requests = asked(4, runner.ready().vocab_size, temperature=0.7)
    expected, _ = serve(plain, requests, 0)
    texts = whole_texts(requests, expected)
    foresee(runner, texts, 0.8)

    found, report = serve(runner, requests, MOST, lose_at(4, 9))
    assert found == expected
    assert report.engine_losses == 2


def test_usage_counts_drafts(runner: Runner, plain: Runner) -> None:
    """Each request's own, which together are the report's; and the worker holds no more records than are counted."""
    requests = asked(3, runner.ready().vocab_size)
    expected, _ = serve(plain, requests, 0)
    foresee(runner, whole_texts(requests, expected), 0.8)
    counts: dict[int, tuple[int, int]] = {}

    def note(world: Told, _: int) -> None:
        for id, seen in world.seen.items():
            if isinstance(seen.final, TokensItem) and seen.final.usage is not None:
                counts[id] = seen.final.usage.draft_tokens, seen.final.usage.accepted_draft_tokens

    _, report = serve(runner, requests, MOST, note)
    assert all(drafted > accepted > 0 for drafted, accepted in counts.values())
    drafted, accepted = map(sum, zip(*counts.values(), strict=True))
    assert (drafted, accepted) == (report.draft_tokens, report.accepted_draft_tokens)


def test_records_of_drafts_are_counted(model: CpuModel, runner: Runner) -> None:
    """As many bytes as are allocated, and no more rows than the router may draft."""
    engine = runner.engine
    assert isinstance(engine, CpuEngine)
    held = engine._model._layers._pending.values()
    counted = draft_record_bytes(model.config, model.shape, model.step_tokens)
    assert counted == sum(one.nbytes for one in held)
    assert (counted > 0) == (runner.ready().num_state_slots > 0)
    assert all(len(one) == min(16 * MOST, model.step_tokens // 2) for one in held)


def test_late_masks_make_no_draft_wrong(
    runner: Runner, plain: Runner, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A run that ends for want of a mask, or at a stop token, tells nothing about the drafts behind it."""
    (asking,) = asked(1, runner.ready().vocab_size)
    expected, _ = serve(plain, [asking], 0)
    foresee(runner, whole_texts([asking], expected), 1.0)
    monkeypatch.setattr(
        Constraints, "follow", lambda _, slots: (np.arange(len(slots)) < 0, None)
    )  # none is ready
    outcomes: list[tuple[int, int]] = []
    observe = DraftLength.observe

    def note(self: DraftLength, record: DraftRecord, allowed: int, drafted: int, accepted: int) -> None:
        outcomes.append((drafted, accepted))
        observe(self, record, allowed, drafted, accepted)

    monkeypatch.setattr(DraftLength, "observe", note)
    found, report = serve(runner, [asking], MOST)
    assert found == expected
    assert report.draft_tokens > report.accepted_draft_tokens == 0
    assert set(outcomes) == {(0, 0)}


def test_stop_token(runner: Runner, plain: Runner) -> None:
    """A run ends with the first token that may end the request, and what follows it is never told."""
    requests = asked(4, runner.ready().vocab_size)
    free, _ = serve(plain, requests, 0)
    stopped = [
        msgspec.structs.replace(
            one,
            sampling=msgspec.structs.replace(
                one.sampling, stop_token_ids=(free[one.id].tokens[17],), min_tokens=9
            ),
        )
        for one in requests
    ]
    expected, _ = serve(plain, stopped, 0)
    foresee(runner, whole_texts(requests, free), 1.0)
    found, _ = serve(runner, stopped, MOST)
    assert found == expected
    assert any(answer.finish_reason == "stop" for answer in found.values())


@pytest.mark.parametrize("streams", [1, 16])
def test_windows_shorter_than_two_runs(tmp_path: Path, streams: int) -> None:
    """A Gemma whose window of five tokens is passed by the drafts of two plans: what is behind it is dropped while rows
    that may still read it are in flight."""
    path = write_gemma(tmp_path / "gemma.gguf", Type.F32)
    models = (load(path, kv_window_ratio=0.2, speculative_config=which) for which in (None, NGRAM))
    plain, runner = map(build_cpu_runner, models)
    assert runner.ready().window == WINDOW == MOST + 1
    requests = asked(streams, runner.ready().vocab_size, temperature=0.9)
    expected, _ = serve(plain, requests, 0)
    foresee(runner, whole_texts(requests, expected), 0.8)
    found, report = serve(runner, requests, MOST, lose_at(6), num_kv_slots=96 if streams == 1 else 260)
    assert found == expected
    assert report.accepted_draft_tokens > ANSWER * streams / 3
    assert report.window_slots_total > 0
    assert (report.preemptions > 0) == (streams > 1)


def test_look_up(model: CpuModel, plain: Runner) -> None:
    """The n-gram drafter itself, on texts that repeat themselves."""
    runner = build_cpu_runner(model)
    few = dict.fromkeys((5, 7, 9), 100.0)  # so that two of them in a row have been there before
    requests = asked(4, runner.ready().vocab_size, length=96, temperature=1.0, logit_bias=few)
    expected, before = serve(plain, requests, 0)
    found, report = serve(runner, requests, MOST)
    assert found == expected
    assert report.draft_tokens > report.accepted_draft_tokens > ANSWER
    assert report.steps < before.steps


def test_asked_again(model: CpuModel, plain: Runner) -> None:
    """What was answered before is drafted, whoever has the slot meanwhile; not for another tenant."""
    runner = build_cpu_runner(model)
    (asking,) = asked(1, runner.ready().vocab_size, temperature=0.9)
    others = [
        msgspec.structs.replace(one, id=one.id + 7) for one in asked(2, runner.ready().vocab_size, length=21)
    ]
    strange = msgspec.structs.replace(asking, key_name="another")
    expected, before = serve(plain, [asking], 0)
    reports = []
    for requests in ([asking], others, [strange], [asking]):
        found, report = serve(runner, requests, MOST)
        reports.append(report)
        if requests != others:
            assert found == expected
    assert reports[3].accepted_draft_tokens > ANSWER / 2 > reports[2].accepted_draft_tokens
    assert reports[3].steps < before.steps * 2 / 3


def test_forced_by_a_grammar(model: CpuModel, plain: Runner, monkeypatch: pytest.MonkeyPatch) -> None:
    """What a grammar leaves no choice about is drafted, without any text to look it up in. Digits can be written in one
    way."""
    # Late masks cost drafts, on a busy machine.
    for name in ("FORCED_WAIT_S", "LEAST_WAIT_S", "COSTLY_MASK_MS"):
        monkeypatch.setattr(slot_guides, name, 30.0)
    monkeypatch.setattr(guided_answer, "COSTLY_FOR_DRAFTS_S", 30.0)
    runner = build_cpu_runner(model)
    rows = runner._drafts
    assert rows is not None
    rows._drafter = rows._drafter._first  # type: ignore[attr-defined]
    assert isinstance(rows._drafter, ForcedDrafter)
    grammar = json.dumps({"grammars": [{"lark_grammar": f"start: {json.dumps('1234567890' * 2)}"}]})
    requests = asked(3, runner.ready().vocab_size, temperature=0.8, grammar=grammar)
    expected, before = serve(plain, requests, 0)
    found, report = serve(runner, requests, MOST)
    assert found == expected
    assert report.draft_tokens == report.accepted_draft_tokens >= 24
    assert report.steps < before.steps


def test_slots_that_were_granted_to_another_are_not_read() -> None:
    """Drafts have slots ahead, in which nothing is ever stored where they are wrong. Attention with a window reads
    masked keys before it: of a request behind a cached prefix, not where the request before had its slots."""
    sequences = Sequences(1, 12, has_window_slots=True)
    tables = SlotTables.empty(1, 12, torch.device("cpu"), has_windows=True)
    assert tables.windows is not None
    sequences.window_slots[0] = tables.windows[0] = 77
    tokens, prefix, windows = (np.arange(count, dtype=np.int32).tobytes() for count in (9, 8, 3))
    greedy = SamplingParams(max_tokens=1, temperature=0.0)
    seq = NewSeq(0, tokens, 9, prefix, greedy, prefix_window_slots=windows)
    sequences.bind(seq)
    tables.bind(seq)
    assert sequences.window_slots[0, :8].tolist() == [0, 0, 0, 0, 0, 0, 1, 2]
    assert tables.windows is not None
    assert tables.windows[0, :8].tolist() == [0, 0, 0, 0, 0, 0, 1, 2]
