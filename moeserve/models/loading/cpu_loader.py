"""Loads a decoder's weights for the CPU, in the file's types: packed into the CPU pool's panels, or in place.

Tensors are packed one by one, and the file's pages of a tensor are released afterwards, so at most one tensor is in
memory twice. In place, nothing is read on loading; pages are read at first use.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch

from moeserve.kernels.cpu_stream import CpuStream, LinearGroup, Matrix
from moeserve.models.attention import AttentionShape
from moeserve.models.compressed import CompressedAttentionShape
from moeserve.models.feed_forward import DenseFfnShape, MoeShape, SharedExpert
from moeserve.models.interface import ModelShape
from moeserve.models.latent import LatentAttentionShape
from moeserve.models.loading.cpu_attention import load_attention
from moeserve.models.loading.cpu_compressed import load_compressed_attention
from moeserve.models.loading.cpu_latent import load_latent_attention
from moeserve.models.loading.cpu_recurrent import load_mamba2, load_recurrence
from moeserve.models.loading.cpu_residual import load_input, load_ngrams, load_norm, scaled
from moeserve.models.loading.cpu_weights import (
    CpuDenseFfn,
    CpuEmbedding,
    CpuHead,
    CpuInput,
    CpuLayer,
    CpuLayerInput,
    CpuLayerInputs,
    CpuLayerNorm,
    CpuMamba2,
    CpuMixer,
    CpuMoe,
    CpuNextToken,
    CpuParts,
    CpuSharedExpert,
    CpuStreamMean,
    CpuWeights,
    ExpertBiases,
    GatedExperts,
)
from moeserve.models.loading.disk_slots import experts_on_disk, num_slots_of
from moeserve.models.loading.engine_types import check_cpu_types
from moeserve.models.loading.floats import read_floats
from moeserve.models.loading.gated_q import rows_of
from moeserve.models.loading.halves import pack_halves
from moeserve.models.loading.head_order import bytes_in_halves, in_halves, is_reordered
from moeserve.models.loading.kv_products import kv_products
from moeserve.models.loading.lanes import check_lanes
from moeserve.models.loading.orders import SharedOrders
from moeserve.models.loading.progress import OnProgress
from moeserve.models.loading.rope_factors import rope_factors
from moeserve.models.sources.gguf import names as n
from moeserve.models.sources.source import ModelSource
from moeserve.models.tensors import check_tensors, expert_bias_tensors, model_tensors, unloaded_tensors


class CpuLoader:
    """Loads one model; an instance is used once."""

    def __init__(
        self,
        stream: CpuStream,
        source: ModelSource,
        shape: ModelShape,
        progress: OnProgress,
        in_place: bool = False,
        slots: Sequence[int] | None = None,
        is_short: Callable[[int], bool] = lambda _: False,
    ) -> None:
        """slots: for each layer, the number of experts that RAM holds; the others stay on disk. None: RAM holds all
        experts. is_short: from the bytes still to be loaded, whether free memory is short, so that the file's bytes
        leave the page cache once they are packed."""
        self._is_short = is_short
        self._slots = slots
        self._in_place = in_place
        self._stream = stream
        self._source = source
        self._shape = shape
        self._progress = progress
        self._done = self._total = 0
        self._matrices: list[Matrix] = []
        self._orders = SharedOrders()

    def load(self) -> CpuWeights:
        """Loads and returns all weights of the decoder. Raises ModelError for a tensor that is missing, has another
        shape, or a type without CPU kernels, and MemoryError."""
        names = list(model_tensors(self._shape))
        return self._load(names, self._shape.num_layers, with_head=True)

    def load_first(self, num_layers: int) -> CpuWeights:
        """Loads the embedding and the first layers, without the head. Raises like `load`."""
        layers = {name: n.layer_of(name) for name in model_tensors(self._shape)}
        mine = [name for name, layer in layers.items() if layer is not None and layer < num_layers]
        return self._load([n.TOKEN_EMBD, *mine], num_layers, with_head=False)

    def _load(self, names: list[str], num_layers: int, *, with_head: bool) -> CpuWeights:
        check_tensors(self._shape, self._source)
        check_cpu_types(
            self._source, [name for name in names if not name.endswith(n.of_part(n.EXPERTS_BY_TOKEN))]
        )
        names = [name for name in names if name not in unloaded_tensors(self._shape)]
        for form in self._shape.forms:
            widths = {"attention.key_length": form.head_dim}
            if self._shape.logit_softcap:
                widths["vocab_size"] = self._shape.vocab_size
            if not isinstance(self._shape.heads, CompressedAttentionShape):
                widths["rope.dimension_count"] = form.rotary_dim
            check_lanes(self._source, self._shape, "CPU", widths)
        self._total = sum(self._source.tensors[name].nbytes for name in names)
        embedding = self._table(n.TOKEN_EMBD, is_read_again=with_head and self._shape.tied_embeddings)
        norm = self._input(n.OUTPUT_HC, n.OUTPUT_NORM) if with_head else None
        head = None if norm is None else self._head(norm)
        layers = [self._layer(index) for index in range(num_layers)]
        ngrams = load_ngrams(self._source, self._shape, num_layers, self._vector, self._matrix)
        first = 0 if head is None else 1
        dense_bytes = sum(m.bytes for m in self._matrices[first:]) - _expert_bytes(layers)
        return CpuWeights(
            embedding=embedding,
            layers=layers,
            head=head,
            bytes=self._total,
            dense_bytes=dense_bytes,
            rope_factors=rope_factors(self._shape, self._vector),
            layer_inputs=self._layer_inputs() if self._shape.layer_input_width else None,
            ngrams=ngrams,
            next_token=self._next_token(norm) if norm is not None and self._shape.next_token_layer else None,
            matrices=self._matrices,
            source=self._source if self._in_place else None,
        )

    def _head(self, norm: CpuInput) -> CpuHead:
        matrix = self._matrix(n.TOKEN_EMBD if self._shape.tied_embeddings else n.OUTPUT)
        if self._shape.logit_scale != 1.0:
            norm = scaled(norm, self._shape.logit_scale)
        return CpuHead(norm, matrix, LinearGroup([matrix]))

    def _next_token(self, model_norm: CpuInput) -> CpuNextToken:
        assert isinstance(model_norm, torch.Tensor | CpuLayerNorm | CpuStreamMean)
        index, before = self._shape.num_layers, len(self._matrices)
        from_token, from_state = self._halves(n.of_layer(index, n.NEXTN_EH_PROJ))
        first = len(self._matrices)
        layer = self._layer(index)
        # The mixer's matrices are loaded before the layer's others.
        k_v = kv_products(self._source, self._shape, index, self._matrices[first:])
        parts = (n.NEXTN_ENORM, n.NEXTN_HNORM, self._shape.next_token_norm)
        names = (n.of_layer(index, part) for part in parts)
        token_norm, state_norm, own_norm = (load_norm(self._shape, name, self._vector) for name in names)
        return CpuNextToken(
            model_norm=model_norm,
            token_norm=token_norm,
            state_norm=state_norm,
            from_token=LinearGroup([from_token]),
            from_state=LinearGroup([from_state]),
            layer=layer,
            k_v=k_v,
            own_norm=own_norm,
            head_norm=scaled(own_norm, self._shape.logit_scale),
            dense_bytes=sum(m.bytes for m in self._matrices[before:]) - _expert_bytes([layer]),
        )

    def _halves(self, name: str) -> tuple[Matrix, Matrix]:
        left, right = pack_halves(self._stream, self._source, name)
        self._matrices += [left, right]
        self._finish(name)
        return left, right

    def _layer(self, index: int) -> CpuLayer:
        shape = self._shape.loaded_layers[index]
        mixer = self._mixer(index)
        return CpuLayer(
            mixer,
            self._ffn(index),
            self._beside(index, mixer),
            self._vector(n.of_layer(index, n.POST_FFW_NORM)) if shape.is_sandwiched else None,
            self._layer_input(index) if self._shape.layer_input_width else None,
            float(self._vector(n.of_layer(index, n.LAYER_OUTPUT_SCALE))) if shape.has_factor else 1.0,
        )

    def _layer_input(self, index: int) -> CpuLayerInput:
        return CpuLayerInput(
            gate=self._group(index, n.LAYER_INPUT_GATE, has_bias=False),
            output=self._group(index, n.LAYER_INPUT_PROJ, has_bias=False),
            output_norm=self._vector(n.of_layer(index, n.LAYER_INPUT_NORM)),
        )

    def _layer_inputs(self) -> CpuLayerInputs:
        return CpuLayerInputs(
            table=self._table(n.LAYER_INPUT_EMBD, is_read_again=False),
            projection=LinearGroup([self._matrix(n.LAYER_INPUT_MODEL_PROJ)]),
            norm=self._vector(n.LAYER_INPUT_PROJ_NORM),
        )

    def _mixer(self, index: int) -> CpuMixer | None:
        mixer = self._shape.loaded_layers[index].mixer
        if isinstance(mixer, AttentionShape):
            norm = self._input(n.HC_ATTN, n.of_layer(index, n.ATTN_NORM), index)
            is_sandwiched = self._shape.loaded_layers[index].is_sandwiched
            load = (self._vector, self._matrix, self._gated_q)
            return load_attention(mixer, index, norm, *load, is_sandwiched=is_sandwiched)
        if isinstance(mixer, LatentAttentionShape):
            norm = self._input(n.HC_ATTN, n.of_layer(index, n.ATTN_NORM), index)
            return load_latent_attention(mixer, index, norm, self._vector, self._matrix)
        if isinstance(mixer, CompressedAttentionShape):
            norm = self._input(n.HC_ATTN, n.of_layer(index, n.ATTN_NORM), index)
            return load_compressed_attention(mixer, index, norm, self._vector, self._matrix, self._by_group)
        if mixer is None:
            return None
        norm = self._input(n.HC_ATTN, n.of_layer(index, n.ATTN_NORM), index)
        return load_recurrence(mixer, norm, *self._readers(index))

    def _beside(self, index: int, mixer: CpuMixer | None) -> CpuMamba2 | None:
        beside = self._shape.loaded_layers[index].beside
        if beside is None or mixer is None:
            return None
        return load_mamba2(beside, mixer.norm, *self._readers(index))

    def _readers(self, index: int) -> tuple[Callable[..., LinearGroup], Callable[[str], torch.Tensor]]:
        """Returns the functions by which a recurrent layer is loaded."""
        return (
            lambda *parts: self._group(index, *parts, has_bias=False),
            lambda name: self._vector(n.in_layer(index, name)),
        )

    def _ffn(self, index: int) -> CpuMoe | CpuDenseFfn | None:
        ffn = self._shape.loaded_layers[index].ffn
        if isinstance(ffn, DenseFfnShape):
            expert = CpuSharedExpert(self._experts(index, ffn.parts), gate=None)
            return CpuDenseFfn(self._ffn_norm(index), expert)
        return None if ffn is None else self._moe(index, ffn)

    def _gated_q(self, name: str, num_heads: int) -> tuple[Matrix, Matrix]:
        """Loads a matrix of q and its gates as two, packed, even if other matrices are used in place."""
        tensor = self._source.tensors[name]
        rows, cols = tensor.shape
        q, gate = (
            self._stream.pack(
                rows_of(self._source.data(name), num_heads, part),
                int(tensor.type),
                (rows // 2, cols),
                self._orders.of(tensor),
            )
            for part in ("q", "gate")
        )
        self._finish(name)
        self._matrices += [q, gate]
        return q, gate

    def _moe(self, index: int, shape: MoeShape) -> CpuMoe:
        shared, latent = shape.shared, shape.latent_parts if shape.latent else ()
        return CpuMoe(
            norm=self._ffn_norm(index),
            router=self._group(index, n.FFN_GATE_INP, has_bias=shape.router_bias),
            experts=self._experts(index, shape.parts, has_bias=shape.expert_bias),
            shared=None if shared is None else self._shared_expert(index, shared),
            choice_bias=self._vector(n.bias_of_layer(index, n.EXP_PROBS_B)) if shape.choice_bias else None,
            by_token=self._ids(n.of_layer(index, n.EXPERTS_BY_TOKEN)) if shape.by_token else None,
            expert_scale=self._vector(n.in_layer(index, n.scale_of_part(n.FFN_DOWN_EXPS)))
            if shape.expert_scale
            else None,
            parts=self._parts(index) if shape.parts_normed else None,
            latent=[self._group(index, part, has_bias=False) for part in latent],
            latent_norm=self._vector(n.of_layer(index, shape.latent_norm)) if shape.latent_norm else None,
        )

    def _parts(self, index: int) -> CpuParts:
        def norm(part: str) -> torch.Tensor:
            return self._vector(n.of_layer(index, part))

        router = self._vector(n.in_layer(index, n.scale_of_part(n.FFN_GATE_INP)))
        return CpuParts(
            router_input=router / math.sqrt(self._shape.hidden_size),
            shared_output=norm(n.POST_FFW_NORM_1),
            experts_input=norm(n.PRE_FFW_NORM_2),
            experts_output=norm(n.POST_FFW_NORM_2),
        )

    def _ffn_norm(self, index: int) -> CpuInput | None:
        if self._shape.loaded_layers[index].is_parallel:
            return None
        return self._input(n.HC_FFN, n.of_layer(index, self._shape.loaded_layers[index].ffn_norm), index)

    def _input(self, block: str, norm: str, index: int | None = None) -> CpuInput:
        return load_input(self._shape, block, norm, index, self._vector, self._matrix)

    def _experts(self, index: int, parts: tuple[str, ...], *, has_bias: bool = False) -> GatedExperts:
        num_slots = num_slots_of(self._source, self._slots, index, parts)
        load = self._matrix if num_slots is None else lambda name: self._slots_of(name, num_slots)
        *inputs, down = (load(n.of_layer(index, part)) for part in dict.fromkeys(parts))
        gate, up = inputs[0], inputs[-1]  # the same matrix if there is no gate
        biases = None
        if has_bias:
            biases = ExpertBiases(*(self._vector(name) for name in expert_bias_tensors(index)))
        names = [n.of_layer(index, part) for part in parts]
        on_disk = None if num_slots is None else experts_on_disk(self._source, names)
        return GatedExperts(gate, up, down, biases, on_disk)

    def _slots_of(self, name: str, num_slots: int) -> Matrix:
        tensor = self._source.tensors[name]
        _, rows, cols = tensor.shape
        matrix = self._stream.slots(int(tensor.type), (num_slots, rows, cols))
        self._matrices.append(matrix)
        self._done += tensor.nbytes
        self._progress("loading weights", self._done, self._total)
        return matrix

    def _shared_expert(self, index: int, shape: SharedExpert) -> CpuSharedExpert:
        experts = self._experts(index, shape.parts)
        gate = self._vector(n.of_layer(index, n.FFN_GATE_INP_SHEXP)) if shape.is_gated else None
        return CpuSharedExpert(experts, gate)

    def _table(self, name: str, *, is_read_again: bool) -> CpuEmbedding:
        tensor = self._source.tensors[name]
        table = self._source.data(name).reshape(tensor.shape[0], -1)
        if not self._in_place:
            # Copied, because the worker would crash if it read from the mapped file after the file was truncated.
            table = table.copy()
        if not is_read_again:
            self._finish(name)
        return CpuEmbedding(table, int(tensor.type))

    def _vector(self, name: str) -> torch.Tensor:
        """Loads a vector as float32; also the vectors of all experts, [E, n]."""
        out = in_halves(self._shape, name, read_floats(self._source, name))
        self._finish(name)
        return out

    def _ids(self, name: str) -> torch.Tensor:
        """Loads a tensor of numbers, int32."""
        tensor = self._source.tensors[name]
        ids = torch.frombuffer(bytearray(self._source.data(name)), dtype=torch.int32).view(tensor.shape)
        self._finish(name)
        return ids

    def _by_group(self, name: str, groups: int) -> Matrix:
        """Loads a matrix as `groups` matrices, each of equally many of its rows."""
        rows, cols = self._source.tensors[name].shape
        return self._matrix(name, (groups, rows // groups, cols))

    def _matrix(self, name: str, shape: tuple[int, ...] | None = None) -> Matrix:
        """shape: that the rows are divided into; None: the tensor's."""
        tensor = self._source.tensors[name]
        # Reordered matrices are packed, even if others are used in place.
        is_view = self._in_place and not is_reordered(self._shape, name)
        data = bytes_in_halves(self._shape, name, self._source.data(name), tensor.shape[0])
        if is_view:
            matrix = self._stream.view(data, int(tensor.type), shape or tensor.shape)
        else:
            order = self._orders.of(tensor)
            matrix = self._stream.pack(data, int(tensor.type), shape or tensor.shape, order)
        self._matrices.append(matrix)
        self._finish(name)
        return matrix

    def _group(self, index: int, *parts: str, has_bias: bool) -> LinearGroup:
        matrices = [self._matrix(n.of_layer(index, part)) for part in parts]
        if not has_bias:
            return LinearGroup(matrices)
        return LinearGroup(matrices, [self._vector(n.bias_of_layer(index, part)) for part in parts])

    def _finish(self, name: str) -> None:
        self._done += self._source.tensors[name].nbytes
        if not self._in_place:
            self._source.advise_done(name)
            if self._is_short(self._total - self._done):
                self._source.drop_cached(name)
        self._progress("loading weights", self._done, self._total)


def _expert_bytes(layers: list[CpuLayer]) -> int:
    """Returns the bytes of the routed experts."""
    return sum(
        matrix.bytes for layer in layers if layer.moe is not None for matrix in layer.moe.experts.matrices
    )
