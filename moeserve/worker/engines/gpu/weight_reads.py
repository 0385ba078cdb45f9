"""Counts the bytes of weights that a GPU engine's steps read, and measures how fast they can be read."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

from moeserve.models.blocks.gpu.decoder import GpuDecoder
from moeserve.models.loading.ram_experts import RamExperts
from moeserve.worker.engines.gpu.copy_rate import read_by_copying
from moeserve.worker.engines.gpu.cpu_stage import CpuStage


class _Counters(NamedTuple):
    expert_token_counts: Tensor
    cpu_stage: int  # bytes read by the CPU stage


class GpuWeightReads:
    """Counts reads from RAM if experts or layers are in RAM, else from GPU memory. See `Engine`."""

    def __init__(self, model: GpuDecoder, ram_experts: RamExperts | None, cpu_stage: CpuStage | None) -> None:
        self._model = model
        self._ram_experts = ram_experts
        self._cpu_stage = cpu_stage

    def counters(self) -> object:
        stage = 0 if self._cpu_stage is None else self._cpu_stage.weight_bytes_read()
        return _Counters(self._model.expert_token_counts.clone(), stage)

    def bytes_since(self, counters: object) -> int:
        assert isinstance(counters, _Counters)
        used = (self._model.expert_token_counts != counters.expert_token_counts).cpu()
        if not self._reads_ram:
            return self._model.weight_bytes(used)
        of_stage = 0 if self._cpu_stage is None else self._cpu_stage.weight_bytes_read() - counters.cpu_stage
        experts = self._ram_experts
        return of_stage + (0 if experts is None else experts.bytes_of(used & ~self._model.on_gpu))

    def read(self) -> tuple[float, int]:
        """Returns seconds and bytes of reading all RAM experts once or, without any, of a copy on the GPU."""
        if not self._reads_ram:
            return read_by_copying(self._model.device)
        reads = [part.read() for part in (self._cpu_stage, self._ram_experts) if part is not None]
        return sum(seconds for seconds, _ in reads), sum(nbytes for _, nbytes in reads)

    @property
    def _reads_ram(self) -> bool:
        has_layers = self._cpu_stage is not None and self._cpu_stage.num_layers > 0
        return has_layers or self._ram_experts is not None
