"""N-gram embeddings in Triton, beside their float64 reference."""

from __future__ import annotations

import torch

from tests.kernels.triton_device import DEVICE, counter, ints  # isort: skip  (first: it sets up the interpreter)
from moeserve.kernels.delta_net.op import StepSequences
from moeserve.kernels.ngrams import reference
from moeserve.kernels.ngrams.op import NgramTensors, add_ngrams
from moeserve.kernels.ngrams.reference import NgramWeights
from moeserve.kernels.residual_operations import NgramNorms
from tests.kernels.rows.triton_rows import EPS, normal
from tests.kernels.weights import nmse

STREAMS, HIDDEN, WIDTH, TAPS, DILATION = 4, 96, 64, 4, 3  # blocks of channels that cover two streams
CHANNELS, KEPT = STREAMS * HIDDEN, (TAPS - 1) * DILATION
BEFORE, SLOTS, ROWS = 16, 4, 16  # values of other layers in a slot before this one's
W = NgramWeights(
    normal(CHANNELS, WIDTH, seed=1) / 8,
    normal(HIDDEN, WIDTH, seed=2) / 8,
    *(normal(STREAMS, HIDDEN, seed=seed).abs() + 0.5 for seed in (3, 4, 5)),
    normal(TAPS, CHANNELS, seed=6) / 2,
)


def step(
    states: torch.Tensor, x: torch.Tensor, embedded: torch.Tensor, counts: list[int], slots: list[int]
) -> torch.Tensor:
    """Rows of as many sequences, padded to ROWS."""
    n = sum(counts)
    padded = torch.full((ROWS, CHANNELS), 77.0, device=DEVICE)
    padded[:n] = x.to(DEVICE)
    products = torch.full((ROWS, CHANNELS + HIDDEN), float("nan"), device=DEVICE)
    products[:n] = (embedded @ torch.cat([W.key, W.value]).T).to(DEVICE)
    empty = [0] * (ROWS - len(counts))
    of_row = [i for i, count in enumerate(counts) for _ in range(count)] + [0] * (ROWS - n)
    first = [sum(counts[:i]) for i in range(len(counts))]
    sequences = StepSequences(ints(first + empty), ints(counts + empty), ints(slots + empty), ints(of_row))
    tensors = NgramTensors(
        products[:, :CHANNELS],
        products[:, CHANNELS:],
        torch.empty(ROWS, STREAMS, device=DEVICE),
        torch.full((ROWS, CHANNELS), float("nan"), device=DEVICE),
    )
    norms = NgramNorms(*(norm.to(DEVICE) for norm in (W.query_norm, W.key_norm, W.conv_norm)))
    add_ngrams(
        padded, tensors, norms, W.conv.to(DEVICE), DILATION, EPS, states[:, BEFORE:], sequences, counter(n)
    )
    assert (padded[n:] == 77.0).all()
    return padded[:n].cpu()


def new_states() -> torch.Tensor:
    states = torch.full((SLOTS, BEFORE + KEPT * CHANNELS + 2), 77.0, device=DEVICE)
    states[:, BEFORE:] = 0.0
    return states


def test_sequences_of_several_lengths_over_steps() -> None:
    """Chunks shorter and longer than the window, and decode steps."""
    states = new_states()
    x = {slot: normal(20, CHANNELS, seed=slot) for slot in (0, 2, 3)}
    embedded = {slot: normal(20, WIDTH, seed=10 + slot) for slot in (0, 2, 3)}
    done = dict.fromkeys(x, 0)
    got: dict[int, list[torch.Tensor]] = {slot: [] for slot in x}
    for rows in [{2: 1, 0: 5}, {0: 1, 2: 1, 3: 1}, {3: 13, 0: 2}, {2: 1}, {0: 10, 3: 1}]:
        parts = [slice(done[slot], done[slot] + count) for slot, count in rows.items()]
        out = step(
            states,
            torch.cat([x[slot][part] for slot, part in zip(rows, parts, strict=True)]),
            torch.cat([embedded[slot][part] for slot, part in zip(rows, parts, strict=True)]),
            list(rows.values()),
            list(rows),
        )
        for (slot, count), part in zip(rows.items(), out.split(list(rows.values())), strict=True):
            got[slot].append(part)
            done[slot] += count
    for slot, outs in got.items():
        n, zeros = done[slot], torch.zeros(KEPT, CHANNELS)
        of_streams = x[slot][:n].view(n, STREAMS, HIDDEN)
        expected, state = reference.add(of_streams, embedded[slot][:n], W, EPS, DILATION, zeros)
        assert nmse(torch.cat(outs), expected.flatten(1)) < 1e-11
        kept = states[slot, BEFORE : BEFORE + KEPT * CHANNELS].cpu().view(state.shape)
        assert nmse(kept, state) < 1e-11
    assert not states[1, BEFORE:].any(), "wrote into a free slot"
    assert (states[:, :BEFORE] == 77.0).all()
    assert not states[:, BEFORE + KEPT * CHANNELS :].any()


def test_a_stream_without_agreement_lets_half_in() -> None:
    """A key of zeros: sign(0) is 0, though the root of the least agreement is not."""
    x, nothing = normal(2, CHANNELS), torch.zeros(2, WIDTH)
    found = step(new_states(), x, nothing, [2], [0])
    expected, _ = reference.add(
        x.view(2, STREAMS, HIDDEN), nothing, W, EPS, DILATION, torch.zeros(KEPT, CHANNELS)
    )
    assert nmse(found, expected.flatten(1)) < 1e-11
