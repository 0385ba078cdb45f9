"""Prefill attention by Hopper's warpgroups gives what the portable kernel gives, bit for bit: that one is held to the
reference by tests/kernels/attention/test_triton_attention.py."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from moeserve.kernels import launch
from moeserve.kernels.attention.op import prefill_attention, prefill_tiles

pytestmark = pytest.mark.skipif(
    not torch.cuda.is_available() or torch.cuda.get_device_capability()[0] != 9, reason="no Hopper GPU"
)
CHUNKS = [(1000, 0), (37, 500), (129, 4000), (1, 77), (128, 128), (640, 3)]  # tokens, tokens before them
SLOTS = 8192


def slot_table(order: str) -> torch.Tensor:
    """Slots in order, in runs of 50, or none beside its neighbour's."""
    table, taken = torch.zeros(len(CHUNKS), 4608, dtype=torch.int32), 0
    slots = torch.arange(SLOTS, dtype=torch.int32)
    if order == "runs":
        slots = torch.cat([run.flip(0) if i % 3 else run for i, run in enumerate(slots.split(50))])
    if order == "scattered":
        slots = slots[torch.randperm(SLOTS, generator=torch.Generator().manual_seed(1))]
    for row, (count, start) in zip(table, CHUNKS, strict=True):
        row[: count + start] = slots[taken : taken + count + start]
        taken += count + start
    return table.cuda()


@pytest.mark.parametrize("order", ["in order", "runs", "scattered"])
@pytest.mark.parametrize(
    ("heads", "kv_heads", "dim", "window", "has_sinks", "dtype"),
    [
        (32, 4, 128, 0, False, torch.bfloat16),
        (32, 4, 128, 0, True, torch.float16),
        (48, 4, 128, 0, False, torch.float16),  # twelve heads a group
        (24, 4, 128, 0, False, torch.float16),
        (64, 8, 64, 128, True, torch.float16),  # gpt-oss
        (8, 8, 128, 200, False, torch.bfloat16),
        (16, 2, 256, 0, False, torch.float16),  # Qwen3.6
        (8, 4, 256, 100, False, torch.float16),  # Gemma
    ],
)
def test_the_same_bits(
    monkeypatch: pytest.MonkeyPatch,
    order: str,
    heads: int,
    kv_heads: int,
    dim: int,
    window: int,
    has_sinks: bool,
    dtype: torch.dtype,
) -> None:
    torch.manual_seed(7)
    counts, starts = np.array(CHUNKS, np.int32).T
    rows, n = np.cumsum(counts) - counts, int(counts.sum())
    keys, values = torch.randn(2, SLOTS, kv_heads, dim, dtype=dtype, device="cuda")
    q = (torch.randn(n, heads, dim, device="cuda") * 2 * dim**-0.5).to(dtype)
    sinks = torch.randn(heads, device="cuda") if has_sinks else None
    tiles = prefill_tiles(
        rows.astype(np.int32), counts, starts, np.arange(len(CHUNKS), dtype=np.int32), heads, kv_heads, dim
    )
    unused = np.zeros((3, 4), np.int32)  # as in a CUDA graph with room for more tiles
    on_device = torch.from_numpy(np.concatenate([tiles, unused])).cuda()
    table = slot_table(order)

    def attend(by_warpgroups: bool) -> torch.Tensor:
        monkeypatch.setattr(launch, "WARPGROUPS", by_warpgroups)
        out = torch.full((n, heads * dim), torch.nan, dtype=dtype, device="cuda")
        prefill_attention(q, keys, values, table, on_device, out, window=window, sinks=sinks)
        return out

    expected = attend(False)
    assert not expected.isnan().any()
    for _ in range(5):  # a race would show now and then
        assert torch.equal(attend(True), expected)


def test_rows_behind_a_request_are_not_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """NaN there, which would pass a weight of zero, stays another request's."""
    monkeypatch.setattr(launch, "WARPGROUPS", True)
    keys, values = torch.randn(2, 256, 1, 128, dtype=torch.float16, device="cuda")
    keys[200:], values[200:] = torch.nan, torch.nan
    q = torch.randn(200, 4, 128, dtype=torch.float16, device="cuda") * 0.1
    zero = np.zeros(1, np.int32)
    tiles = torch.from_numpy(prefill_tiles(zero, zero + 200, zero, zero, 4, 1, 128)).cuda()
    table, out = torch.arange(256, dtype=torch.int32, device="cuda")[None], torch.empty_like(q).flatten(1)
    prefill_attention(q, keys, values, table, tiles, out)
    assert not out.isnan().any()
