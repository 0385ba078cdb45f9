"""A decoder's weights on the CPU: matrices of the pool in the file's types, vectors in float32."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
from torch import Tensor

from moeserve.kernels.compressed_operations import CompressorParameters
from moeserve.kernels.cpu_stream import LinearGroup, Matrix
from moeserve.kernels.residual_operations import NgramNorms
from moeserve.kernels.stream_operands import DeltaParameters, Mamba2Parameters
from moeserve.kernels.streams.sinkhorn import SinkhornMix
from moeserve.models.loading.ngram_rows import NgramRows
from moeserve.models.loading.unnormed import Unnormed
from moeserve.models.residual import StreamReading
from moeserve.models.sources.experts_in_file import ExpertsInFile
from moeserve.models.sources.source import ModelSource


@dataclass(frozen=True, slots=True)
class CpuEmbedding:
    """The token embedding as bytes of the file's type; rows are looked up, and the matrix is never multiplied.
    ggml_type: ggml's number of the type."""

    table: npt.NDArray[np.uint8]  # [vocab, row_bytes]
    ggml_type: int


@dataclass(frozen=True, slots=True)
class CpuStreamMix:
    """The weights that compute a block's input from a residual of several streams (kernels/streams/reference.py), and
    add its output to each stream."""

    norm: Tensor  # float32 [streams, hidden]
    down: LinearGroup  # [low_rank, streams * hidden], then the injection weights [streams, streams * hidden]
    up: LinearGroup  # [streams * hidden, low_rank]


@dataclass(frozen=True, slots=True)
class CpuSinkhornMix:
    """The weights through which a block reads a residual of several streams, which are mixed by a doubly stochastic
    matrix: kernels/streams/sinkhorn.py."""

    ones: Tensor  # float32 [streams * hidden]: the weight of the norm before the product
    product: LinearGroup  # [streams * (2 + streams), streams * hidden]; [streams, ..] before the head
    mix: SinkhornMix
    norm: Tensor  # float32 [hidden]: of what is read


@dataclass(frozen=True, slots=True)
class CpuLayerNorm:
    """A LayerNorm without a bias: it subtracts the mean before it divides by the standard deviation."""

    weight: Tensor  # float32 [hidden]


@dataclass(frozen=True, slots=True)
class CpuStreamMean:
    """The weight of the norm through which the head reads the mean of the residual's streams."""

    norm: Tensor  # float32 [hidden]


@dataclass(frozen=True, slots=True)
class CpuAttendedStreams:
    """The weights with which a block weighs the residual's streams by attention: kernels/streams/attended.py."""

    score: Tensor  # float32 [hidden]
    norm: Tensor  # float32 [hidden]: of the sum
    reading: StreamReading


CpuNorm = Tensor | CpuLayerNorm  # an RMS norm's weight, float32 [hidden], or a LayerNorm
# What computes a block's input from the residual: a norm or none, or a mix of the streams, their mean, or attention.
CpuInput = CpuNorm | Unnormed | CpuStreamMix | CpuSinkhornMix | CpuStreamMean | CpuAttendedStreams


@dataclass(frozen=True, slots=True)
class CpuNgrams:
    """The weights of a layer's n-gram embeddings: the table, which stays in the file, and the matrices and norms after
    it. See kernels/ngrams/reference.py."""

    table: NgramRows
    products: LinearGroup  # [streams * hidden, width] of keys, [hidden, width] of values
    norms: NgramNorms
    conv: Tensor  # float32 [taps, streams * hidden]


@dataclass(frozen=True, slots=True)
class ExpertBiases:
    gate: Tensor  # float32 [E, width]
    up: Tensor
    down: Tensor  # [E, hidden]


@dataclass(frozen=True, slots=True)
class ExpertsOnDisk:
    """The experts of a layer with fewer slots in RAM than experts."""

    num_experts: int
    in_file: tuple[ExpertsInFile, ExpertsInFile, ExpertsInFile]  # gate, up, down


@dataclass(frozen=True, slots=True)
class GatedExperts:
    """The matrices of experts that compute down(activation(gate x, up x)); a single expert if all tokens pass through
    it."""

    gate: Matrix  # [E, width, hidden]; without gates `up` itself
    up: Matrix  # [E, width, hidden]
    down: Matrix  # [E, hidden, width]
    biases: ExpertBiases | None = None  # None: no biases
    # If set, the matrices are [slots, ...] instead of [E, ...]; experts are read from disk into slots when needed.
    on_disk: ExpertsOnDisk | None = None

    @property
    def matrices(self) -> tuple[Matrix, ...]:
        """The matrices, each once: in experts without gates, `gate` and `up` are the same matrix."""
        return (self.up, self.down) if self.gate is self.up else (self.gate, self.up, self.down)

    @property
    def bytes_each(self) -> int:
        """Bytes per expert."""
        return sum(m.bytes // m.experts for m in self.matrices)


@dataclass(frozen=True, slots=True)
class CpuBlockIndexer:
    """The weights of an indexer that chooses blocks of keys for sparse attention: kernels/indexer/blocks.py."""

    inputs: LinearGroup  # [heads * dim, hidden] of index queries, [dim, hidden] of index keys
    q_norm: Tensor  # float32 [dim]
    k_norm: Tensor


@dataclass(frozen=True, slots=True)
class CpuAttention:
    norm: CpuInput
    # In the order of AttentionShape.qkv_parts: [q_width, hidden], [kv_width, hidden], [value_width, hidden], then the
    # gates, [gate_width, hidden], if any
    qkv: LinearGroup
    q_norm: Tensor | None  # float32 [head_dim] or [q_width]; None: q is not normalised
    k_norm: Tensor | None
    output: LinearGroup  # [hidden, output_width]
    sinks: Tensor | None = None  # float32 [heads]
    v_norm: Tensor | None = None  # float32 [v_dim]
    # float32 [hidden]: norm of the block's output; None: not normalised
    output_norm: Tensor | None = None
    indexer: CpuBlockIndexer | None = None  # None: rows attend to all keys


@dataclass(frozen=True, slots=True)
class CpuIndexer:
    """The weights of an indexer that chooses keys for sparse attention: kernels/indexer/reference.py."""

    # [dim, hidden] of index keys, [heads, hidden] of the heads' weights; of pooled index keys [dim, hidden] of gates
    inputs: LinearGroup
    q_b: LinearGroup  # [heads * dim, q_rank]
    k_norm: Tensor  # float32 [dim]
    k_bias: Tensor
    ape: Tensor | None = None  # float32 [keys of a block, dim]: added to the gates of pooled index keys


@dataclass(frozen=True, slots=True)
class CpuLatentAttention:
    norm: CpuInput
    inputs: LinearGroup  # as LatentAttentionShape.input_parts
    q_a_norm: Tensor | None  # float32 [q_rank]; None: q is made from the layer's input
    q_b: LinearGroup | None  # [q_rows, q_rank]
    latent_norm: Tensor  # float32 [rank]
    k_b: Matrix  # [heads, rank, nope_dim]
    v_b: Matrix  # [heads, value_dim, rank]
    output: LinearGroup  # [hidden, output_width]
    # None: the layer attends to all keys, or to those that an earlier layer's indexer chose.
    indexer: CpuIndexer | None = None


@dataclass(frozen=True, slots=True)
class CpuCompressedAttention:
    norm: CpuInput
    inputs: list[LinearGroup]  # as CompressedAttentionShape.input_parts
    q_a_norm: Tensor  # float32 [q_rank]
    q_b: LinearGroup  # [heads * head_dim, q_rank]
    index_q_b: LinearGroup | None  # of index queries; None: the layer has no indexer
    kv_norm: Tensor  # float32 [head_dim]
    compressors: list[CompressorParameters]  # as CompressedAttentionShape.compressors
    sinks: Tensor  # float32 [heads]
    output_a: Matrix  # [groups, rank, heads / groups * head_dim]
    output_b: LinearGroup  # [hidden, groups * rank]


@dataclass(frozen=True, slots=True)
class CpuDeltaNet:
    norm: CpuInput
    inputs: LinearGroup  # as GatedDeltaNetShape.input_parts
    gates: list[LinearGroup]  # as GatedDeltaNetShape.gate_parts
    parameters: DeltaParameters
    output: LinearGroup  # [hidden, value_width]


@dataclass(frozen=True, slots=True)
class CpuMamba2:
    norm: CpuInput  # beside attention: attention's
    input: LinearGroup  # [row_width, hidden]
    parameters: Mamba2Parameters
    output: LinearGroup  # [hidden, value_width]


@dataclass(frozen=True, slots=True)
class CpuShortConv:
    norm: CpuInput
    input: LinearGroup  # [row_width, hidden]
    conv: Tensor  # float32 [conv_kernel, channels], the weight of the oldest token first
    output: LinearGroup  # [hidden, channels]


@dataclass(frozen=True, slots=True)
class CpuSharedExpert:
    experts: GatedExperts  # one
    gate: Tensor | None  # float32 [hidden]; None: its output is added unscaled


@dataclass(frozen=True, slots=True)
class CpuParts:
    """The norms of a mixture whose parts are normalised separately, float32 [hidden]."""

    router_input: Tensor
    shared_output: Tensor
    experts_input: Tensor
    experts_output: Tensor


@dataclass(frozen=True, slots=True)
class CpuLayerInput:
    """The weights with which one layer of Gemma's E models reads its per-layer embedding: gate, output and norm."""

    gate: LinearGroup  # [layer_input_width, hidden]
    output: LinearGroup  # [hidden, layer_input_width]
    output_norm: Tensor  # float32 [hidden]


@dataclass(frozen=True, slots=True)
class CpuLayerInputs:
    """The weights that compute the per-layer embeddings of all layers of Gemma's E models from a step's tokens."""

    table: CpuEmbedding  # [vocab, layers * layer_input_width]
    projection: LinearGroup  # [layers * layer_input_width, hidden], of the embeddings
    norm: Tensor  # float32 [layer_input_width], for each layer's part of the projection


@dataclass(frozen=True, slots=True)
class CpuMoe:
    norm: CpuInput | None  # None: it reads what the mixer read
    router: LinearGroup  # [E, hidden]
    experts: GatedExperts
    shared: CpuSharedExpert | None
    choice_bias: Tensor | None = None  # float32 [E]: added to scores for choosing experts only
    by_token: Tensor | None = None  # int32 [vocab, top_k]: experts of each token id; None: scores choose
    expert_scale: Tensor | None = None  # float32 [E]: factors of the chosen experts' weights
    # set if parts have separate norms; `norm` is then only the shared expert's input norm
    parts: CpuParts | None = None
    latent: Sequence[LinearGroup] = ()  # [latent, hidden] and [hidden, latent], if experts are latent
    latent_norm: Tensor | None = (
        None  # float32 [latent]: norm of the latent experts' sum; None: not normalised
    )


@dataclass(frozen=True, slots=True)
class CpuDenseFfn:
    norm: CpuInput | None  # as CpuMoe.norm
    expert: CpuSharedExpert  # without a gate


CpuMixer = CpuAttention | CpuLatentAttention | CpuCompressedAttention | CpuDeltaNet | CpuMamba2 | CpuShortConv


@dataclass(frozen=True, slots=True)
class CpuLayer:
    mixer: CpuMixer | None
    ffn: CpuMoe | CpuDenseFfn | None
    beside: CpuMamba2 | None = None  # the recurrence beside attention
    ffn_output_norm: Tensor | None = (
        None  # float32 [hidden]: norm of the feed-forward's output; None: not normalised
    )
    input: CpuLayerInput | None = None
    factor: float = 1.0  # multiplies the residual stream after the layer

    @property
    def moe(self) -> CpuMoe | None:
        """The layer's experts; None if it has none."""
        return self.ffn if isinstance(self.ffn, CpuMoe) else None

    @property
    def unrouted(self) -> CpuSharedExpert | None:
        """The feed-forward that all tokens pass; None if there is none."""
        if isinstance(self.ffn, CpuMoe):
            return self.ffn.shared
        return None if self.ffn is None else self.ffn.expert


@dataclass(frozen=True, slots=True)
class CpuHead:
    norm: CpuInput
    matrix: Matrix  # [vocab, hidden]
    output: LinearGroup  # the same

    @property
    def bytes(self) -> int:
        return self.matrix.bytes


@dataclass(frozen=True, slots=True)
class CpuNextToken:
    """The next-token block, which drafts: see models/next_token.py."""

    model_norm: CpuNorm | CpuStreamMean  # of the model's last residual, which the block reads
    token_norm: CpuNorm
    state_norm: CpuNorm
    from_token: LinearGroup  # [hidden, hidden]: the left half of eh_proj
    from_state: LinearGroup
    layer: CpuLayer
    k_v: LinearGroup  # the attention's matrices of k and v, or of the latent vector
    own_norm: CpuNorm  # of its own last residual, which it reads next
    head_norm: CpuNorm  # the same with the scale of logits
    dense_bytes: int  # bytes of its matrices outside the routed experts


@dataclass(frozen=True, slots=True)
class CpuWeights:  # bytes of its matrices outside the routed experts
    embedding: CpuEmbedding
    layers: list[CpuLayer]  # all, or the first ones if the others and the head are on a GPU
    head: CpuHead | None
    bytes: int  # the loaded tensors' bytes in the file
    dense_bytes: int  # bytes of the layers' matrices without routed experts; read once per step
    rope_factors: Tensor | None  # float32 [1 or 2, any]: see blocks/rope.py
    next_token: CpuNextToken | None  # None: no next-token block drafts
    matrices: list[Matrix]  # keeps all matrices alive: operations hold only addresses
    layer_inputs: CpuLayerInputs | None
    ngrams: CpuNgrams | None  # None: no layer here adds any
    source: ModelSource | None  # in place: the file that the matrices point into
