"""Sizes of a model's parts in RAM and on a GPU, computed from the file's header.

A part is the unit of placement: the embedding, the head, the dense part of a layer (attention, norms, router, shared
expert), or one expert of a layer. In RAM, weights are repacked into panels of equal size. On a GPU they are stored
as planes: lossless, up to 5% larger, with rows padded to a multiple of 128 columns.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from moeserve.kv.layout import KvLayout
from moeserve.models.attention import AttentionShape
from moeserve.models.interface import ModelShape
from moeserve.models.latent import LatentAttentionShape
from moeserve.models.residual import cached_table_bytes
from moeserve.models.sources.gguf import TensorInfo
from moeserve.models.sources.gguf import names as n
from moeserve.models.tensors import (
    LAYER_INPUTS,
    dense_tensors,
    expert_bias_tensors,
    expert_tensors,
    head_inputs,
    model_tensors,
    unloaded_tensors,
)


@dataclass(frozen=True, slots=True)
class Bytes:
    """Bytes of one part on the CPU and on a GPU."""

    cpu: int
    cuda: int

    def on(self, device: str) -> int:
        return self.cuda if device == "cuda" else self.cpu


@dataclass(frozen=True, slots=True)
class LayerSizes:
    dense: Bytes  # attention, norms, router, shared experts; on a GPU also the biases of all experts
    num_experts: int
    expert: Bytes  # of one expert
    kv: int  # bytes per token
    state: int = 0  # bytes of recurrent state per sequence
    records: int = 0  # bytes on a GPU for the drafts of its recurrent state
    dense_tensors: tuple[str, ...] = ()  # tensor names, which placement rules match
    expert_tensors: tuple[str, ...] = ()  # of the routed experts
    needs_layer_before: bool = False  # on the same device; layer 0: the embedding
    unpacked: int = 0  # bytes of all its experts as 16-bit floats; 0: some are not quantised


@dataclass(frozen=True, slots=True)
class ModelSizes:
    embedding: Bytes
    # Includes the last norm and the block that drafts, if there is one. With tied embeddings, the head is a second copy
    # of the embedding in a layout for multiplication.
    head: Bytes
    layers: tuple[LayerSizes, ...]
    table_rows: int = 0  # bytes of RAM for rows of a table on disk, wherever the layers are
    # What the next-token block reads on the GPU, where the embedding is in RAM: another copy. None: no block drafts.
    block_embedding: Bytes | None = None

    @classmethod
    def of(cls, tensors: Mapping[str, TensorInfo], layout: KvLayout) -> ModelSizes:
        """Returns the sizes in bytes of the model's parts: in the file, and on a GPU. tensors: by name, checked by
        `check_tensors`."""
        shape = layout.shape

        def part(names: Iterable[str]) -> Bytes:
            infos = [tensors[name] for name in names]
            return Bytes(sum(t.nbytes for t in infos), sum(plane_bytes(t) for t in infos))

        # The block that drafts has its KV where the last layer's is.
        with_kv = [range(index, index + 1) for index in range(shape.num_layers)]
        with_kv[-1] = range(shape.num_layers - 1, len(shape.loaded_layers))

        def layer(index: int) -> LayerSizes:
            moe, count = shape.layers[index].moe, shape.layers[index].num_experts
            of_experts = expert_tensors(shape, index)
            experts = part(of_experts)
            biases = part(expert_bias_tensors(index) if moe is not None and moe.expert_bias else [])
            dense = tuple(dense_tensors(shape, index))
            of_dense = part(dense)
            return LayerSizes(
                dense=Bytes(of_dense.cpu, of_dense.cuda + biases.cuda),
                num_experts=count,
                expert=Bytes((experts.cpu + biases.cpu) // max(1, count), experts.cuda // max(1, count)),
                kv=sum(map(layout.layer_bytes, with_kv[index])),
                state=layout.state_bytes([index]),
                dense_tensors=dense,
                expert_tensors=of_experts,
                needs_layer_before=shape.needs_layer_before(index),
                unpacked=unpacked_bytes([tensors[name] for name in of_experts]),
            )

        def embedding() -> Bytes:
            return part([n.TOKEN_EMBD, *(LAYER_INPUTS if shape.layer_input_width else ())])

        head = n.TOKEN_EMBD if shape.tied_embeddings else n.OUTPUT
        drafting = [name for name in model_tensors(shape) if n.layer_of(name) == shape.num_layers]
        return cls(
            embedding=embedding(),
            head=part([head, *head_inputs(shape), *drafting]),
            layers=tuple(layer(index) for index in range(shape.num_layers)),
            table_rows=sum(cached_table_bytes(tensors[name].nbytes) for name in unloaded_tensors(shape)),
            block_embedding=None if shape.next_token_layer is None else part([n.TOKEN_EMBD]),
        )

    def with_experts(self, counts: Sequence[int]) -> ModelSizes:
        """Returns the sizes with `counts[layer]` experts in each layer."""
        layers = (replace(layer, num_experts=n) for layer, n in zip(self.layers, counts, strict=True))
        return replace(self, layers=tuple(layers))

    def with_kv_beside(self, token_bytes: int) -> ModelSizes:
        """Returns the sizes with the KV of a drafting head added on the device of the last layer."""
        last = replace(self.layers[-1], kv=self.layers[-1].kv + token_bytes)
        return replace(self, layers=(*self.layers[:-1], last))

    def with_draft_records(self, num_bytes: int) -> ModelSizes:
        """Returns the sizes with these bytes for the drafts of each recurrent layer on a GPU."""
        layers = (replace(layer, records=num_bytes if layer.state else 0) for layer in self.layers)
        return replace(self, layers=tuple(layers))

    @property
    def num_experts(self) -> int:
        """Experts per layer, in layers that have experts."""
        return max(layer.num_experts for layer in self.layers)

    @property
    def cpu_layer_bytes(self) -> int:
        """Bytes of all layers together in RAM."""
        return sum(layer.dense.cpu + layer.num_experts * layer.expert.cpu for layer in self.layers)

    @property
    def gpu_bytes(self) -> int:
        """Bytes of all weights on a GPU."""
        layers = sum(layer.dense.cuda + layer.num_experts * layer.expert.cuda for layer in self.layers)
        return self.embedding.cuda + self.head.cuda + layers

    def kv_bytes(self, first: int = 0, end: int | None = None) -> int:
        """Returns the KV bytes of one token in the layers from `first` up to `end`."""
        return sum(layer.kv for layer in self.layers[first:end])

    def state_bytes(self, first: int = 0, end: int | None = None) -> int:
        """Bytes of one sequence's recurrent state in the layers from `first` up to `end`."""
        return sum(layer.state for layer in self.layers[first:end])

    def record_bytes(self, first: int = 0) -> int:
        """Bytes on a GPU for the drafts of the recurrent layers from `first` on."""
        return sum(layer.records for layer in self.layers[first:])


def has_float_weights(tensors: Mapping[str, TensorInfo], shape: ModelShape) -> bool:
    """True if mixers or feed-forwards are not quantised; activations between products are then float32 on a GPU."""
    names: list[str] = []
    for index, layer in enumerate(shape.layers):
        parts: list[str] = []
        if isinstance(layer.mixer, AttentionShape | LatentAttentionShape):
            parts.append(n.ATTN_OUTPUT)
        elif layer.mixer is not None:
            parts.append(layer.mixer.output_part)
        if layer.beside is not None:
            parts.append(layer.beside.output_part)
        if layer.ffn is not None:
            gate, _, down = layer.ffn.parts
            parts += [gate, down]
        names += [n.of_layer(index, part) for part in parts]
    return any(not tensors[name].type.is_quantised for name in names)


def unpacked_bytes(matrices: Sequence[TensorInfo]) -> int:
    """Returns the bytes of a layer's experts as 16-bit floats, 0 if some are not quantised. matrices: gate, up and
    down. Experts without a gate have up and down only; up is then unpacked twice."""
    if not matrices or not all(tensor.type.is_quantised for tensor in matrices):
        return 0
    up, down = matrices[0], matrices[-1]
    return 2 * (2 * math.prod(up.shape) + math.prod(down.shape))


def plane_bytes(tensor: TensorInfo) -> int:
    """Returns the bytes of the tensor on a GPU: quantised matrices as planes, vectors as float32, float matrices
    unchanged."""
    if len(tensor.shape) == 1:
        return 4 * tensor.shape[0]
    rows = math.prod(tensor.shape[:-1])
    return rows * tensor.type.plane_row_bytes(tensor.shape[-1])
