"""One of some ranks that sum within norms: `python -m tests.gpu.sum_norm_rank RANK RANKS RENDEZVOUS`. Ends with an
error where a sum is wrong, or not the same on all."""

from __future__ import annotations

import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import FileStore

from moeserve.kernels.activations import GpuActivations
from moeserve.kernels.collectives.peer_memory import peer_sum_norm
from moeserve.kernels.collectives.sum_norm_op import SumNorm
from moeserve.kernels.norm.reference import norm
from moeserve.worker.group.ranks import set_environment

HIDDEN, EXPERTS, EPS = 2048, 128, 1e-6
ROWS = [1, 2, 4, 16, 64, 128, 256, 4096]
ROUTED = [1, 2, 8, 16]
ROUNDS, REPLAYS = 4, 24  # bfloat16 has all integers up to 256
DELAY = 100_000  # clock cycles by which one rank or another comes late


class Message:
    """Its numbers rise by one at each call, so that one of an earlier call is seen in the sum. All are integers, whose
    sums are exact."""

    def __init__(self, rows: int, rank: int, ranks: int, sums: SumNorm, *, is_routed: bool) -> None:
        dtype = torch.float32 if rows <= 64 else torch.bfloat16
        bases = [
            torch.randint(0, 30, (rows, 1, HIDDEN), generator=torch.Generator().manual_seed(r))
            for r in range(ranks)
        ]
        self.own = bases[rank].to("cuda", dtype)
        self.base = sum(bases, torch.zeros_like(bases[0]))[:, 0].cuda().float()
        self.x = torch.zeros(rows, HIDDEN, device="cuda")
        self.y = GpuActivations.empty(rows, HIDDEN, "cuda", dtype=dtype, quantised=rows <= 16)
        self.count = torch.tensor([rows], dtype=torch.int32, device="cuda")
        self.weight = torch.randn(HIDDEN, generator=torch.Generator().manual_seed(2)).cuda()
        self.router = torch.randn(EXPERTS, HIDDEN, generator=torch.Generator().manual_seed(3)).cuda() / 50
        self.logits = torch.zeros(rows, EXPERTS, device="cuda")
        self._ranks = ranks
        self._sums = sums
        self._is_routed = is_routed

    def launch(self) -> None:
        self.own.add_(1)
        if self._is_routed:
            self._sums.norm_router(
                self.own, self.x, self.count, self.weight, EPS, self.router, self.y, self.logits
            )
            self.x.add_(self._sums.total(len(self.x)))
        else:
            self._sums.add_norm(self.own, self.x, self.count, self.weight, EPS, self.y)

    def check(self, calls: int) -> None:
        expected = self.base * calls + self._ranks * calls * (calls + 1) // 2
        assert torch.equal(self.x, expected), f"{len(self.x)} rows, routed {self._is_routed}: wrong sums"
        normed = self.logits if self._is_routed else self.y.x
        assert normed is not None
        # Behind a router's product the last sum is in the norm, but not yet in x.
        truth = norm(self.x, self.weight, EPS)
        if self._is_routed:
            truth = truth @ self.router.double().T
        error = float((normed.double() - truth).abs().max() / truth.abs().max())
        assert error < 1e-2, f"{len(self.x)} rows, routed {self._is_routed}: {error}"
        for found in (self.x, normed):
            same = found.clone()
            dist.broadcast(same, 0)
            assert torch.equal(found, same), f"{len(self.x)} rows: not the same on all"


def main() -> None:
    rank, ranks, rendezvous = int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3])
    set_environment()
    device = torch.device("cuda", rank)
    torch.cuda.set_device(device)
    dist.init_process_group(
        "nccl", store=FileStore(str(rendezvous), ranks), rank=rank, world_size=ranks, device_id=device
    )
    group = dist.group.WORLD
    assert group is not None
    sums = peer_sum_norm(group, device, max(ROWS), HIDDEN, EXPERTS)
    messages = [Message(rows, rank, ranks, sums, is_routed=False) for rows in ROWS]
    messages += [Message(rows, rank, ranks, sums, is_routed=True) for rows in ROUTED]
    run(messages, rank)
    torch.cuda.synchronize()
    calls = 1
    for message in messages:
        message.check(calls)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        for round in range(ROUNDS):
            run(messages, (rank + round) % ranks)
    for _ in range(REPLAYS):
        graph.replay()
        torch.cuda.synchronize()
        calls += ROUNDS
        for message in messages:
            message.check(calls)
    print(f"rank {rank}: {len(messages)} messages, {calls} calls each", flush=True)


def run(messages: list[Message], late: int) -> None:
    for at, message in enumerate(messages):
        if (at + late) % 2:
            torch.cuda._sleep(DELAY)
        message.launch()


if __name__ == "__main__":
    main()
