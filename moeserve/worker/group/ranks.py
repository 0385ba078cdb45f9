"""One rank's view of its group: the other processes' addresses, agreement on values, and the sum over all ranks."""

from __future__ import annotations

import logging
import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import FileStore

from moeserve.kernels.collectives.all_reduce import AllReduce, ProcessGroupSum
from moeserve.kernels.collectives.fastest import FastestSum
from moeserve.kernels.collectives.fastest_norm import choose_norms
from moeserve.kernels.collectives.peer_memory import peer_sum_norm, peer_sums
from moeserve.kernels.collectives.stage_link import PeerLink, ProcessGroupLink, StageLink
from moeserve.kernels.collectives.sum_norm_op import SumNorm

log = logging.getLogger(__name__)

# NVLink multicast stays off: a process that ends while using it can break the host's other GPUs. All ranks are on one
# host, so the loopback network suffices.
ENVIRONMENT = {
    "NCCL_NVLS_ENABLE": "0",
    "TORCH_SYMM_MEM_DISABLE_MULTICAST": "1",
    "NCCL_SOCKET_IFNAME": "lo",
    "GLOO_SOCKET_IFNAME": "lo",
}


class RankSums(NamedTuple):
    """The functions that sum a block's output over all ranks."""

    all_reduce: AllReduce
    within_norm: SumNorm | None  # fused with the norm after a block, for sizes that support it


class RankGroup(ABC):
    """One rank's view of the group. All ranks make the same calls in the same order."""

    def __init__(self, rank: int, devices: list[int], num_ranks: int, rendezvous: Path) -> None:
        """devices: GPU numbers by rank; empty: Triton's interpreter. rendezvous: a file path that all ranks share."""
        self.rank = rank
        self.num_ranks = num_ranks
        self.devices = devices
        self.device = torch.device("cuda", devices[rank]) if devices else torch.device("cpu")
        self._rendezvous = rendezvous

    def use_device(self) -> None:
        """Selects this rank's GPU. Call it before any launch."""
        if self.device.type == "cuda":
            torch.cuda.set_device(self.device)

    def connect(self, rows: Sequence[int], hidden: int, experts: int) -> RankSums:
        """Connects all ranks, and returns the sum over them, for messages of `rows` rows of `hidden` numbers
        (float32 or 16 bits), optionally followed by a router of `experts` experts. Once per process, because
        PyTorch's symmetric memory cannot rendezvous twice. On GPUs, each size is summed once before it returns, so
        that its memory is allocated before free memory is measured."""
        group = self._meet()
        safe = ProcessGroupSum(group)
        if self.device.type != "cuda":
            return RankSums(safe, None)
        sums: AllReduce = safe
        within_norm: SumNorm | None = None
        try:
            sums = FastestSum(safe, peer_sums(group, self.device, 4 * max(rows) * hidden), self.agree)
            within_norm = peer_sum_norm(group, self.device, max(rows), hidden, experts)
        except RuntimeError as error:
            log.warning("the GPUs do not reach one another's memory, sums are slower: %s", error)
        for each in rows:
            for dtype in (torch.float32, torch.bfloat16):
                sums(torch.zeros(each, hidden, dtype=dtype, device=self.device))
        if within_norm is not None:
            choose_norms(within_norm, sums, rows, hidden, experts, self.device, self.agree)
        torch.cuda.synchronize(self.device)
        torch.cuda.empty_cache()
        return RankSums(sums, within_norm)

    def connect_stages(self, rows: int, hidden: int) -> StageLink:
        """Connects ranks each of which has some of the layers: a link from the previous rank and one to the next, for
        steps of up to `rows` rows. Before it returns, one message has passed through all ranks."""
        group = self._meet()
        link = self._stage_link(group, rows, hidden)
        if self.rank:
            link.receive((0, 1))
        link.send(torch.zeros(1, hidden, device=self.device), 0)
        if not self.rank:
            link.receive((0, 1))
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        return link

    def _stage_link(self, group: dist.ProcessGroup, rows: int, hidden: int) -> StageLink:
        if self.device.type != "cuda":
            return ProcessGroupLink(group, self.device, rows, hidden)
        try:
            return PeerLink(group, self.device, rows, hidden)
        except RuntimeError as error:
            log.warning(
                "the GPUs do not reach one another's memory: rows go from one to the next through the host, and one "
                "GPU computes at a time: %s",
                error,
            )
            return ProcessGroupLink(group, self.device, rows, hidden)

    def _meet(self) -> dist.ProcessGroup:
        is_gpu = self.device.type == "cuda"
        dist.init_process_group(
            "nccl" if is_gpu else "gloo",
            store=FileStore(str(self._rendezvous), self.num_ranks),
            rank=self.rank,
            world_size=self.num_ranks,
            device_id=self.device if is_gpu else None,
        )
        group = dist.group.WORLD
        assert group is not None
        return group

    @abstractmethod
    def gather(self, value: int) -> list[int]:
        """Returns all ranks' values, by rank, after waiting for them. Raises ConfigError if a rank could not load
        its share."""
        ...

    def least(self, value: int) -> int:
        return min(self.gather(value))

    def all_say(self, condition: bool) -> bool:
        """Returns whether the condition holds on every rank."""
        return self.least(int(condition)) == 1

    def of_leader(self, value: int) -> int:
        """Returns the first rank's value on all ranks."""
        return self.gather(value)[0]

    def total(self, value: int) -> int:
        return sum(self.gather(value))

    def first_alone(self, work: Callable[[], object]) -> None:
        """Calls `work` on every rank, first on rank 0 and then on the others."""
        if self.rank:
            self.barrier()
        work()
        if not self.rank:
            self.barrier()

    def barrier(self) -> None:
        """Waits for all ranks."""
        self.gather(0)

    def agree(self, seconds: float) -> float:
        """Returns the smallest of all ranks' values."""
        return self.least(int(seconds * 1e9)) / 1e9


def set_environment() -> None:
    """Sets the variables that NCCL needs. Call it before NCCL is loaded."""
    os.environ.update(ENVIRONMENT)
