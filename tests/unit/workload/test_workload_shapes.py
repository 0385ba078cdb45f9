"""Made-up workloads: lengths, prefixes, turns, arrivals; the same seed is the same workload."""

from __future__ import annotations

import argparse
import math

import numpy as np
import pytest

from moeserve.cli.command_line import demonstration_model
from moeserve.cli.workload.options import add_workload_options, workload_from
from moeserve.cli.workload.prompts import END_ID, FIRST_ID, TokenHistory
from moeserve.cli.workload.shapes import PRESETS, WorkloadShape, arrival_times, generate
from moeserve.cli.workload.trace import Workload
from moeserve.models.open import open_metadata
from moeserve.tokenizer.vocabulary import Vocabulary


def workload(shape: WorkloadShape, requests: int = 200, seed: int = 0, rate: float = math.inf) -> Workload:
    return generate(shape, requests, rate, 1.0, seed)


def prompts(workload: Workload, session: int) -> list[list[int]]:
    """The prompt of every turn, when each answer is the token 7 as often as asked for."""
    history = TokenHistory(workload, session)
    found: list[list[int]] = []
    for number, turn in enumerate(workload.sessions[session].turns):
        found.append(history.prompt(number).tolist())
        history.answered(np.full(turn.output_len, 7, np.int32))
    return found


@pytest.mark.parametrize("name", PRESETS)
def test_presets_make_what_was_asked_for(name: str) -> None:
    made = workload(PRESETS[name], 203)
    assert made.num_requests == 203
    for session in range(len(made.sessions)):
        for prompt, turn in zip(prompts(made, session), made.sessions[session].turns, strict=True):
            assert len(prompt) >= turn.input_len >= 1
            new = prompt[-turn.input_len :]
            assert all(FIRST_ID <= id < END_ID for id in new)


@pytest.mark.parametrize(
    ("name", "count", "prompt", "answer"),
    [
        ("64-clients", 64, 256, 256),
        ("256-clients", 256, 256, 256),
        ("16-long-prompts", 16, 8000, 128),
        ("one-long-prompt", 1, 32_000, 16),
    ],
)
def test_cases_have_a_number_of_requests(name: str, count: int, prompt: int, answer: int) -> None:
    parser = argparse.ArgumentParser()
    add_workload_options(parser)
    made = workload_from(parser.parse_args(["--dataset-name", name]))
    turns = [session.turns[0] for session in made.sessions]
    assert [(turn.input_len, turn.output_len, turn.not_before) for turn in turns] == [
        (prompt, answer, 0.0)
    ] * count
    fewer = workload_from(
        parser.parse_args(["--dataset-name", name, "--num-prompts", "1", "--output-len", "2"])
    )
    assert [turn.output_len for session in fewer.sessions for turn in session.turns] == [2]


def test_lengths_fill_their_range_to_both_ends() -> None:
    made = workload(WorkloadShape(input_len=10, output_len=4, range_ratio=0.5), 2000)
    turns = [session.turns[0] for session in made.sessions]
    assert {turn.input_len for turn in turns} == set(range(5, 16))
    assert {turn.output_len for turn in turns} == set(range(2, 7))


def test_sessions_of_a_group_share_their_prefix_and_nothing_else() -> None:
    made = workload(WorkloadShape(input_len=20, prefix_len=30, num_prefixes=3), 12)
    whole = [prompts(made, session)[0] for session in range(12)]
    for i in range(12):
        for j in range(i):
            same = i % 3 == j % 3
            assert (whole[i][:30] == whole[j][:30]) == same
            assert whole[i][30:] != whole[j][30:]


def test_turns_continue_prompt_and_answer() -> None:
    made = workload(WorkloadShape(input_len=5, output_len=3, prefix_len=4, num_turns=3, think_time=2.0), 8)
    assert [len(session.turns) for session in made.sessions] == [3, 3, 2]
    first, second, third = prompts(made, 0)
    assert second[:12] == first + [7] * 3
    assert third[:20] == second + [7] * 3
    assert (len(first), len(second), len(third)) == (9, 17, 25)
    thinks = [turn.think for session in made.sessions for turn in session.turns]
    assert [think > 0 for think in thinks] == [False, True, True] * 2 + [False, True]


def test_every_so_many_requests_one_is_long() -> None:
    made = workload(WorkloadShape(input_len=10, long_every=4, long_input_len=500), 12)
    assert [session.turns[0].input_len for session in made.sessions] == [10, 10, 10, 500] * 3


def test_same_seed_same_workload() -> None:
    shape = WorkloadShape(input_len=50, range_ratio=0.9, num_turns=4, think_time=3.0)
    assert workload(shape, seed=3, rate=2) == workload(shape, seed=3, rate=2)
    assert workload(shape, seed=3, rate=2) != workload(shape, seed=4, rate=2)
    assert prompts(workload(shape, seed=3), 1) == prompts(workload(shape, seed=3), 1)
    assert prompts(workload(shape, seed=3), 1) != prompts(workload(shape, seed=4), 1)


@pytest.mark.parametrize(("burstiness", "variation"), [(0.25, 2.0), (1.0, 1.0), (16.0, 0.25)])
def test_arrivals_keep_rate_and_burstiness(burstiness: float, variation: float) -> None:
    """The gaps' coefficient of variation is 1 / sqrt(burstiness): 1 for a Poisson process."""
    times = arrival_times(4000, 8.0, burstiness, np.random.default_rng(1))
    gaps = np.diff(times)
    assert times[-1] == pytest.approx(4000 / 8.0)
    assert (gaps >= 0).all()
    assert gaps.std() / gaps.mean() == pytest.approx(variation, rel=0.1)


def test_infinite_rate_is_all_at_once() -> None:
    assert not arrival_times(5, math.inf, 1.0, np.random.default_rng(0)).any()


def test_prompts_are_ordinary_tokens_of_the_smallest_model_we_know() -> None:
    """The packaged one, which a newcomer measures first."""
    vocabulary = Vocabulary.from_gguf(open_metadata(demonstration_model()))
    ids = range(FIRST_ID, END_ID)
    assert len(vocabulary.token_bytes) >= END_ID
    assert not (vocabulary.special | vocabulary.user_defined | vocabulary.unused) & set(ids)
