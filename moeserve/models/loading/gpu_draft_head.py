"""Loads an EAGLE-3 head to a GPU: models/eagle3/shape.py."""

from __future__ import annotations

from contextlib import closing
from dataclasses import dataclass

import torch
from torch import Tensor

from moeserve.kernels.planes import Planes
from moeserve.models.eagle3.shape import (
    INPUT_NORM,
    JOINED,
    STATE_NORM,
    DraftHeadShape,
    draft_head_tensors,
    read_ids,
)
from moeserve.models.interface import ModelShape
from moeserve.models.loading.floats import read_floats
from moeserve.models.loading.gpu_loader import GpuLoader
from moeserve.models.loading.gpu_weights import GpuLayer
from moeserve.models.loading.merged_linear import MergedLinear
from moeserve.models.loading.progress import OnProgress
from moeserve.models.loading.rope_factors import rope_factors
from moeserve.models.sources.gguf import names as n
from moeserve.models.sources.source import ModelSource


@dataclass(frozen=True, slots=True)
class GpuDraftHead:
    joined: MergedLinear  # [hidden, taps * the model's hidden]
    joined_norm: (
        Tensor | None
    )  # float32 [taps * the model's hidden]: before that product; None: there is none
    token_norm: Tensor  # float32 [hidden], as are the others
    state_norm: Tensor
    output_norm: Tensor
    layer: GpuLayer  # its q, k and v are products of a token and a state, [.., 2 * hidden]
    embedding: Planes | None  # None: the model's
    output: MergedLinear | None  # [scored, hidden]; None: the model's
    ids: Tensor | None  # int32 [scored], in the model's vocabulary; None: they are the same
    rope_factors: Tensor | None


class GpuDraftHeadLoader(GpuLoader):
    """Loads one head; an instance is used once."""

    def __init__(
        self, source: ModelSource, head: DraftHeadShape, device: torch.device, progress: OnProgress
    ) -> None:
        super().__init__(source, head.own, device, progress)
        self._head = head

    def load_head(self, model: ModelShape) -> GpuDraftHead:
        """Loads and returns all weights of a draft head whose shapes were checked before. model: the model that it
        drafts for. May be called once. Raises torch.OutOfMemoryError."""
        head, source = self._head, self._source
        self._total = sum(source.tensors[name].nbytes for name in draft_head_tensors(head, model))
        with closing(self._upload):
            return self._load_head(model)

    def _load_head(self, model: ModelShape) -> GpuDraftHead:
        head, source = self._head, self._source
        ids = torch.from_numpy(read_ids(source, model)).to(self._device) if head.has_ids else None
        return GpuDraftHead(
            joined=MergedLinear(self._planes(JOINED)),
            joined_norm=self._vector(INPUT_NORM) if head.norm_before_fc else None,
            token_norm=self._vector(n.of_layer(0, n.ATTN_NORM)),
            state_norm=self._vector(STATE_NORM),
            output_norm=self._vector(n.OUTPUT_NORM),
            layer=self._layer(0, ()),
            embedding=self._planes(n.TOKEN_EMBD) if head.has_embedding else None,
            output=MergedLinear(self._planes(n.OUTPUT)) if head.has_output else None,
            ids=ids,
            rope_factors=rope_factors(head.own, lambda name: read_floats(source, name)),
        )
