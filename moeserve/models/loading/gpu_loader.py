"""Loads a decoder's weights to a GPU, one tensor at a time."""

from __future__ import annotations

from collections.abc import Callable, Container, Sequence
from contextlib import closing

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from moeserve.kernels.norm.sandwich_norms import SandwichNorms
from moeserve.kernels.planes import Planes, empty_planes
from moeserve.models.attention import AttentionShape
from moeserve.models.compressed import CompressedAttentionShape
from moeserve.models.feed_forward import DenseFfnShape, MoeShape, SharedExpert
from moeserve.models.interface import ModelShape
from moeserve.models.latent import LatentAttentionShape
from moeserve.models.loading.floats import read_floats
from moeserve.models.loading.gated_q import rows_of
from moeserve.models.loading.gpu_compressed import load_by_token, load_compressed_attention
from moeserve.models.loading.gpu_indexer import load_block_indexer, load_indexer
from moeserve.models.loading.gpu_inputs import GpuInput
from moeserve.models.loading.gpu_layer_inputs import load_layer_input, load_layer_inputs
from moeserve.models.loading.gpu_merged import load_merged, with_biases
from moeserve.models.loading.gpu_next_token import load_next_token
from moeserve.models.loading.gpu_recurrent import load_mamba2, load_recurrence
from moeserve.models.loading.gpu_residual import load_input, load_ngrams
from moeserve.models.loading.gpu_sandwich import load_sandwich
from moeserve.models.loading.gpu_weights import (
    GpuAttention,
    GpuDenseFfn,
    GpuExperts,
    GpuLatentAttention,
    GpuLayer,
    GpuMixer,
    GpuMoe,
    GpuSharedExpert,
    GpuWeights,
)
from moeserve.models.loading.head_order import bytes_in_halves, in_halves
from moeserve.models.loading.merged_linear import MergedLinear
from moeserve.models.loading.orders import SharedOrders
from moeserve.models.loading.progress import OnProgress
from moeserve.models.loading.ram_experts import expert_map_of
from moeserve.models.loading.rope_factors import rope_factors
from moeserve.models.loading.upload import Upload
from moeserve.models.sources.gguf import names as n
from moeserve.models.sources.source import ModelSource
from moeserve.models.tensors import (
    check_tensors,
    expert_bias_tensors,
    expert_tensors,
    model_tensors,
    unloaded_tensors,
)


class GpuLoader:
    """Loads one model; an instance is used once."""

    def __init__(
        self, source: ModelSource, shape: ModelShape, device: torch.device, progress: OnProgress
    ) -> None:
        self._source = source
        self._shape = shape
        self._device = device
        self._progress = progress
        self._upload = Upload(device)
        self._orders = SharedOrders(device)
        self._done = 0
        self._total = 0

    def load(
        self,
        gpu_experts: Sequence[Sequence[int]],
        first_layer: int = 0,
        *,
        with_embedding: bool = True,
        with_head: bool = True,
    ) -> GpuWeights:
        """Loads and returns the weights of the layers from `first_layer` on, with embedding and head if wanted.
        gpu_experts: for each of these layers the ids of the experts to load, ascending. Raises ModelError for a missing
        tensor or another shape, torch.OutOfMemoryError if they do not fit. May be called once."""
        tied = self._shape.tied_embeddings
        check_tensors(self._shape, self._source)
        elsewhere = set(unloaded_tensors(self._shape))
        elsewhere |= set() if with_embedding or (tied and with_head) else {n.TOKEN_EMBD}
        elsewhere |= set() if with_head else {n.OUTPUT}
        self._total = self._bytes_from(first_layer, elsewhere)
        with closing(self._upload):
            return self._load(gpu_experts, first_layer, with_embedding=with_embedding, with_head=with_head)

    def _load(
        self, gpu_experts: Sequence[Sequence[int]], first_layer: int, *, with_embedding: bool, with_head: bool
    ) -> GpuWeights:
        tied = self._shape.tied_embeddings
        embedding = self._planes(n.TOKEN_EMBD) if with_embedding else None
        output = None
        if with_head and tied:
            output = embedding or self._planes(n.TOKEN_EMBD)
        elif with_head:
            output = self._planes(n.OUTPUT)
        return GpuWeights(
            embedding=embedding,
            layers=[self._layer(index, ids) for index, ids in enumerate(gpu_experts, first_layer)],
            output_norm=self._output_norm(),
            output=None if output is None else MergedLinear(output),
            rope_factors=rope_factors(self._shape, lambda name: read_floats(self._source, name)),
            next_token=load_next_token(self._shape, self._vector, self._planes, self._layer)
            if with_head
            else None,
            layer_inputs=load_layer_inputs(self._shape, self._vector, self._planes, self._merged),
        )

    def _output_norm(self) -> GpuInput:
        norm = self._input(n.OUTPUT_HC, n.OUTPUT_NORM, None)
        return norm * self._shape.logit_scale if isinstance(norm, Tensor) else norm

    def _input(self, block: str, norm: str, index: int | None) -> GpuInput:
        return load_input(self._shape, block, norm, index, self._vector, self._merged)

    def _mixer_input(self, index: int) -> GpuInput:
        return self._input(n.HC_ATTN, n.of_layer(index, n.ATTN_NORM), index)

    def _bytes_from(self, first_layer: int, elsewhere: Container[str]) -> int:
        total = 0
        for name in model_tensors(self._shape):
            layer = n.layer_of(name)
            is_mine = layer >= first_layer if layer is not None else name not in elsewhere
            total += self._source.tensors[name].nbytes if is_mine else 0
        return total

    def _layer(self, index: int, ids: Sequence[int]) -> GpuLayer:
        ngrams = load_ngrams(self._source, self._shape, index, self._vector, self._merged)
        mixer, ffn = self._mixer(index), self._ffn(index, ids)
        norms = None if ffn is None else ffn.sandwich
        own = load_layer_input(self._shape, index, norms, self._vector, self._merged)
        beside, of_beside = self._shape.loaded_layers[index].beside, None
        if beside is not None and mixer is not None:
            of_beside = load_mamba2(beside, mixer.norm, *self._readers(index))
        return GpuLayer(mixer, ffn, ngrams, own, of_beside)

    def _readers(self, index: int) -> tuple[Callable[..., list[MergedLinear]], Callable[[str], Tensor]]:
        """Returns the functions by which a recurrent layer is loaded."""
        return (
            lambda *parts: self._linear(index, *parts, has_bias=False),
            lambda name: self._vector(n.in_layer(index, name)),
        )

    def _ffn(self, index: int, ids: Sequence[int]) -> GpuMoe | GpuDenseFfn | None:
        ffn = self._shape.loaded_layers[index].ffn
        if isinstance(ffn, DenseFfnShape):
            return self._dense_ffn(index, ffn)
        return None if ffn is None else self._moe(index, ffn, ids)

    def _mixer(self, index: int) -> GpuMixer | None:
        mixer = self._shape.loaded_layers[index].mixer
        if isinstance(mixer, AttentionShape):
            return self._attention(index, mixer)
        if isinstance(mixer, LatentAttentionShape):
            return self._latent_attention(index, mixer)
        if isinstance(mixer, CompressedAttentionShape):
            of_input = self._mixer_input(index)
            of_layer = (mixer, index, of_input, self._vector, self._merged, self._by_group)
            return load_compressed_attention(*of_layer)
        return (
            None if mixer is None else load_recurrence(mixer, self._mixer_input(index), *self._readers(index))
        )

    def _latent_attention(self, index: int, shape: LatentAttentionShape) -> GpuLatentAttention:
        has_q_a, heads = shape.q_rank > 0, range(shape.num_heads)
        return GpuLatentAttention(
            norm=self._mixer_input(index),
            inputs=self._latent_inputs(index, shape),
            q_a_norm=self._vector(n.of_layer(index, n.ATTN_Q_A_NORM)) if has_q_a else None,
            q_b=self._linear(index, n.ATTN_Q_B, has_bias=False)[0] if has_q_a else None,
            latent_norm=self._vector(n.of_layer(index, n.ATTN_KV_A_NORM)),
            k_b=self._expert_planes(n.of_layer(index, n.ATTN_K_B), heads),
            v_b=self._expert_planes(n.of_layer(index, n.ATTN_V_B), heads),
            output=self._linear(index, n.ATTN_OUTPUT, has_bias=shape.output_bias)[0],
            indexer=load_indexer(shape.indexer, index, self._vector, self._merged),
        )

    def _latent_inputs(self, index: int, shape: LatentAttentionShape) -> list[MergedLinear]:
        merged = self._linear(index, *(part for part, _ in shape.input_parts), has_bias=False)
        if not shape.input_bias:
            return merged
        biases = [
            self._vector(n.bias_of_layer(index, part))
            if part in shape.biased_parts
            else torch.zeros(rows, device=self._device)
            for part, rows in shape.input_parts
        ]
        return with_biases(merged, biases)

    def _attention(self, index: int, shape: AttentionShape) -> GpuAttention:
        has_norm = shape.qk_norm in ("head", "full")
        ones = torch.ones(shape.head_dim, device=self._device) if shape.qk_norm == "unweighted" else None
        q, *others = shape.qkv_parts
        parts = (q, n.ATTN_GATE, *others) if shape.has_gate_matrix else shape.qkv_parts
        return GpuAttention(
            norm=self._mixer_input(index),
            qkv=self._linear(index, *parts, has_bias=shape.qkv_bias),
            q_norm=self._vector(n.of_layer(index, n.ATTN_Q_NORM)) if has_norm else ones,
            k_norm=self._vector(n.of_layer(index, n.ATTN_K_NORM))
            if has_norm and shape.kv_from is None
            else ones,
            output=self._linear(index, n.ATTN_OUTPUT, has_bias=shape.output_bias)[0],
            sinks=self._vector(n.of_layer(index, n.ATTN_SINKS)) if shape.has_sinks else None,
            indexer=load_block_indexer(shape.indexer, index, self._vector, self._merged),
        )

    def _linear(self, index: int, *parts: str, has_bias: bool) -> list[MergedLinear]:
        """Loads a layer's matrices over the same input, in order."""
        merged = self._merged(*(n.of_layer(index, part) for part in parts))
        if not has_bias:
            return merged
        return with_biases(merged, [self._vector(n.bias_of_layer(index, part)) for part in parts])

    def _moe(self, index: int, shape: MoeShape, ids: Sequence[int]) -> GpuMoe:
        num_experts, shared = shape.num_experts, shape.shared
        return GpuMoe(
            norm=self._ffn_norm(index),
            router=self._linear(index, n.FFN_GATE_INP, has_bias=shape.router_bias)[0],
            experts=self._experts(index, ids, has_bias=shape.expert_bias) if len(ids) else None,
            expert_map=None if len(ids) == num_experts else expert_map_of(ids, num_experts, self._device),
            shared=None if shared is None else self._shared_expert(index, shared),
            choice_bias=self._vector(n.bias_of_layer(index, n.EXP_PROBS_B)) if shape.choice_bias else None,
            by_token=load_by_token(self._source, shape, index, self._device),
            expert_scale=self._vector(n.in_layer(index, n.scale_of_part(n.FFN_DOWN_EXPS)))
            if shape.expert_scale
            else None,
            sandwich=self._sandwich(index),
            order=self._orders.of(self._source.tensors[expert_tensors(self._shape, index)[0]]),
            latent=tuple(
                self._linear(index, part, has_bias=False)[0]
                for part in (shape.latent_parts if shape.latent else ())
            ),
            latent_norm=self._vector(n.of_layer(index, shape.latent_norm)) if shape.latent_norm else None,
        )

    def _sandwich(self, index: int) -> SandwichNorms | None:
        return load_sandwich(self._source, self._shape, index, self._vector)

    def _dense_ffn(self, index: int, shape: DenseFfnShape) -> GpuDenseFfn:
        return GpuDenseFfn(self._ffn_norm(index), self._unrouted(index, shape.parts), self._sandwich(index))

    def _ffn_norm(self, index: int) -> GpuInput | None:
        if self._shape.loaded_layers[index].is_parallel:
            return None
        return self._input(n.HC_FFN, n.of_layer(index, self._shape.loaded_layers[index].ffn_norm), index)

    def _shared_expert(self, index: int, shape: SharedExpert) -> GpuSharedExpert:
        vector = self._vector(n.of_layer(index, n.FFN_GATE_INP_SHEXP)) if shape.is_gated else None
        return self._unrouted(index, shape.parts, vector)

    def _unrouted(
        self, index: int, parts: tuple[str, str, str], gate: Tensor | None = None
    ) -> GpuSharedExpert:
        """Loads plain matrices as a single expert."""
        names = [n.of_layer(index, part) for part in dict.fromkeys(parts)]
        *inputs, down = (self._planes(name) for name in names)
        experts = GpuExperts(inputs[0], inputs[-1], down)  # the same matrix if there is no gate
        return GpuSharedExpert(experts, gate, self._orders.of(self._source.tensors[names[0]]))

    def _experts(self, index: int, ids: Sequence[int], *, has_bias: bool) -> GpuExperts:
        *inputs, down = (self._expert_planes(name, ids) for name in expert_tensors(self._shape, index))
        gate, up = inputs[0], inputs[-1]  # the same matrix if there are no gates
        if not has_bias:
            return GpuExperts(gate, up, down)
        of_gate, of_up, of_down = (self._vector(name)[list(ids)] for name in expert_bias_tensors(index))
        return GpuExperts(gate, up, down, (of_gate, of_up, of_down))

    def _merged(self, *names: str) -> list[MergedLinear]:
        return load_merged(self._source, self._orders, self._planes, names)

    def _planes(self, *names: str) -> Planes:
        """Loads matrices of one type, stacked."""
        tensors = [self._source.tensors[name] for name in names]
        rows, cols = sum(t.shape[0] for t in tensors), tensors[0].shape[1]
        planes = empty_planes(tensors[0].type, (rows, cols), self._device)
        row = 0
        for name, tensor in zip(names, tensors, strict=True):
            self._upload.rows(planes, self._rows(name), row)
            row += tensor.shape[0]
            self._finish(name)
        return planes

    def _by_group(self, name: str, groups: int) -> Planes:
        """Loads a matrix as `groups` matrices of equal parts of its rows."""
        tensor = self._source.tensors[name]
        rows, cols = tensor.shape
        planes = empty_planes(tensor.type, (groups, rows // groups, cols), self._device)
        self._upload.rows(planes, self._source.data(name), 0)
        self._finish(name)
        return planes

    def _rows(self, name: str) -> npt.NDArray[np.uint8]:
        """Returns a matrix's rows, reordered if necessary: for gated q, all heads' q before all gates; for heads
        stored in pairs, as split halves."""
        data = bytes_in_halves(
            self._shape, name, self._source.data(name), self._source.tensors[name].shape[0]
        )
        layer = n.layer_of(name)
        attention = None if layer is None else self._shape.loaded_layers[layer].attention
        if (
            layer is None
            or not isinstance(attention, AttentionShape)
            or not attention.is_gated
            or name != n.of_layer(layer, n.ATTN_Q)
        ):
            return data
        return np.concatenate([rows_of(data, attention.num_heads, part) for part in ("q", "gate")])

    def _expert_planes(self, name: str, ids: Sequence[int]) -> Planes:
        tensor = self._source.tensors[name]
        experts, rows, cols = tensor.shape
        planes = empty_planes(tensor.type, (len(ids), rows, cols), self._device)
        data = self._source.data(name).reshape(experts, -1)
        for place, (first, count) in _runs(ids):
            self._upload.rows(planes, data[first : first + count].reshape(-1), place * rows)
        self._finish(name)
        return planes

    def _vector(self, name: str) -> Tensor:
        """Loads a vector as float32; also the vectors of all experts, [E, n]."""
        out = in_halves(self._shape, name, read_floats(self._source, name))
        self._finish(name)
        return out.to(self._device)

    def _finish(self, name: str) -> None:
        self._source.advise_done(name)
        self._done += self._source.tensors[name].nbytes
        self._progress("loading weights to the GPU", self._done, self._total)


def _runs(ids: Sequence[int]) -> list[tuple[int, tuple[int, int]]]:
    """Groups consecutive ids: (index of the first, (first id, count))."""
    runs: list[tuple[int, tuple[int, int]]] = []
    for place, expert in enumerate(ids):
        if runs and expert == runs[-1][1][0] + runs[-1][1][1]:
            at, (first, count) = runs[-1]
            runs[-1] = (at, (first, count + 1))
        else:
            runs.append((place, (expert, 1)))
    return runs
