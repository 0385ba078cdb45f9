"""What each part of a model takes, in RAM and on a GPU, from the file's header alone.

A part is what can be placed by itself: the embedding, the head, the dense part of a layer (attention, norms, router),
one expert of a layer. Weights keep their bytes in the CPU's panels. On a GPU they lie in planes, lossless and up to 5%
larger, with rows padded to a multiple of 128 columns.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from moeserve.models.gguf import TensorInfo
from moeserve.models.gguf import names as n
from moeserve.models.qwen3moe.config import Qwen3MoeConfig

KV_BYTES_PER_VALUE = 2  # float16

DENSE_PARTS = (
    n.ATTN_NORM,
    n.ATTN_Q,
    n.ATTN_K,
    n.ATTN_V,
    n.ATTN_OUTPUT,
    n.ATTN_Q_NORM,
    n.ATTN_K_NORM,
    n.FFN_NORM,
    n.FFN_GATE_INP,
)


@dataclass(frozen=True, slots=True)
class Bytes:
    """Of one part: where it lies decides which of the two counts."""

    cpu: int
    cuda: int

    def on(self, device: str) -> int:
        return self.cuda if device == "cuda" else self.cpu


@dataclass(frozen=True, slots=True)
class LayerSizes:
    dense: Bytes  # attention, norms, router
    expert: Bytes  # one of them


@dataclass(frozen=True, slots=True)
class ModelSizes:
    num_experts: int  # of a layer
    embedding: Bytes
    head: Bytes  # with the last norm; with tied embeddings a second copy, made for multiplying
    layers: tuple[LayerSizes, ...]
    kv_bytes: int  # of one token in one layer

    @classmethod
    def of(cls, tensors: Mapping[str, TensorInfo], config: Qwen3MoeConfig) -> ModelSizes:
        """`tensors` as `config.check_tensors` has passed them."""

        def part(names: Iterable[str]) -> Bytes:
            infos = [tensors[name] for name in names]
            return Bytes(sum(t.nbytes for t in infos), sum(plane_bytes(t) for t in infos))

        def layer(index: int) -> LayerSizes:
            experts = part(n.of_layer(index, name) for name in n.EXPERT_PARTS)
            return LayerSizes(
                dense=part(n.of_layer(index, name) for name in DENSE_PARTS),
                expert=Bytes(experts.cpu // config.num_experts, experts.cuda // config.num_experts),
            )

        head = n.TOKEN_EMBD if config.tied_embeddings else n.OUTPUT
        return cls(
            num_experts=config.num_experts,
            embedding=part([n.TOKEN_EMBD]),
            head=part([head, n.OUTPUT_NORM]),
            layers=tuple(layer(index) for index in range(config.num_layers)),
            kv_bytes=2 * config.num_kv_heads * config.head_dim * KV_BYTES_PER_VALUE,
        )


def has_float_weights(tensors: Mapping[str, TensorInfo], config: Qwen3MoeConfig) -> bool:
    """Attention or experts that are not quantised: what is between products is then kept in float32 on a GPU."""
    parts = (n.ATTN_OUTPUT, n.FFN_GATE_EXPS, n.FFN_DOWN_EXPS)
    names = [n.of_layer(index, part) for index in range(config.num_layers) for part in parts]
    return any(not tensors[name].type.is_quantised for name in names)


def plane_bytes(tensor: TensorInfo) -> int:
    """What the tensor takes on a GPU. Vectors become float32; matrices of floats stay as they are."""
    if len(tensor.shape) == 1:
        return 4 * tensor.shape[0]
    rows = math.prod(tensor.shape[:-1])
    return rows * tensor.type.plane_row_bytes(tensor.shape[-1])
