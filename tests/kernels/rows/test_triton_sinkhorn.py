"""A residual of streams that are mixed, in Triton, beside its float64 reference."""

from __future__ import annotations

from typing import NamedTuple

import pytest
import torch

from tests.kernels.triton_device import DEVICE, counter, ints  # isort: skip  (first: it sets up the interpreter)
from moeserve.kernels.norm.reference import norm
from moeserve.kernels.streams import sinkhorn
from moeserve.kernels.streams.product_sums import product_sums
from moeserve.kernels.streams.sinkhorn_op import MixedBlock, mixed_products, norm_mixed, read_mixed
from tests.kernels.rows.triton_rows import EPS, GUARD, check_norm, guarded, normal
from tests.kernels.weights import nmse

ROWS, LIVE = 5, 3
# Streams that are a power of two and not; columns of less than a program's, and of more, with a broken end.
each_size = pytest.mark.parametrize(("streams", "hidden"), [(4, 96), (3, 64), (4, 1312)])


def on_device(x: torch.Tensor) -> torch.Tensor:
    return x.to(DEVICE)


def new_mix(streams: int, iterations: int, values: int) -> sinkhorn.SinkhornMix:
    scales = 3 if values > streams else 1
    return sinkhorn.SinkhornMix(normal(values, seed=1), normal(scales, seed=2).abs() + 0.5, EPS, iterations)


def moved(mix: sinkhorn.SinkhornMix) -> sinkhorn.SinkhornMix:
    return mix._replace(base=on_device(mix.base), scale=on_device(mix.scale))


@each_size
@pytest.mark.parametrize("iterations", [1, 20])
def test_a_block_reads_the_streams_as_specified(streams: int, hidden: int, iterations: int) -> None:
    values = streams * (2 + streams)
    mix, gain = new_mix(streams, iterations, values), normal(hidden, seed=3).abs() + 0.5
    products, x = 2 * normal(ROWS, values, seed=4), normal(ROWS, streams * hidden)
    y, weights = guarded(ROWS, hidden), torch.full((ROWS, streams * (1 + streams)), GUARD, device=DEVICE)
    exact = torch.full((ROWS, hidden), GUARD, device=DEVICE)
    read_mixed(
        on_device(products), on_device(x), None, moved(mix), on_device(gain), EPS, counter(LIVE), y, exact, weights
    )  # fmt: skip
    of_streams = x.view(ROWS, streams, hidden)
    check_norm(y, norm(sinkhorn.read(products, of_streams, mix), gain, EPS)[:LIVE], LIVE)
    assert y.x is not None
    assert torch.equal(exact, y.x)
    added, mixed = sinkhorn.weights(products, streams, mix)
    assert nmse(weights[:LIVE].cpu(), torch.cat([added, mixed.flatten(1)], dim=1)[:LIVE]) < 1e-11
    assert (weights[LIVE:] == GUARD).all()


class Sums(NamedTuple):
    """A matrix, its products with x over the root mean square (float64), and room for their sums."""

    matrix: torch.Tensor
    products: torch.Tensor
    room: torch.Tensor

    @classmethod
    def of(cls, x: torch.Tensor, hidden: int, values: int, dtype: torch.dtype = torch.float32) -> Sums:
        matrix = normal(values, x.shape[1], seed=8).to(dtype) / x.shape[1] ** 0.5
        products = norm(x, torch.ones(x.shape[1]), EPS) @ matrix.double().T
        room = torch.full(product_sums(len(x), hidden, values), GUARD, device=DEVICE)
        return cls(on_device(matrix), products, room)


@each_size
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_products_are_summed_over_columns(streams: int, hidden: int, dtype: torch.dtype) -> None:
    """As by the norm, the product and the block's reading; with a block before it and without."""
    values = streams * (2 + streams)
    mix, gain = new_mix(streams, 20, values), normal(hidden, seed=3).abs() + 0.5
    block = MixedBlock(
        on_device(normal(ROWS, 1, hidden, seed=5)), None, None, None,
        on_device(normal(ROWS, streams * (1 + streams), seed=6)),
    )  # fmt: skip
    for before in (block, None):
        x, mixed = on_device(normal(ROWS, streams * hidden)), on_device(normal(ROWS, streams * hidden))
        if before is not None:
            norm_mixed(mixed, before, None, streams, counter(LIVE), EPS, None)
        sums = Sums.of(mixed.cpu(), hidden, values, dtype)
        mixed_products(x, before, None, streams, counter(LIVE), sums.matrix, sums.room)
        assert nmse(x.cpu(), mixed.cpu().double()) < 1e-13  # compiled, the two kernels round differently
        assert torch.equal(x[LIVE:], mixed[LIVE:]), "rows beyond the count changed"
        assert (sums.room[LIVE:] == GUARD).all()
        y, weights = guarded(ROWS, hidden), torch.full((ROWS, streams * (1 + streams)), GUARD, device=DEVICE)
        read_mixed(sums.room, x, None, moved(mix), on_device(gain), EPS, counter(LIVE), y, None, weights)
        read = sinkhorn.read(sums.products, mixed.cpu().view(ROWS, streams, hidden), mix)
        check_norm(y, norm(read, gain, EPS)[:LIVE], LIVE)
        added, mixing = sinkhorn.weights(sums.products, streams, mix)
        assert nmse(weights[:LIVE].cpu(), torch.cat([added, mixing.flatten(1)], dim=1)[:LIVE]) < 1e-11
        assert (weights[LIVE:] == GUARD).all()


@each_size
def test_a_head_reads_chosen_rows_by_summed_products(streams: int, hidden: int) -> None:
    mix, gain, chosen = new_mix(streams, 20, streams), normal(hidden, seed=3).abs() + 0.5, [4, 0, 4]
    x, y = normal(ROWS, streams * hidden), guarded(3, hidden)
    sums, found, rows = Sums.of(x[chosen], hidden, streams), on_device(x.clone()), ints(torch.tensor(chosen))
    mixed_products(found, None, rows, streams, counter(2), sums.matrix, sums.room)
    read_mixed(sums.room, found, rows, moved(mix), on_device(gain), EPS, counter(2), y, None, None)
    check_norm(
        y, norm(sinkhorn.read(sums.products, x[chosen].view(3, streams, hidden), mix), gain, EPS)[:2], 2
    )
    assert torch.equal(found.cpu(), x)


@each_size
@pytest.mark.parametrize("is_routed", [True, False])
def test_streams_are_mixed_and_a_blocks_parts_added_before_the_norm(
    streams: int, hidden: int, is_routed: bool
) -> None:
    """Routed experts in parts with weights, of which some are elsewhere, and the pool's sum; or one part."""
    mix, products = (
        new_mix(streams, 20, streams * (2 + streams)),
        normal(ROWS, streams * (2 + streams), seed=4),
    )
    added, mixed = sinkhorn.weights(products, streams, mix)
    parts, extra = normal(ROWS, 3 if is_routed else 1, hidden, seed=5), normal(ROWS, hidden, seed=6)
    shares, ids = (
        normal(ROWS, 3, seed=7),
        torch.tensor([[0, -1, 2], [1, 2, 3], [-1, -1, -1], [0] * 3, [0] * 3]),
    )
    output = (parts * shares[..., None] * (ids >= 0)[..., None]).sum(1) + extra if is_routed else parts[:, 0]
    x = normal(ROWS, streams * hidden)
    expected = sinkhorn.add(x.view(ROWS, streams, hidden), output, added, mixed).flatten(1)
    block = MixedBlock(
        on_device(parts),
        on_device(shares) if is_routed else None,
        ints(ids) if is_routed else None,
        on_device(extra) if is_routed else None,
        on_device(torch.cat([added, mixed.flatten(1)], dim=1).float()),
    )
    found, y = on_device(x.clone()), guarded(ROWS, streams * hidden)
    norm_mixed(found, block, None, streams, counter(LIVE), EPS, y)
    assert nmse(found[:LIVE].cpu(), expected[:LIVE]) < 1e-11
    assert torch.equal(found[LIVE:].cpu(), x[LIVE:]), "rows beyond the count changed"
    check_norm(y, norm(expected[:LIVE], torch.ones(streams * hidden), EPS), LIVE)
    alone = on_device(x.clone())
    norm_mixed(alone, block, None, streams, counter(LIVE), EPS, None)
    assert torch.equal(alone, found)


@each_size
def test_a_head_reads_chosen_rows(streams: int, hidden: int) -> None:
    mix, gain = new_mix(streams, 20, streams), normal(hidden, seed=3).abs() + 0.5
    x, chosen, products = normal(ROWS, streams * hidden), torch.tensor([4, 0, 4]), normal(3, streams, seed=4)
    found, normed, y = on_device(x.clone()), guarded(3, streams * hidden), guarded(3, hidden)
    norm_mixed(found, None, ints(chosen), streams, counter(2), EPS, normed)
    check_norm(normed, norm(x[chosen[:2]], torch.ones(streams * hidden), EPS), 2)
    read_mixed(
        on_device(products), found, ints(chosen), moved(mix), on_device(gain), EPS, counter(2), y, None, None
    )  # fmt: skip
    read = sinkhorn.read(products, x[chosen].view(3, streams, hidden), mix)
    check_norm(y, norm(read, gain, EPS)[:2], 2)
    assert torch.equal(found.cpu(), x)


@each_size
def test_a_head_reads_the_streams_mean(streams: int, hidden: int) -> None:
    gain, x, chosen = (
        normal(hidden, seed=3).abs() + 0.5,
        normal(ROWS, streams * hidden),
        torch.tensor([4, 0, 4]),
    )
    y = guarded(3, hidden)
    read_mixed(None, on_device(x), ints(chosen), None, on_device(gain), EPS, counter(2), y, None, None)
    check_norm(y, norm(x[chosen].view(3, streams, hidden).double().mean(dim=1), gain, EPS)[:2], 2)
