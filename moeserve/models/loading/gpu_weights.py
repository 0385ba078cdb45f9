"""A decoder's weights on a GPU, as planes (`moeserve.kernels.planes`); vectors are float32."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from moeserve.kernels.compressed_operations import CompressorParameters
from moeserve.kernels.norm.sandwich_norms import SandwichNorms
from moeserve.kernels.planes import Planes
from moeserve.kernels.residual_operations import NgramNorms
from moeserve.kernels.stream_operands import Mamba2Parameters
from moeserve.models.loading.gpu_inputs import GpuInput, input_bytes
from moeserve.models.loading.merged_linear import MergedLinear
from moeserve.models.loading.ngram_rows import NgramRows
from moeserve.quantization.table import F16


@dataclass(frozen=True, slots=True)
class GpuExperts:
    """Some or all experts of a layer, ordered by id, on one GPU; or the single feed-forward that all tokens pass
    through."""

    gate: Planes  # [experts, width, hidden]; without gates `up` itself
    up: Planes
    down: Planes  # [experts, hidden, width]
    # float32 [experts, width], [experts, width], [experts, hidden]: biases of the products. None: no biases.
    biases: tuple[Tensor, Tensor, Tensor] | None = None
    # The same weights once more, as 16-bit floats: gate and up, whose rows take turns, [experts, 2 * width, hidden],
    # and down. None: large steps unpack them each time.
    unpacked: tuple[Tensor, Tensor] | None = None

    @property
    def nbytes(self) -> int:
        """Bytes of the quantised weights."""
        return sum(m.nbytes for m in (self.up, self.down)) + (0 if self.gate is self.up else self.gate.nbytes)


@dataclass(frozen=True, slots=True)
class GpuNgrams:
    """The weights of a layer's n-gram embeddings: the table, which stays in the file, and the matrices and norms after
    it. See kernels/ngrams/reference.py."""

    table: NgramRows  # in the file
    products: list[MergedLinear]  # the rows of key and value
    norms: NgramNorms  # float32 [streams * hidden]
    conv: Tensor  # [taps, streams * hidden], the weight of the oldest token first

    @property
    def nbytes(self) -> int:
        return sum(matrix.nbytes for matrix in self.products)


@dataclass(frozen=True, slots=True)
class GpuLayerInputs:
    """The weights that compute the per-layer embeddings of all layers of Gemma's E models from a step's tokens."""

    table: Planes  # [vocab, layers * layer_input_width]
    projection: MergedLinear  # [layers * layer_input_width, hidden], of the embeddings
    norm: Tensor  # float32 [layer_input_width], for each layer's part of the projection


@dataclass(frozen=True, slots=True)
class GpuLayerInput:
    """The weights that add a layer's own input to the residual."""

    gate: MergedLinear  # [layer_input_width, hidden]
    output: MergedLinear  # [hidden, layer_input_width]
    post_norms: (
        SandwichNorms  # its output norm is that of `output`'s product, and its factor comes after that
    )

    @property
    def nbytes(self) -> int:
        return self.gate.nbytes + self.output.nbytes


@dataclass(frozen=True, slots=True)
class GpuBlockIndexer:
    inputs: list[MergedLinear]  # the rows of index queries, then of index keys
    q_norm: Tensor  # [dim], as is k_norm
    k_norm: Tensor

    @property
    def nbytes(self) -> int:
        return sum(matrix.nbytes for matrix in self.inputs)


@dataclass(frozen=True, slots=True)
class GpuAttention:
    norm: GpuInput
    # The rows of q, its gates if it has any, k and, where it has a matrix, v, in that order.
    qkv: list[MergedLinear]
    q_norm: Tensor | None  # [head_dim] or [q_width]; None: q is not normalised
    k_norm: Tensor | None
    output: MergedLinear
    sinks: Tensor | None = None  # [heads]
    indexer: GpuBlockIndexer | None = None  # None: rows attend to all keys

    @property
    def nbytes(self) -> int:
        own = self.output.nbytes + (0 if self.indexer is None else self.indexer.nbytes)
        return own + sum(matrix.nbytes for matrix in self.qkv)


@dataclass(frozen=True, slots=True)
class GpuIndexer:
    # The rows of index keys, of the heads' weights, and of the gates of pooled keys.
    inputs: list[MergedLinear]
    q_b: MergedLinear  # [q_width, q_rank]
    k_norm: Tensor  # [dim], as is k_bias
    k_bias: Tensor
    ape: Tensor | None = None  # float32 [keys of a block, dim]; None: keys are not pooled

    @property
    def nbytes(self) -> int:
        return self.q_b.nbytes + sum(matrix.nbytes for matrix in self.inputs)


@dataclass(frozen=True, slots=True)
class GpuLatentAttention:
    norm: GpuInput
    inputs: list[MergedLinear]  # the rows of LatentAttentionShape.input_parts
    q_a_norm: Tensor | None  # [q_rank]; None: q is made from the layer's input
    q_b: MergedLinear | None  # [q_rows, q_rank]
    latent_norm: Tensor  # [rank]
    k_b: Planes  # [heads, rank, nope_dim]
    v_b: Planes  # [heads, value_dim, rank]
    output: MergedLinear
    indexer: GpuIndexer | None = None  # None: there is none, or an earlier layer's choice is used

    @property
    def nbytes(self) -> int:
        own = self.k_b.nbytes + self.v_b.nbytes + (0 if self.q_b is None else self.q_b.nbytes)
        own += 0 if self.indexer is None else self.indexer.nbytes
        return own + self.output.nbytes + sum(matrix.nbytes for matrix in self.inputs)


@dataclass(frozen=True, slots=True)
class GpuCompressedAttention:
    norm: GpuInput
    inputs: list[MergedLinear]  # the rows of CompressedAttentionShape.input_parts
    q_a_norm: Tensor  # [q_rank]
    q_b: list[MergedLinear]  # the rows of q and, with an indexer, of its queries
    kv_norm: Tensor  # [head_dim]
    compressors: list[CompressorParameters]  # as CompressedAttentionShape.compressors
    sinks: Tensor  # [heads]
    output_a: Planes  # [groups, output_rank, heads of a group * head_dim]
    output: MergedLinear  # [hidden, groups * output_rank]

    @property
    def nbytes(self) -> int:
        products = sum(matrix.nbytes for matrix in (self.output, *self.inputs, *self.q_b))
        return self.output_a.nbytes + products


@dataclass(frozen=True, slots=True)
class GpuDeltaNet:
    norm: GpuInput
    inputs: list[MergedLinear]  # the rows of GatedDeltaNetShape.input_parts
    gates: list[MergedLinear]  # as GatedDeltaNetShape.gate_parts
    conv: Tensor  # [conv_kernel, channels], the weight of the oldest token first
    rate: Tensor  # [value_heads]: -exp(A_log)
    dt_bias: Tensor  # [decays]
    output_norm: Tensor  # [value_dim]
    output: MergedLinear

    @property
    def nbytes(self) -> int:
        return self.output.nbytes + sum(matrix.nbytes for matrix in (*self.inputs, *self.gates))


@dataclass(frozen=True, slots=True)
class GpuMamba2:
    norm: GpuInput  # beside attention: attention's
    input: MergedLinear  # [row_width, hidden]
    parameters: Mamba2Parameters
    output: MergedLinear

    @property
    def nbytes(self) -> int:
        return self.input.nbytes + self.output.nbytes


@dataclass(frozen=True, slots=True)
class GpuShortConv:
    norm: GpuInput
    input: MergedLinear  # [row_width, hidden]
    conv: Tensor  # [conv_kernel, channels], the weight of the oldest token first
    output: MergedLinear

    @property
    def nbytes(self) -> int:
        return self.input.nbytes + self.output.nbytes


@dataclass(frozen=True, slots=True)
class GpuSharedExpert:
    experts: GpuExperts  # one
    gate: Tensor | None  # [hidden]; None: its output is added unscaled
    order: Tensor | None = None  # int32 [hidden], of gate and up: as MergedLinear.order


@dataclass(frozen=True, slots=True)
class GpuMoe:
    norm: GpuInput | None  # None: it reads what the mixer read
    router: MergedLinear
    experts: GpuExperts | None  # None: this GPU has none of the layer's experts
    # int32 [E]: an expert's index in `experts`, -1 if it is not on this GPU; None: `experts` has all, in order.
    expert_map: Tensor | None
    shared: GpuSharedExpert | None = None
    choice_bias: Tensor | None = None  # [E]: added to scores for choosing experts only
    by_token: Tensor | None = None  # int32 [vocab, top_k]: experts of each token id; None: scores choose
    expert_scale: Tensor | None = None  # [E]: factors of the chosen experts' weights
    sandwich: SandwichNorms | None = None  # None: the layer is not sandwiched
    order: Tensor | None = None  # int32 [E, hidden]: of each expert's gate and up, wherever it is
    latent: tuple[MergedLinear, ...] = ()  # [latent, hidden] and [hidden, latent], if experts are latent
    latent_norm: Tensor | None = None  # [latent]: norm of the latent experts' sum; None: not normalised

    @property
    def dense_bytes(self) -> int:
        """Bytes that every step reads."""
        of_shared = 0 if self.shared is None else self.shared.experts.nbytes
        return self.router.nbytes + of_shared + sum(matrix.nbytes for matrix in self.latent)


@dataclass(frozen=True, slots=True)
class GpuDenseFfn:
    norm: GpuInput | None  # as GpuMoe.norm
    expert: GpuSharedExpert  # without a gate
    sandwich: SandwichNorms | None = None  # None: the layer is not sandwiched

    @property
    def dense_bytes(self) -> int:
        """Bytes that every step reads."""
        return self.expert.experts.nbytes


GpuMixer = GpuAttention | GpuLatentAttention | GpuCompressedAttention | GpuDeltaNet | GpuMamba2 | GpuShortConv


@dataclass(frozen=True, slots=True)
class GpuLayer:
    mixer: GpuMixer | None
    ffn: GpuMoe | GpuDenseFfn | None
    ngrams: GpuNgrams | None = None  # n-gram embeddings that it adds to the residual before its blocks
    input: GpuLayerInput | None = None  # its own input, which it adds after its blocks
    beside: GpuMamba2 | None = None  # the recurrence beside attention

    @property
    def moe(self) -> GpuMoe | None:
        """The layer's experts; None if it has none."""
        return self.ffn if isinstance(self.ffn, GpuMoe) else None

    @property
    def expert_map(self) -> Tensor | None:
        """The index on this GPU of each of the layer's experts, int32 [E], see GpuMoe; None: all experts are on this
        GPU, in order."""
        return None if self.moe is None else self.moe.expert_map

    @property
    def mixers(self) -> list[GpuMixer]:
        """The layer's mixers: one, or attention and a recurrence that read the same input."""
        return [each for each in (self.mixer, self.beside) if each is not None]

    @property
    def dense_bytes(self) -> int:
        """Bytes that every step reads."""
        of_mixer = sum(mixer.nbytes for mixer in self.mixers)
        of_mixer += 0 if self.mixer is None else input_bytes(self.mixer.norm)
        of_ffn = 0 if self.ffn is None else self.ffn.dense_bytes + input_bytes(self.ffn.norm)
        return of_mixer + of_ffn + sum(each.nbytes for each in (self.ngrams, self.input) if each is not None)

    @property
    def own_experts(self) -> GpuExperts | None:
        """The layer's experts on this GPU, or the feed-forward of a layer without experts."""
        if isinstance(self.ffn, GpuDenseFfn):
            return self.ffn.expert.experts
        return None if self.ffn is None else self.ffn.experts


@dataclass(frozen=True, slots=True)
class GpuNextToken:
    """The weights of the block that drafts (models/next_token.py), with all its experts."""

    token_norm: Tensor  # [hidden]
    state_norm: Tensor
    projection: MergedLinear  # [hidden, 2 * hidden]: of the token's embedding and the state before it
    layer: GpuLayer
    head_norm: Tensor

    @property
    def dense_bytes(self) -> int:
        return self.projection.nbytes + self.layer.dense_bytes


@dataclass(frozen=True, slots=True)
class GpuWeights:
    # None: x comes from the CPU, which has the embedding and perhaps the first layers
    embedding: Planes | None
    layers: list[GpuLayer]  # all, or the last ones
    output_norm: GpuInput
    output: MergedLinear | None  # None: the head is elsewhere
    rope_factors: Tensor | None = None  # [1 or 2, any], a CPU tensor: see blocks/rope.py
    next_token: GpuNextToken | None = None
    layer_inputs: GpuLayerInputs | None = None  # None: no layer has an input of its own

    @property
    def most_experts(self) -> int:
        """The largest number of experts of one layer that are on this GPU."""
        here = [layer.moe.experts for layer in self.layers if layer.moe is not None]
        return max((experts.gate.experts for experts in here if experts is not None), default=0)


def plane_tensors(planes: Planes) -> list[Tensor]:
    """Returns the tensors codes, scales and supers of the planes, in the order of kernel arguments."""
    return [planes.codes, planes.scales, planes.supers]


def has_float_weights(weights: GpuWeights) -> bool:
    """Returns whether mixers or feed-forwards have float weights. (Routers always have.)"""
    matrices = [mixer.output.first for layer in weights.layers for mixer in layer.mixers]
    experts = [layer.own_experts for layer in weights.layers if layer.own_experts is not None]
    matrices += [matrix for e in experts for matrix in (e.gate, e.down)]
    return not all(m.quantised for m in matrices)


def float_type(weights: GpuWeights, device: torch.device) -> torch.dtype:
    """Returns the dtype that tensor cores multiply in large batches. This is bfloat16, which cannot overflow and is
    more precise than the int8 of small batches. Models with float16 weights use float16, because bfloat16 has three
    bits less. On another device than CUDA it is float32: Triton's interpreter has no bfloat16."""
    if device.type != "cuda":
        return torch.float32
    matrices = [mixer.output.first for layer in weights.layers for mixer in layer.mixers]
    matrices += [layer.moe.router.first for layer in weights.layers if layer.moe is not None]
    matrices += [layer.own_experts.gate for layer in weights.layers if layer.own_experts is not None]
    has_halves = any(m.type is F16 for m in matrices)
    return torch.float16 if has_halves else torch.bfloat16
