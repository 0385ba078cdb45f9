"""Tokens that are sampled along drafts have the target's distribution: a chi-square test, with the real sampler."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from moeserve.grammar.engine import GrammarEngine
from moeserve.messages.sampling import SamplingParams, TokenLogprob
from moeserve.messages.steps import NewSeq, Row
from moeserve.worker.constraints.slot_guides import Constraints
from moeserve.worker.drafts.draft_rows import DraftRows
from moeserve.worker.drafts.drafter import Reading
from moeserve.worker.drafts.run_sampler import RunSampler
from moeserve.worker.engines.cpu.engine import CpuEngine
from moeserve.worker.engines.cpu.sampler import CpuSampler
from moeserve.worker.engines.engine import TokenMasks
from moeserve.worker.sequences import Int32s, Sequences, StepLayout
from tests.support.worker.constrained_rows import TOKENIZER
from tests.support.worker.foreseen_drafts import Foreseen

VOCAB, SLOTS, DRAFTS, DRAWS = 16, 32, 2, 20_000
TEMPERATURE = 0.8
MOST = 57.0  # which chi-square of 15 degrees of freedom is above once in a million times


class FixedLogits(CpuEngine):
    """An engine whose logits are the same in every step: the first row's, then those behind each draft."""

    def __init__(self, logits: torch.Tensor, sampler: CpuSampler) -> None:
        self._by_depth = logits
        self._sampler = sampler

    def logits_of(self, rows: Int32s) -> torch.Tensor:
        return self._by_depth[torch.from_numpy(rows % (DRAFTS + 1)).long()]

    def sample_from(
        self, logits: torch.Tensor, slots: Int32s, masks: TokenMasks | None
    ) -> tuple[Int32s, list[TokenLogprob | None]]:
        return self._sampler.sample(logits, slots, masks)

    def commit_states(self, layout: StepLayout, accepted: Int32s) -> None:
        pass


@pytest.mark.slow
@pytest.mark.parametrize("rank", [1, 3])
def test_drafts_do_not_change_the_distribution(rank: int) -> None:
    """Each position's tokens, as far as it is reached. rank: of the tokens that are drafted, 1 for the likeliest."""
    logits = torch.from_numpy(np.random.default_rng(2).normal(0, 0.9, (DRAFTS + 1, VOCAB)).astype(np.float32))
    wanted = (logits.double() / TEMPERATURE).softmax(1).numpy()
    drafts = wanted[:DRAFTS].argsort(1)[:, VOCAB - rank]
    sequences, sampler = Sequences(SLOTS, DRAFTS + 2), CpuSampler(SLOTS, VOCAB)
    rows = DraftRows(sequences, Foreseen(sequences.tokens, [], 1.0), Reading())
    constraints = Constraints(SLOTS, lambda: GrammarEngine(TOKENIZER))
    runs = RunSampler(FixedLogits(logits, sampler), sequences, constraints, rows)
    prompt, kv_slots = np.zeros(1, np.int32), np.zeros(DRAFTS + 1, np.int32).tobytes()
    layout = StepLayout([Row(slot, 0, DRAFTS + 1, kv_slots, True) for slot in range(SLOTS)], [DRAFTS] * SLOTS)
    counts = np.zeros((DRAFTS + 1, VOCAB), np.int64)
    for seed in range(0, DRAWS, SLOTS):
        for slot in range(SLOTS):
            params = SamplingParams(max_tokens=9, temperature=TEMPERATURE, seed=seed + slot)
            rows.bind(NewSeq(slot, prompt.tobytes(), 1, b"", params))
            sampler.bind(slot, params, prompt, np.zeros(0, np.int32))
        sequences.tokens[:, 1 : DRAFTS + 1] = drafts
        runs.launch(layout, [DRAFTS] * SLOTS, 0.0)
        for sampled in runs.read().sampled:
            assert sampled.accepted is not None
            run = [sampled.token_id, *sampled.accepted.token_ids]
            assert run[:-1] == drafts[: len(run) - 1].tolist()
            counts[np.arange(len(run)), run] += 1
    assert counts[0].sum() == DRAWS
    for found, probabilities in zip(counts, wanted, strict=True):
        expected = found.sum() * probabilities
        assert expected.min() >= 1.0
        assert ((found - expected) ** 2 / expected).sum() < MOST
