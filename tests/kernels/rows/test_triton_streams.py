"""A residual of several streams in Triton, beside its float64 reference."""

from __future__ import annotations

import pytest
import torch

from tests.kernels.triton_device import DEVICE, counter, ints  # isort: skip  (first: it sets up the interpreter)
from moeserve.kernels.norm import reference as norm_reference
from moeserve.kernels.streams import reference
from moeserve.kernels.streams.op import (
    StreamBlock,
    StreamNorm,
    add_to_streams,
    mix_streams,
    norm_streams,
    scaled_silu,
)
from tests.kernels.rows.triton_rows import EPS, GUARD, check_norm, guarded, normal
from tests.kernels.weights import nmse

STREAMS, ROWS, LIVE = 4, 5, 3
each_width = pytest.mark.parametrize("hidden", [64, 544])  # one block of the mix, and a broken one


def on_device(x: torch.Tensor) -> torch.Tensor:
    return x.to(DEVICE)


def result(rows: int, hidden: int) -> StreamNorm:
    return StreamNorm(guarded(rows, STREAMS * hidden), torch.empty(rows, STREAMS, device=DEVICE))


@each_width
@pytest.mark.parametrize("is_routed", [True, False])
def test_a_blocks_parts_are_added_to_the_streams_before_their_norm(hidden: int, is_routed: bool) -> None:
    """Routed experts in parts with weights, of which some are elsewhere, and the pool's sum; or one part."""
    x, weight = normal(ROWS, STREAMS * hidden), normal(STREAMS, hidden, seed=1).abs() + 0.5
    parts = normal(ROWS, 3 if is_routed else 1, hidden, seed=2)
    weights, extra = normal(ROWS, 3, seed=3), normal(ROWS, hidden, seed=4)
    ids = torch.tensor([[0, -1, 2], [1, 2, 3], [-1, -1, -1], [0, 0, 0], [0, 0, 0]])
    products = normal(ROWS, 7 + STREAMS, seed=5) * 3  # the logits lie behind other products
    block = (parts * weights[..., None] * (ids >= 0)[..., None]).sum(1) + extra if is_routed else parts[:, 0]
    expected = reference.inject(x.view(ROWS, STREAMS, hidden), block, products[:, 7:])
    found = on_device(x.clone())
    pending = StreamBlock(
        on_device(parts),
        on_device(weights) if is_routed else None,
        ints(ids) if is_routed else None,
        on_device(extra) if is_routed else None,
        on_device(products)[:, 7:],
    )
    out = result(ROWS, hidden)
    norm_streams(found, pending, None, counter(LIVE), on_device(weight), EPS, out)
    assert nmse(found[:LIVE].cpu(), expected[:LIVE].flatten(1)) < 1e-12
    assert torch.equal(found[LIVE:].cpu(), x[LIVE:]), "rows beyond the count changed"
    check_norm(out.normed, norm_reference.norm(expected[:LIVE], weight, EPS).flatten(1), LIVE)
    alone = on_device(x.clone())
    add_to_streams(alone, pending, counter(LIVE))
    assert torch.equal(alone, found)


@each_width
def test_chosen_rows_are_read_and_not_changed(hidden: int) -> None:
    x, weight = normal(ROWS, STREAMS * hidden), normal(STREAMS, hidden, seed=1).abs() + 0.5
    found, out, chosen = on_device(x.clone()), result(LIVE, hidden), torch.tensor([4, 0, 4])
    norm_streams(found, None, ints(chosen), counter(2), on_device(weight), EPS, out)
    check_norm(
        out.normed, norm_reference.norm(x[chosen[:2]].view(2, STREAMS, hidden), weight, EPS).flatten(1), 2
    )
    assert torch.equal(found.cpu(), x)
    gate, y = normal(LIVE, STREAMS * hidden, seed=2), guarded(LIVE, hidden)
    mix_streams(on_device(gate), found, ints(chosen), on_device(weight), out.inverse, counter(2), y)
    normed = norm_reference.norm(x[chosen[:2]].view(2, STREAMS, hidden), weight, EPS)
    check_norm(y, reference.mix(gate[:2].view(2, STREAMS, hidden), normed), 2)


@each_width
def test_a_block_reads_the_streams_as_specified(hidden: int) -> None:
    """Norm, gate of low rank and mix together, by floats between them: `read`."""
    rank = 32
    w = reference.StreamMix(
        normal(STREAMS, hidden, seed=1).abs() + 0.5,
        normal(rank, STREAMS * hidden, seed=2) / hidden**0.5,
        normal(STREAMS * hidden, rank, seed=3),
        normal(STREAMS, STREAMS * hidden, seed=4) / hidden**0.5,
    )
    assert w.inject is not None
    x = normal(ROWS, STREAMS * hidden)
    expected, logits = reference.read(x.view(ROWS, STREAMS, hidden), w, EPS)
    assert logits is not None
    out, count = result(ROWS, hidden), counter(LIVE)
    norm_streams(on_device(x), None, None, count, on_device(w.norm), EPS, out)
    assert out.normed.x is not None
    products = out.normed.x @ on_device(torch.cat([w.down, w.inject])).T
    assert nmse(products[:LIVE, rank:].cpu(), logits[:LIVE]) < 1e-11
    low_rank = guarded(ROWS, rank)
    scaled_silu(products[:, :rank], 1 / STREAMS, count, low_rank)
    check_norm(low_rank, reference.scaled_silu(products[:LIVE, :rank].cpu(), 1 / STREAMS), LIVE)
    assert low_rank.x is not None
    gate, y = low_rank.x @ on_device(w.up).T, guarded(ROWS, hidden)
    exact = torch.full((ROWS, hidden), GUARD, device=DEVICE)
    mix_streams(gate, on_device(x), None, on_device(w.norm), out.inverse, count, y, exact)
    check_norm(y, expected[:LIVE], LIVE)
    assert y.x is not None
    assert torch.equal(exact, y.x)
