"""Decode attention in equal shares by Hopper's warpgroups gives what the portable kernel gives, but for the order of
sums: that one is held to the reference by tests/kernels/attention/test_triton_attention.py."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest
import torch

from moeserve.kernels import launch
from moeserve.kernels.attention.new_tokens import NewTokens
from moeserve.kernels.attention.op import decode_attention
from moeserve.kernels.attention.shares import takes_shares
from moeserve.kernels.attention.workspace import DecodeWorkspace
from moeserve.kernels.rope.op import SectionPositions

pytestmark = pytest.mark.skipif(
    not torch.cuda.is_available() or torch.cuda.get_device_capability()[0] != 9, reason="no Hopper GPU"
)


@dataclass
class Step:
    """Rows of requests with these lengths, whose slots are in random order."""

    lengths: list[int]
    heads: int = 32
    kv_heads: int = 4
    dim: int = 128
    rotary: int = 0
    window: int = 0
    dtype: torch.dtype = torch.float16
    has_sinks: bool = False
    has_norm: bool = True
    has_sections: bool = False
    is_new: bool = True
    absent: int = 0  # rows at the end that do not exist
    name: str = field(default="", repr=False)


def ints(values: torch.Tensor) -> torch.Tensor:
    return values.to(torch.int32).cuda()


class Inputs:
    def __init__(self, step: Step) -> None:
        g = torch.Generator().manual_seed(3)
        s, n, lengths = step, len(step.lengths), torch.tensor(step.lengths)
        self.step, total = step, int(lengths.sum())
        slots = torch.randperm(total, generator=g)
        table, taken = torch.zeros(n + 2, int(lengths.max()) + 1, dtype=torch.int64), 0
        self.requests = torch.randperm(n + 2, generator=g)[:n]
        for request, length in zip(self.requests.tolist(), step.lengths, strict=True):
            table[request, :length] = slots[taken : taken + length]
            taken += length
        self.table, self.positions = ints(table), ints(lengths - 1)
        pools = torch.randn(2, total, s.kv_heads, s.dim, generator=g)
        self.pools = pools.to(s.dtype).cuda()
        q = torch.randn(n, s.heads * s.dim, generator=g)
        self.q = q.cuda() if s.is_new else (q * s.dim**-0.5).to(s.dtype).cuda()
        self.sinks = torch.randn(s.heads, generator=g).cuda() * 3 if s.has_sinks else None
        self.new = None
        if s.is_new:
            k, v = torch.randn(2, n, s.kv_heads * s.dim, generator=g).cuda()
            norms = (torch.rand(2, s.dim, generator=g) + 0.5).cuda()
            angles = torch.rand(int(lengths.max()) + 1, (s.rotary or s.dim) // 2, generator=g).cuda() * 6
            sections = None
            if s.has_sections:
                places = torch.randint(0, int(lengths.min()), (n, 3), generator=g)
                sections = SectionPositions(ints(places), s.dim // 6, s.dim // 6)
            self.new = NewTokens(
                k, v, norms[0] if s.has_norm else None, norms[1] if s.has_norm else None, 1e-6, angles.cos(),
                angles.sin(), ints(table[self.requests, lengths - 1]), sections=sections,
            )  # fmt: skip

    def attend(self, by_shares: bool) -> tuple[torch.Tensor, ...]:
        """Returns the results as floats and as int8, the pools, and the counters."""
        launch.WARPGROUPS = by_shares
        s, n = self.step, len(self.step.lengths)
        keys, values = self.pools.clone()
        group = s.heads // s.kv_heads
        assert takes_shares(group, keys, values, self.new, n, sees_ahead=False) == by_shares
        room = DecodeWorkspace(n, s.heads, s.kv_heads, s.dim, "cuda")
        out = torch.zeros(n, s.heads * s.dim, device="cuda")
        codes, scales = torch.zeros_like(out, dtype=torch.int8), torch.zeros(n, s.heads * s.dim // 32).cuda()
        decode_attention(
            self.q, self.new, keys, values, self.table, ints(self.requests), self.positions,
            ints(torch.tensor([n - s.absent])), room, out, codes, scales, window=s.window, sinks=self.sinks,
        )  # fmt: skip
        of_codes = (codes.view(n, -1, 32) * scales[:, :, None]).view(n, -1)
        return out, of_codes, keys.float(), values.float(), room.counters


SOME = [1, 64, 65, 128, 700, 3, 299, 511, 20, 129]
STEPS = [
    Step([1]),
    Step([66]),
    Step([200]),  # two blocks, which are not divided
    Step([300, 5, 70]),
    Step([9000, *SOME[:7]]),
    Step([20_000]),
    Step([9000, *SOME * 4]),
    Step(SOME * 26, dtype=torch.bfloat16),
    Step(SOME, absent=3),
    Step(SOME, is_new=False, has_sinks=True),
    Step(SOME, heads=32, kv_heads=2, window=100, has_sinks=True),
    Step(SOME, heads=40, kv_heads=8, has_norm=False, rotary=64),
    Step(SOME, heads=64, kv_heads=8, dim=64, window=128, has_sinks=True, has_norm=False),
    Step(SOME * 3, heads=64, kv_heads=8, dim=64, has_norm=False),
    Step(SOME, heads=16, kv_heads=2, dim=256, rotary=64),
    Step(SOME, heads=16, kv_heads=4, has_sections=True),
]


@pytest.mark.parametrize("step", STEPS, ids=str)
def test_like_the_portable_kernel(monkeypatch: pytest.MonkeyPatch, step: Step) -> None:
    monkeypatch.setattr(launch, "WARPGROUPS", None)  # restored after the test
    inputs = Inputs(step)
    expected, first = inputs.attend(False), inputs.attend(True)
    for name, mine, other in zip(("floats", "codes", "keys", "values"), first, expected, strict=False):
        distance = (mine - other).square().sum() / other.square().sum()
        assert distance < (1e-4 if name == "codes" else 1e-5 if step.dtype == torch.bfloat16 else 1e-6), name
    assert not first[-1].any()
    assert not first[0][len(step.lengths) - step.absent :].any()
    for _ in range(5):  # a race would show now and then
        assert all(map(torch.equal, inputs.attend(True), first))


def test_steps_of_any_rows_have_shares() -> None:
    pool = torch.empty(4, 4, 128, dtype=torch.float16, device="cuda")
    rows = (1, 2, 8, 9, 1024, 1025)
    taken = [n for n in rows if takes_shares(8, pool, pool, None, n, sees_ahead=False)]
    assert taken == [1, 2, 8, 9, 1024]


def test_keys_behind_a_row_are_not_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """NaN there, which would pass a weight of zero, stays another request's."""
    monkeypatch.setattr(launch, "WARPGROUPS", None)
    inputs = Inputs(Step([70, 1000, *[5] * 8]))
    inputs.table[inputs.requests[0], 70:] = inputs.table[inputs.requests[1], 0]
    inputs.pools[:, inputs.table[inputs.requests[1], 0].long()] = torch.nan
    out = inputs.attend(True)[0]
    assert not out[0].isnan().any()
    assert out[1].isnan().any()
    assert not out[2:].isnan().any()
