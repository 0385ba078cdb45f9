"""The weights of a Qwen3-MoE on the GPU, in planes (`moeserve.kernels.planes`).

A tensor at a time goes through two buffers of pinned memory: while one piece is copied to the GPU and taken apart
there, the next is read from the file. Nothing is held in RAM.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from moeserve.kernels import _C
from moeserve.kernels.planes import FORMATS, GgmlType, Planes, empty_planes, repack_into
from moeserve.models.gguf import names as n
from moeserve.models.qwen3moe.config import Qwen3MoeConfig
from moeserve.models.qwen3moe.cpu_experts import expert_map_of
from moeserve.models.source import ModelSource

PIECE_BYTES = 32 << 20

Progress = Callable[[str, int, int], None]  # stage, bytes done, bytes in all


@dataclass(frozen=True, slots=True)
class MergedLinear:
    """One launch: a matrix, or two of different types whose outputs stand side by side."""

    first: Planes
    second: Planes | None = None

    @property
    def rows(self) -> int:
        return self.first.rows + (0 if self.second is None else self.second.rows)

    @property
    def nbytes(self) -> int:
        return self.first.nbytes + (0 if self.second is None else self.second.nbytes)


@dataclass(frozen=True, slots=True)
class GpuExperts:
    """Some or all experts of a layer, in the order of `ids`."""

    gate: Planes  # [len(ids), ff, hidden]
    up: Planes
    down: Planes  # [len(ids), hidden, ff]

    @property
    def nbytes(self) -> int:
        return self.gate.nbytes + self.up.nbytes + self.down.nbytes


@dataclass(frozen=True, slots=True)
class GpuLayer:
    attn_norm: Tensor  # float32 [hidden]
    qkv: list[MergedLinear]  # the rows of q, k and v, in that order
    q_norm: Tensor  # float32 [dim]
    k_norm: Tensor
    attn_output: MergedLinear
    ffn_norm: Tensor
    router: MergedLinear
    experts: GpuExperts | None  # None: none is here
    expert_map: (
        Tensor | None
    )  # int32 [E]: an expert's place in `experts`, -1 for one that is not there; None: all, in order


@dataclass(frozen=True, slots=True)
class GpuWeights:
    embedding: Planes | None  # None: x comes from the CPU, which has it and perhaps the first layers
    layers: list[GpuLayer]  # all, or the last ones
    output_norm: Tensor
    output: MergedLinear


class GpuLoader:
    """Reads one model; used once."""

    def __init__(
        self, gguf: ModelSource, config: Qwen3MoeConfig, device: torch.device, progress: Progress
    ) -> None:
        self._gguf = gguf
        self._config = config
        self._device = device
        self._progress = progress
        self._upload = Upload(device)
        self._done = 0
        self._total = 0

    def load(
        self, gpu_experts: Sequence[Sequence[int]], first_layer: int = 0, *, with_embedding: bool = True
    ) -> GpuWeights:
        """The layers from `first_layer` on, and the head. gpu_experts: of each of these layers the ids of the experts
        to load, ascending. Raises ModelError for a tensor that is missing or has another shape,
        torch.OutOfMemoryError without room."""
        c = self._config
        c.check_tensors(self._gguf)
        self._total = self._bytes_from(first_layer, with_embedding=with_embedding or c.tied_embeddings)
        embedding = self._planes(n.TOKEN_EMBD) if with_embedding else None
        if c.tied_embeddings:
            output = embedding or self._planes(n.TOKEN_EMBD)
        else:
            output = self._planes(n.OUTPUT)
        return GpuWeights(
            embedding=embedding,
            layers=[self._layer(index, ids) for index, ids in enumerate(gpu_experts, first_layer)],
            output_norm=self._vector(n.OUTPUT_NORM),
            output=MergedLinear(output),
        )

    def _bytes_from(self, first_layer: int, *, with_embedding: bool) -> int:
        total = 0
        for name, tensor in self._gguf.tensors.items():
            layer = n.layer_of(name)
            is_mine = layer >= first_layer if layer is not None else with_embedding or name != n.TOKEN_EMBD
            total += tensor.nbytes if is_mine else 0
        return total

    def _layer(self, index: int, ids: Sequence[int]) -> GpuLayer:
        c = self._config

        def name(part: str) -> str:
            return n.of_layer(index, part)

        return GpuLayer(
            attn_norm=self._vector(name(n.ATTN_NORM)),
            qkv=self._products(name(n.ATTN_Q), name(n.ATTN_K), name(n.ATTN_V)),
            q_norm=self._vector(name(n.ATTN_Q_NORM)),
            k_norm=self._vector(name(n.ATTN_K_NORM)),
            attn_output=MergedLinear(self._planes(name(n.ATTN_OUTPUT))),
            ffn_norm=self._vector(name(n.FFN_NORM)),
            router=MergedLinear(self._planes(name(n.FFN_GATE_INP))),
            experts=self._experts(index, ids) if len(ids) else None,
            expert_map=None if len(ids) == c.num_experts else expert_map_of(ids, c.num_experts, self._device),
        )

    def _experts(self, index: int, ids: Sequence[int]) -> GpuExperts:
        gate, up, down = (
            self._expert_planes(n.of_layer(index, part), ids)
            for part in (n.FFN_GATE_EXPS, n.FFN_UP_EXPS, n.FFN_DOWN_EXPS)
        )
        return GpuExperts(gate, up, down)

    def _products(self, *names: str) -> list[MergedLinear]:
        """As few launches as the types allow: neighbours of one type in one matrix, two such matrices in one launch
        where both or neither are quantised."""
        groups: list[list[str]] = []
        for name in names:
            if groups and self._gguf.tensors[groups[-1][0]].type == self._gguf.tensors[name].type:
                groups[-1].append(name)
            else:
                groups.append([name])
        matrices = [self._planes(*group) for group in groups]
        products: list[MergedLinear] = []
        for matrix in matrices:
            last = products[-1] if products else None
            if last and last.second is None and last.first.quantised == matrix.quantised:
                products[-1] = MergedLinear(last.first, matrix)
            else:
                products.append(MergedLinear(matrix))
        return products

    def _planes(self, *names: str) -> Planes:
        """Matrices of one type, one below the other."""
        tensors = [self._gguf.tensors[name] for name in names]
        rows, cols = sum(t.shape[0] for t in tensors), tensors[0].shape[1]
        planes = empty_planes(GgmlType(int(tensors[0].type)), (rows, cols), self._device)
        row = 0
        for name, tensor in zip(names, tensors, strict=True):
            self._upload.rows(planes, self._gguf.data(name), row)
            row += tensor.shape[0]
            self._finish(name)
        return planes

    def _expert_planes(self, name: str, ids: Sequence[int]) -> Planes:
        tensor = self._gguf.tensors[name]
        experts, rows, cols = tensor.shape
        planes = empty_planes(GgmlType(int(tensor.type)), (len(ids), rows, cols), self._device)
        data = self._gguf.data(name).reshape(experts, -1)
        for place, (first, count) in _runs(ids):
            self._upload.rows(planes, data[first : first + count].reshape(-1), place * rows)
        self._finish(name)
        return planes

    def _vector(self, name: str) -> Tensor:
        tensor = self._gguf.tensors[name]
        out = torch.empty(tensor.shape)
        data = self._gguf.data(name)  # lives until the call returns
        _C.dequantize_row(int(tensor.type), data.ctypes.data, tensor.shape[0], out.data_ptr())
        self._finish(name)
        return out.to(self._device)

    def _finish(self, name: str) -> None:
        self._gguf.advise_done(name)
        self._done += self._gguf.tensors[name].nbytes
        self._progress("loading weights to the GPU", self._done, self._total)


class Upload:
    """Bytes of the file to planes, in pieces, through two buffers in turn."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._is_gpu = device.type == "cuda"
        self._staging = [torch.empty(PIECE_BYTES, dtype=torch.uint8, pin_memory=self._is_gpu) for _ in "ab"]
        self._copied = [torch.cuda.Event() for _ in "ab"] if self._is_gpu else []
        self._turn = 0

    def rows(self, planes: Planes, data: npt.NDArray[np.uint8], row: int) -> None:
        """GGUF rows to rows `row` on of the planes. A row is at most PIECE_BYTES."""
        row_bytes = bytes_of_row(planes)
        step = max(1, PIECE_BYTES // row_bytes) * row_bytes
        for start in range(0, len(data), step):
            piece = data[start : start + step]
            repack_into(planes, self._to_device(piece), row + start // row_bytes)

    def _to_device(self, piece: npt.NDArray[np.uint8]) -> Tensor:
        self._turn ^= 1
        staging = self._staging[self._turn][: len(piece)]
        if not self._is_gpu:
            staging.numpy()[:] = piece
            return staging
        self._copied[self._turn].synchronize()
        staging.numpy()[:] = piece
        there = staging.to(self._device, non_blocking=True)
        self._copied[self._turn].record()
        return there


def bytes_of_row(planes: Planes) -> int:
    """Of the GGUF's row."""
    if not planes.quantised:
        return planes.cols * planes.codes.element_size()
    form = FORMATS[planes.type]
    return planes.cols // form.block * form.block_bytes


def _runs(ids: Sequence[int]) -> list[tuple[int, tuple[int, int]]]:
    """Consecutive ids together: (place of the first, (first id, how many))."""
    runs: list[tuple[int, tuple[int, int]]] = []
    for place, expert in enumerate(ids):
        if runs and expert == runs[-1][1][0] + runs[-1][1][1]:
            at, (first, count) = runs[-1]
            runs[-1] = (at, (first, count + 1))
        else:
            runs.append((place, (expert, 1)))
    return runs
