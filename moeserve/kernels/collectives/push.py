"""All-reduce of small messages over peer memory: one kernel, one transfer (words.py).

Each GPU writes its numbers into an inbox in every other GPU's memory, then waits until this call's numbers have
arrived in its own. All GPUs add in the order of the ranks.
"""

# mypy: ignore-errors

from __future__ import annotations

import torch
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from moeserve.kernels.collectives.words import send_words, sum_words
from moeserve.kernels.launch import kernel, pdl

BLOCK = 512  # numbers per program
# all programs must be resident at once, because each waits for its counterparts on the other GPUs
MAX_NUMBERS = 256 * BLOCK
TRIAL_POLLS = 1 << 20  # about a second


@kernel
def push_sum_kernel(
    x, inbox, peers, calls,
    SIZE: tl.constexpr, RANK: tl.constexpr, RANKS: tl.constexpr, CAPACITY: tl.constexpr, POLLS: tl.constexpr,
    BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Sums x [SIZE] over all GPUs. inbox int64 [2, RANKS, CAPACITY], this GPU's; peers int64 [RANKS], addresses of
    all inboxes; calls int32 [programs], how often each program has run. POLLS: in a trial, the most polls; 0:
    unlimited."""
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    program = tl.program_id(0)
    i = program * BLOCK + tl.arange(0, BLOCK)
    live = i < SIZE
    call = tl.load(calls + program) + 1
    own = tl.load(x + i, live, 0.0).to(tl.float32)
    send_words(own, call, peers, i, live, RANK, RANKS, CAPACITY)
    total = sum_words(own, call, inbox, i, live, RANK, RANKS, CAPACITY, POLLS)
    tl.store(x + i, total.to(x.dtype.element_ty), live)
    tl.store(calls + program, call)


class PushSum:
    """An `AllReduce` for up to MAX_NUMBERS numbers."""

    def __init__(self, rank: int, inbox: Tensor, addresses: list[int]) -> None:
        """inbox: int64 [2, ranks, MAX_NUMBERS], zeros, writable by all ranks; addresses: of all ranks' inboxes."""
        self._rank = rank
        self._inbox = inbox
        self._peers = torch.tensor(addresses, dtype=torch.int64, device=inbox.device)
        self._calls = torch.zeros(MAX_NUMBERS // BLOCK, dtype=torch.int32, device=inbox.device)

    def takes(self, x: Tensor) -> bool:
        """Returns whether x can be summed: at most MAX_NUMBERS numbers."""
        return x.numel() <= MAX_NUMBERS

    def __call__(self, x: Tensor) -> None:
        self._launch(x, 0)

    def try_once(self, x: Tensor) -> None:
        """Sums x over the ranks once as a trial, in place. If the other ranks' data do not arrive after TRIAL_POLLS
        polls, it still returns, with a wrong sum; the caller must check the sum."""
        self._launch(x, TRIAL_POLLS)

    def _launch(self, x: Tensor, polls: int) -> None:
        push_sum_kernel(
            (-(-x.numel() // BLOCK),), x, self._inbox, self._peers, self._calls,
            x.numel(), self._rank, len(self._peers), MAX_NUMBERS, polls, BLOCK, pdl(),
            num_warps=4, launch_pdl=pdl(),
        )  # fmt: skip
