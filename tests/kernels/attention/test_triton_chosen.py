"""Attention to chosen blocks of keys, as Triton kernels, against attention to these keys alone."""

from __future__ import annotations

import pytest
import torch

from tests.kernels.triton_device import DEVICE, counter, ints  # isort: skip  (first: it sets up the interpreter)
from moeserve.kernels.activations import GpuActivations
from moeserve.kernels.attention.chosen_op import attend_blocks
from moeserve.kernels.attention.reference import Sequence, attention
from moeserve.kernels.attention.workspace import DecodeWorkspace
from moeserve.kernels.quantize.reference import quantize
from moeserve.kernels.stream_operands import KvLayer
from tests.kernels.weights import nmse

GUARD, HEADS, KV_HEADS, DIM, LENGTH = 777.0, 6, 2, 64, 400


@pytest.mark.parametrize("splits", [None, 1, 4])
@pytest.mark.parametrize(("block", "choices"), [(40, KV_HEADS), (4, 1)])
def test_against_attention_to_these_keys(block: int, choices: int, splits: int | None) -> None:
    """splits None: as for rows of prompts."""
    g = torch.Generator().manual_seed(block)
    n, positions = 3, [LENGTH - 1, 55, 210]
    table = torch.randperm(3 * LENGTH, generator=g).view(3, LENGTH).int()
    keys, values = (torch.randn(3 * LENGTH, KV_HEADS, DIM, generator=g).half() for _ in range(2))
    q = (torch.randn(n + 1, HEADS, DIM, generator=g) / 4).half()
    width = 320 // block + 1
    chosen, lasts, expected = torch.zeros(n + 1, choices, width, dtype=torch.int32), [], []
    for row, position in enumerate(positions):
        own, most = position // block, min(width, position // block + 1)
        for choice in range(choices):
            others = torch.randperm(own, generator=g)[: most - 1].sort().values.int()
            chosen[row, choice, :most] = torch.cat([others, torch.tensor([own], dtype=torch.int32)])
        lasts.append((most - 1) * block + position % block)
        heads = []
        for h in range(KV_HEADS):
            blocks = chosen[row, h if choices > 1 else 0, :most]
            at = (blocks[:, None] * block + torch.arange(block)).flatten()[: lasts[-1] + 1]
            alone = Sequence(0, 1, lasts[-1], table[row][at.long()])
            part = slice(h * HEADS // KV_HEADS, (h + 1) * HEADS // KV_HEADS)
            heads.append(
                attention(q[row : row + 1, part], keys[:, h : h + 1], values[:, h : h + 1], [alone]).view(
                    1, -1
                )
            )
        expected.append(torch.cat(heads, 1))
    wide, room = (
        HEADS * DIM,
        None if splits is None else DecodeWorkspace(n + 1, HEADS, KV_HEADS, DIM, DEVICE, splits),
    )
    out = GpuActivations.empty(n + 1, wide, DEVICE, dtype=torch.float32, quantised=True)
    assert out.x is not None
    out.x.fill_(GUARD)
    for _ in range(2):  # the counters are as they were
        attend_blocks(
            q.to(DEVICE), KvLayer(keys.to(DEVICE), values.to(DEVICE)), table.to(DEVICE), ints([0, 1, 2, 0]),
            chosen.to(DEVICE), ints([*lasts, 0]), counter(n), block, room, out,
        )  # fmt: skip
    assert nmse(out.x[:n].cpu(), torch.cat(expected)) < 1e-6  # weights of float16
    assert (out.x[n] == GUARD).all()
    assert out.codes is not None
    assert (out.codes[:n].cpu().int() - quantize(out.x[:n].cpu()).codes).abs().max() <= 1
    assert room is None or not room.counters.any()
