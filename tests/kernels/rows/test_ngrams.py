"""N-gram embeddings on the CPU pool, beside their specification: the gate, and the convolution with its state."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch

from moeserve.kernels.ngrams import reference
from moeserve.kernels.ngrams.hashing import NgramHashes
from moeserve.kernels.ngrams.reference import NgramWeights
from moeserve.kernels.residual_operations import NgramNorms
from moeserve.kernels.stream_operands import StateDrafts, StateLayer, StateSequences
from tests.kernels.operations import ISAS, stream_of
from tests.kernels.weights import nmse

STREAMS, HIDDEN, WIDTH, TAPS, DILATION, EPS = 4, 96, 64, 4, 3, 1e-6
CHANNELS, KEPT = STREAMS * HIDDEN, (TAPS - 1) * DILATION
BEFORE = 7  # numbers of other layers in a slot
each_isa = pytest.mark.parametrize("isa", ISAS)


def weights() -> NgramWeights:
    torch.manual_seed(1)
    norms = (torch.rand(STREAMS, HIDDEN) + 0.5 for _ in range(3))
    key, value = torch.randn(CHANNELS, WIDTH) / 8, torch.randn(HIDDEN, WIDTH) / 8
    return NgramWeights(key, value, *norms, torch.randn(TAPS, CHANNELS) / 2)


def ints(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


class Layer:
    def __init__(self, isa: str) -> None:
        self.stream, self.w = stream_of(isa), weights()
        self.states = torch.full((3, BEFORE + KEPT * CHANNELS + 2), 77.0)
        self.state = StateLayer(self.states, BEFORE)
        self.stream.copy_states(self.states, torch.tensor([[-1, 0], [-1, 1]], dtype=torch.int32))

    def step(
        self, x: torch.Tensor, embedded: torch.Tensor, counts: list[int], drafts: list[int] | None = None
    ) -> torch.Tensor:
        """Sequence i has its state in slot i; the last drafts[i] of its rows are drafts."""
        w, n, x = self.w, len(x), x.clone()
        key, value, factors = embedded @ w.key.T, embedded @ w.value.T, torch.empty(len(x), STREAMS)
        norms = NgramNorms(*(norm.flatten() for norm in (w.query_norm, w.key_norm, w.conv_norm)))
        self.stream.ngram_gate(x, key, value, norms, EPS, n, factors)
        starts = [0, *itertools.accumulate(counts)][:-1]
        of_drafts = None
        if drafts is not None:
            self.first = ints(*[0, *itertools.accumulate(drafts)][:-1])
            self.pending = torch.full((sum(drafts), CHANNELS), torch.nan)
            of_drafts = StateDrafts(ints(*drafts), self.first)
        sequences = StateSequences(ints(*starts), ints(*counts), ints(*range(len(counts))), of_drafts)
        self.stream.ngram_conv(
            key, factors, value, w.conv, DILATION, self.state, sequences, n, x,
            None if drafts is None else self.pending,
        )  # fmt: skip
        self.stream.wait()
        assert (self.states[:, :BEFORE][:2] == 0).all()
        assert (self.states[2] == 77.0).all(), "wrote to another slot"
        return x

    def commit(self, accepted: list[int]) -> None:
        slots = ints(*range(len(accepted)))
        self.stream.commit_ngrams(self.state, KEPT, slots, self.first, ints(*accepted), self.pending)
        self.stream.wait()

    def kept(self, slot: int) -> torch.Tensor:
        return self.states[slot, BEFORE : BEFORE + KEPT * CHANNELS].view(KEPT, CHANNELS)


def inputs(n: int) -> tuple[torch.Tensor, torch.Tensor]:
    torch.manual_seed(n)
    return torch.randn(n, CHANNELS), torch.randn(n, WIDTH)


@each_isa
def test_against_float64(isa: str) -> None:
    x, embedded = inputs(50)
    layer = Layer(isa)
    found = layer.step(x, embedded, [50])
    before = torch.zeros(KEPT, CHANNELS, dtype=torch.float64)
    expected, after = reference.add(x.view(50, STREAMS, HIDDEN), embedded, layer.w, EPS, DILATION, before)
    assert nmse(found, expected.flatten(1)) < 1e-11
    assert nmse(layer.kept(0), after) < 1e-11


def test_a_stream_without_agreement_lets_half_in() -> None:
    """A key of zeros: sign(0) is 0, though the root of the least agreement is not."""
    layer = Layer(ISAS[-1])
    x, embedded = inputs(2)
    layer.w = layer.w._replace(key=torch.zeros(CHANNELS, WIDTH))
    found = layer.step(x, embedded, [2])
    before = torch.zeros(KEPT, CHANNELS, dtype=torch.float64)
    expected, _ = reference.add(x.view(2, STREAMS, HIDDEN), embedded, layer.w, EPS, DILATION, before)
    assert nmse(found, expected.flatten(1)) < 1e-11


@each_isa
@pytest.mark.parametrize("chunk", [1, 2, 7, 9, 10])
def test_chunks_and_company_do_not_change_a_bit(isa: str, chunk: int) -> None:
    x, embedded = inputs(23)
    whole, parts = Layer(isa), Layer(isa)
    expected = whole.step(x, embedded, [23])
    others, of_others = inputs(3)
    for start in range(0, 23, chunk):
        count = len(x[start : start + chunk])
        rows = torch.cat([x[start : start + count], others])
        found = parts.step(rows, torch.cat([embedded[start : start + count], of_others]), [count, 3])
        assert torch.equal(found[:count], expected[start : start + count])
    assert torch.equal(parts.kept(0), whole.kept(0))


@each_isa
@pytest.mark.parametrize("accepted", [0, 1, 5, 11])
def test_only_accepted_drafts_move_the_state(isa: str, accepted: int) -> None:
    x, embedded = inputs(20)
    layer, without = Layer(isa), Layer(isa)
    expected = without.step(x[: 9 + accepted], embedded[: 9 + accepted], [9 + accepted])
    found = layer.step(x, embedded, [20], [11])
    assert torch.equal(found[: 9 + accepted], expected)
    layer.commit([accepted])
    assert torch.equal(layer.kept(0), without.kept(0))


HASHES = NgramHashes((5, 3, 7), (11, 13, 17, 19), (0, 11, 24, 41), end_token=2)


def test_the_rows_of_bigrams_and_trigrams() -> None:
    rows = HASHES.rows(np.array([9], np.int32), np.array([[8, 6]], np.int32))
    two, three = 9 * 5 ^ 8 * 3, 9 * 5 ^ 8 * 3 ^ 6 * 7
    assert rows.tolist() == [[two % 11, 11 + two % 13, 24 + three % 17, 41 + three % 19]]


def test_what_lies_before_an_end_or_the_first_token_counts_as_the_end() -> None:
    tokens = np.full(4, 9, np.int32)
    rows = HASHES.rows(tokens, np.array([[2, 6], [2, 2], [-1, -1], [2, -1]], np.int32))
    assert len({tuple(row) for row in rows.tolist()}) == 1
    assert rows[0].tolist() != HASHES.rows(tokens[:1], np.array([[8, 2]], np.int32))[0].tolist()


def test_the_hashes_are_those_of_transformers() -> None:
    from tests.support.models.qwen4exp_model import END, new_model

    embedding = new_model(3).model.layers[1].ple.ple_embedding
    embedding.ngram_embedding.weight.data[:, 0] = torch.arange(len(embedding.ngram_embedding.weight))
    tokens = [5, END, 7, 600, 7, 600, END, END, 3, 639]
    theirs = embedding(torch.tensor([tokens]), None)[0].view(len(tokens), 4, -1)[:, :, 0].long()
    hashes = NgramHashes(
        multipliers=tuple(embedding.layer_multipliers.tolist()),
        head_rows=tuple(embedding.head_vocab_sizes),
        head_offsets=tuple(embedding.head_offsets),
        end_token=END,
    )
    known = np.array([-1, -1, *tokens], np.int32)
    ours = hashes.rows(known[2:], np.stack([known[1:-1], known[:-2]], axis=1))
    assert ours.tolist() == theirs.tolist()
