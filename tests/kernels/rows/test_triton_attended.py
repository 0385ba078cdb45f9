"""Attention residuals in Triton, beside their float64 reference."""

from __future__ import annotations

import pytest
import torch

from tests.kernels.triton_device import DEVICE, counter, ints  # isort: skip  (first: it sets up the interpreter)
from moeserve.kernels.norm.reference import norm
from moeserve.kernels.streams import attended
from moeserve.kernels.streams.attended_op import PlacedBlock, StreamAttention, add_block, attend_streams
from tests.kernels.rows.triton_rows import EPS, GUARD, check_norm, guarded, normal
from tests.kernels.weights import nmse

ROWS, LIVE, STREAMS = 5, 3, 4
each_size = pytest.mark.parametrize("hidden", [96, 64, 1312])


def on_device(x: torch.Tensor) -> torch.Tensor:
    return x.to(DEVICE)


def attention(hidden: int, num: int) -> tuple[StreamAttention, torch.Tensor, torch.Tensor]:
    score, gain = 3 * normal(hidden, seed=1) / hidden**0.5, normal(hidden, seed=2).abs() + 0.5
    reading = ints(torch.tensor([num, 0, 0]))
    return StreamAttention(on_device(score), on_device(gain), reading), score, gain


@each_size
@pytest.mark.parametrize("num", [1, 3])
def test_a_block_attends_to_the_first_streams(hidden: int, num: int) -> None:
    w, score, gain = attention(hidden, num)
    x = 3 * normal(ROWS, STREAMS * hidden)
    x.view(ROWS, STREAMS, hidden)[:, num:] = torch.nan
    y, exact = guarded(ROWS, hidden), torch.full((ROWS, hidden), GUARD, device=DEVICE)
    attend_streams(on_device(x), None, None, w, counter(LIVE), EPS, y, exact)
    read = attended.read(x.view(ROWS, STREAMS, hidden)[:, :num], score, EPS)
    check_norm(y, norm(read, gain, EPS)[:LIVE], LIVE)
    assert y.x is not None
    assert torch.equal(exact, y.x)


@each_size
@pytest.mark.parametrize("begins", [True, False])
@pytest.mark.parametrize("is_routed", [True, False])
def test_the_block_before_is_added_to_its_stream(hidden: int, begins: bool, is_routed: bool) -> None:
    """Routed experts in parts with weights, of which some are elsewhere, and the pool's sum; or one part."""
    w, score, gain = attention(hidden, 3)
    parts, extra = normal(ROWS, 3 if is_routed else 1, hidden, seed=5), normal(ROWS, hidden, seed=6)
    shares = normal(ROWS, 3, seed=7)
    ids = torch.tensor([[0, -1, 2], [1, 2, 3], [-1, -1, -1], [0] * 3, [0] * 3])
    output = (parts * shares[..., None] * (ids >= 0)[..., None]).sum(1) + extra if is_routed else parts[:, 0]
    x = normal(ROWS, STREAMS * hidden)
    x.view(ROWS, STREAMS, hidden)[:, 3] = torch.nan
    if begins:  # what the stream holds is of no account
        x.view(ROWS, STREAMS, hidden)[:, 2] = torch.nan
    expected = x.clone().view(ROWS, STREAMS, hidden)
    expected[:, 2] = output if begins else expected[:, 2] + output
    block = PlacedBlock(
        on_device(parts),
        on_device(shares) if is_routed else None,
        ints(ids) if is_routed else None,
        on_device(extra) if is_routed else None,
        ints(torch.tensor([9, 2, int(begins)])),
    )
    found, y = on_device(x.clone()), guarded(ROWS, hidden)
    attend_streams(found, block, None, w, counter(LIVE), EPS, y, None)
    of_streams = found.cpu().view(ROWS, STREAMS, hidden)
    assert nmse(of_streams[:LIVE, :3], expected[:LIVE, :3]) < 1e-11
    assert torch.equal(of_streams[LIVE:].nan_to_num(), x.view(ROWS, STREAMS, hidden)[LIVE:].nan_to_num())
    check_norm(y, norm(attended.read(expected[:, :3], score, EPS), gain, EPS)[:LIVE], LIVE)
    alone = on_device(x.clone())
    add_block(alone, block, counter(LIVE))
    assert torch.equal(alone.nan_to_num(), found.nan_to_num())


@each_size
def test_a_head_reads_chosen_rows(hidden: int) -> None:
    w, score, gain = attention(hidden, STREAMS)
    x, chosen, y = normal(ROWS, STREAMS * hidden), torch.tensor([4, 0, 4]), guarded(3, hidden)
    found = on_device(x.clone())
    attend_streams(found, None, ints(chosen), w, counter(2), EPS, y, None)
    read = attended.read(x[chosen].view(3, STREAMS, hidden), score, EPS)
    check_norm(y, norm(read, gain, EPS)[:2], 2)
    assert torch.equal(found.cpu(), x)
