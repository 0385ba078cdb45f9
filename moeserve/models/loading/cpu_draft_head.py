"""Loads an EAGLE-3 head for the CPU, always packed into panels: models/eagle3/shape.py."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
from torch import Tensor

from moeserve.kernels.cpu_stream import CpuStream, LinearGroup, Matrix
from moeserve.models.eagle3.shape import (
    IDS,
    INPUT_NORM,
    JOINED,
    QKV,
    STATE_NORM,
    DraftHeadShape,
    draft_head_tensors,
    read_ids,
)
from moeserve.models.feed_forward import DenseFfnShape
from moeserve.models.interface import ModelShape
from moeserve.models.loading.cpu_loader import CpuLoader
from moeserve.models.loading.cpu_weights import (
    CpuAttention,
    CpuDenseFfn,
    CpuEmbedding,
    CpuLayer,
    CpuSharedExpert,
    CpuWeights,
)
from moeserve.models.loading.engine_types import check_cpu_types
from moeserve.models.loading.halves import pack_halves
from moeserve.models.loading.lanes import check_lanes
from moeserve.models.loading.progress import OnProgress
from moeserve.models.loading.rope_factors import rope_factors
from moeserve.models.sources.gguf import names as n
from moeserve.models.sources.source import ModelSource


@dataclass(frozen=True, slots=True)
class CpuDraftHead:
    own: CpuWeights  # its layer, as of a model; the layer's q, k and v are those of the token alone
    joined: LinearGroup  # [hidden, taps * the model's hidden]
    joined_norm: (
        Tensor | None
    )  # float32 [taps * the model's hidden]: before that product; None: there is none
    token_norm: Tensor  # float32 [hidden], as are the others
    state_norm: Tensor
    output_norm: Tensor
    from_state: LinearGroup  # q, k, v of the state
    token_k_v: LinearGroup  # k and v alone
    state_k_v: LinearGroup
    embedding: CpuEmbedding | None  # None: the model's
    output: Matrix | None  # [scored, hidden]; None: the model's
    ids: (
        npt.NDArray[np.int32] | None
    )  # of the scored tokens in the model's vocabulary; None: they are the same
    bytes: int  # in the file
    dense_bytes: int  # that a row reads beside the output


class CpuDraftHeadLoader(CpuLoader):
    """Loads one head; an instance is used once."""

    def __init__(
        self,
        stream: CpuStream,
        source: ModelSource,
        head: DraftHeadShape,
        model: ModelShape,
        progress: OnProgress,
    ) -> None:
        """model: the model that the head drafts for."""
        super().__init__(stream, source, head.own, progress)
        self._head_shape, self._model_shape = head, model

    def load_head(self) -> CpuDraftHead:
        """Loads all weights. Raises ModelError for a type without CPU kernels, or ids that the model lacks."""
        head, source = self._head_shape, self._source
        names = list(draft_head_tensors(head, self._model_shape))
        check_cpu_types(source, names)
        check_lanes(source, head.own, "CPU", {"attention.key_length": head.attention.head_dim})
        self._total = sum(source.tensors[name].nbytes for name in names)
        embedding = self._table(n.TOKEN_EMBD, is_read_again=False) if head.has_embedding else None
        output = self._matrix(n.OUTPUT) if head.has_output else None
        first = len(self._matrices)
        joined = self._matrix(JOINED)
        of_token, of_state = zip(*(self._columns(n.of_layer(0, part)) for part in QKV), strict=True)
        layer = self._layer_of(LinearGroup(list(of_token)))
        own = CpuWeights(
            embedding=embedding or CpuEmbedding(np.zeros((0, 0), np.uint8), 0),
            layers=[layer],
            head=None,
            bytes=self._total,
            dense_bytes=0,
            rope_factors=rope_factors(head.own, self._vector),
            next_token=None,
            matrices=self._matrices,
            layer_inputs=None,
            ngrams=None,
            source=None,
        )
        return CpuDraftHead(
            own=own,
            joined=LinearGroup([joined]),
            joined_norm=self._vector(INPUT_NORM) if head.norm_before_fc else None,
            token_norm=self._vector(n.of_layer(0, n.ATTN_NORM)),
            state_norm=self._vector(STATE_NORM),
            output_norm=self._vector(n.OUTPUT_NORM),
            from_state=LinearGroup(list(of_state)),
            token_k_v=LinearGroup(list(of_token[1:])),
            state_k_v=LinearGroup(list(of_state[1:])),
            embedding=embedding,
            output=output,
            ids=read_ids(source, self._model_shape) if IDS in source.tensors else None,
            bytes=self._total,
            dense_bytes=sum(matrix.bytes for matrix in self._matrices[first:]),
        )

    def _columns(self, name: str) -> tuple[Matrix, Matrix]:
        """Loads the columns of a matrix that multiply the token, and those that multiply the state."""
        halves = pack_halves(self._stream, self._source, name, self._shape)
        self._matrices += halves
        self._finish(name)
        return halves

    def _layer_of(self, qkv: LinearGroup) -> CpuLayer:
        ffn = self._shape.layers[0].ffn
        assert isinstance(ffn, DenseFfnShape)
        norm = self._vector(n.of_layer(0, n.FFN_NORM))
        return CpuLayer(
            CpuAttention(
                norm=norm,  # not read: the inputs of q, k and v have norms of their own
                qkv=qkv,
                q_norm=None,
                k_norm=None,
                output=self._group(0, n.ATTN_OUTPUT, has_bias=False),
                sinks=None,
                v_norm=None,
                output_norm=None,
            ),
            CpuDenseFfn(norm, CpuSharedExpert(self._experts(0, ffn.parts), gate=None)),
        )
