"""The engine's layouts, threads and NUMA nodes change its speed, never a bit of its answers."""

from __future__ import annotations

import numpy as np
import pytest

from moeserve.config import ServerConfig
from moeserve.messages.sampling import SamplingParams, TokenLogprob
from moeserve.messages.steps import NewSeq, Row, StepPlan
from moeserve.worker.loading.load import load_runner
from tests.conftest import TINY_MODEL

PROMPT = np.random.default_rng(3).integers(0, 4000, 90).astype(np.int32)


def answer(**options: object) -> list[tuple[int, TokenLogprob | None]]:
    """Ten greedy tokens with logprobs after a prompt in two chunks."""
    config = ServerConfig(model=str(TINY_MODEL), max_num_seqs=4, max_model_len=256, **options)
    runner = load_runner(config, lambda *_: None)
    sampling = SamplingParams(max_tokens=10, temperature=0.0, logprobs=5)
    slots = np.random.default_rng(4).permutation(runner.ready().num_kv_slots)[:256].astype(np.int32)
    new = [NewSeq(2, PROMPT.tobytes(), len(PROMPT), b"", sampling)]
    rows = [(0, 37, False), (37, len(PROMPT) - 37, True), *((len(PROMPT) + i, 1, True) for i in range(9))]
    sampled = []
    for step, (start, count, sample) in enumerate(rows):
        row = Row(2, start, count, slots[start : start + count].tobytes(), sample)
        result = runner.step(StepPlan(step, new, [row]))
        sampled += [(s.token_id, s.logprob) for s in result.sampled]
        new = []
    return sampled


@pytest.fixture(scope="module")
def expected() -> list[tuple[int, TokenLogprob | None]]:
    return answer(threads=1)


@pytest.mark.parametrize(
    "options",
    [
        {"threads": 2},
        {"threads": 3, "cpu_binding": "none"},
        {"threads": 2, "numa_nodes": 2},
        {"threads": 5, "numa_nodes": 2, "cpu_binding": "none"},
        {"threads": 2, "weight_layout": "file"},
        {"threads": 3, "weight_layout": "file", "numa_nodes": 3, "cpu_binding": "none"},
    ],
    ids=str,
)
def test_answers_are_the_same_to_the_last_bit(
    options: dict[str, object], expected: list[tuple[int, TokenLogprob | None]]
) -> None:
    assert answer(**options) == expected
