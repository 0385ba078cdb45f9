"""The weights of a Qwen3-MoE in the file's own types: packed into the CPU pool's panels, or in place.

Packing goes tensor by tensor: a tensor's pages of the file are dropped as soon as it is packed, so that no more than
one tensor is in memory twice. In place nothing is read: pages come with their first use.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from moeserve.kernels import _C
from moeserve.kernels.cpu_stream import CpuStream, LinearGroup, Matrix
from moeserve.models.cpu_types import check_cpu_types
from moeserve.models.errors import ModelError
from moeserve.models.gguf import names as n
from moeserve.models.qwen3moe.config import Qwen3MoeConfig
from moeserve.models.source import ModelSource

LANES = 32

Progress = Callable[[str, int, int], None]  # stage, bytes done, bytes in all


@dataclass(frozen=True, slots=True)
class Embedding:
    """The token embedding in the file's own rows: looked up, never multiplied."""

    table: npt.NDArray[np.uint8]  # [vocab, row_bytes]
    ggml_type: int


@dataclass(frozen=True, slots=True)
class Experts:
    gate: Matrix  # [E, ff, hidden]
    up: Matrix  # [E, ff, hidden]
    down: Matrix  # [E, hidden, ff]

    @property
    def matrices(self) -> tuple[Matrix, Matrix, Matrix]:
        return self.gate, self.up, self.down

    @property
    def bytes_each(self) -> int:
        """Bytes of one expert."""
        return sum(m.bytes // m.experts for m in self.matrices)


@dataclass(frozen=True, slots=True)
class LayerWeights:
    attn_norm: torch.Tensor  # float32 [hidden]
    qkv: LinearGroup  # [heads * dim, hidden], twice [kv_heads * dim, hidden]
    q_norm: torch.Tensor  # float32 [dim]
    k_norm: torch.Tensor
    attn_output: LinearGroup  # [hidden, heads * dim]
    ffn_norm: torch.Tensor  # float32 [hidden]
    router: LinearGroup  # [E, hidden]
    experts: Experts


@dataclass(frozen=True, slots=True)
class Head:
    norm: torch.Tensor  # float32 [hidden]
    output: LinearGroup  # [vocab, hidden]
    bytes: int


@dataclass(frozen=True, slots=True)
class Weights:
    embedding: Embedding
    layers: list[LayerWeights]  # all, or the first ones: then the others and the head are a GPU's
    head: Head | None
    bytes: int  # of these tensors in the file
    dense_bytes: int  # of the layers' matrices outside the experts: read once a step
    matrices: list[Matrix]  # all of them: the operations hold addresses only
    source: ModelSource | None  # in place: what the matrices point into


class WeightLoader:
    """Reads one model; used once."""

    def __init__(
        self,
        stream: CpuStream,
        gguf: ModelSource,
        config: Qwen3MoeConfig,
        progress: Progress,
        in_place: bool = False,
    ) -> None:
        self._in_place = in_place
        self._stream = stream
        self._gguf = gguf
        self._config = config
        self._progress = progress
        self._done = 0
        self._total = 0
        self._matrices: list[Matrix] = []

    def load(self) -> Weights:
        """Raises ModelError for a tensor that is missing, has another shape or a type without CPU kernels, MemoryError
        without room."""
        names = list(self._gguf.tensors)
        return self._load(names, self._config.num_layers, with_head=True)

    def load_first(self, num_layers: int) -> Weights:
        """The embedding and the first layers, without the head. Raises like `load`."""
        layers = {name: n.layer_of(name) for name in self._gguf.tensors}
        mine = [name for name, layer in layers.items() if layer is not None and layer < num_layers]
        return self._load([n.TOKEN_EMBD, *mine], num_layers, with_head=False)

    def _load(self, names: list[str], num_layers: int, *, with_head: bool) -> Weights:
        self._config.check_tensors(self._gguf)
        check_cpu_types(self._gguf, names)
        self._check_lanes()
        self._total = sum(self._gguf.tensors[name].nbytes for name in names)
        embedding = self._embedding(is_read_again=with_head and self._config.tied_embeddings)
        head = self._head() if with_head else None
        layers = [self._layer(index) for index in range(num_layers)]
        first = 0 if head is None else 1
        return Weights(
            embedding=embedding,
            layers=layers,
            head=head,
            bytes=self._total,
            dense_bytes=sum(m.bytes for m in self._matrices[first:] if m.experts == 1),
            matrices=self._matrices,
            source=self._gguf if self._in_place else None,
        )

    def _head(self) -> Head:
        norm = self._vector(n.OUTPUT_NORM)
        output = self._group(n.TOKEN_EMBD if self._config.tied_embeddings else n.OUTPUT)
        return Head(norm, output, self._matrices[-1].bytes)

    def _check_lanes(self) -> None:
        """The kernels take rows 32 columns at a time and check nothing themselves."""
        c = self._config
        for name, size in (
            ("attention.key_length", c.head_dim),
            ("embedding_length", c.hidden_size),
            ("expert_feed_forward_length", c.expert_ff),
        ):
            if size % LANES:
                raise ModelError(
                    self._gguf.path, f"{name} is {size}; the CPU engine needs a multiple of {LANES}"
                )

    def _layer(self, index: int) -> LayerWeights:
        def name(part: str) -> str:
            return n.of_layer(index, part)

        return LayerWeights(
            attn_norm=self._vector(name(n.ATTN_NORM)),
            qkv=self._group(name(n.ATTN_Q), name(n.ATTN_K), name(n.ATTN_V)),
            q_norm=self._vector(name(n.ATTN_Q_NORM)),
            k_norm=self._vector(name(n.ATTN_K_NORM)),
            attn_output=self._group(name(n.ATTN_OUTPUT)),
            ffn_norm=self._vector(name(n.FFN_NORM)),
            router=self._group(name(n.FFN_GATE_INP)),
            experts=Experts(
                gate=self._matrix(name(n.FFN_GATE_EXPS)),
                up=self._matrix(name(n.FFN_UP_EXPS)),
                down=self._matrix(name(n.FFN_DOWN_EXPS)),
            ),
        )

    def _embedding(self, *, is_read_again: bool) -> Embedding:
        tensor = self._gguf.tensors[n.TOKEN_EMBD]
        table = self._gguf.data(n.TOKEN_EMBD).reshape(tensor.shape[0], -1)
        if not self._in_place:
            # A copy: served from the mapped file, a file that is replaced or truncated would kill the worker.
            table = table.copy()
        if not is_read_again:
            self._finish(n.TOKEN_EMBD)
        return Embedding(table, int(tensor.type))

    def _vector(self, name: str) -> torch.Tensor:
        tensor = self._gguf.tensors[name]
        out = torch.empty(tensor.shape)
        data = self._gguf.data(name)  # lives until the call returns
        _C.dequantize_row(int(tensor.type), data.ctypes.data, tensor.shape[0], out.data_ptr())
        self._finish(name)
        return out

    def _matrix(self, name: str) -> Matrix:
        tensor = self._gguf.tensors[name]
        prepare = self._stream.view if self._in_place else self._stream.pack
        matrix = prepare(self._gguf.data(name), int(tensor.type), tensor.shape)
        self._matrices.append(matrix)
        self._finish(name)
        return matrix

    def _group(self, *names: str) -> LinearGroup:
        return LinearGroup([self._matrix(name) for name in names])

    def _finish(self, name: str) -> None:
        if not self._in_place:
            self._gguf.advise_done(name)
        self._done += self._gguf.tensors[name].nbytes
        self._progress("loading weights", self._done, self._total)
