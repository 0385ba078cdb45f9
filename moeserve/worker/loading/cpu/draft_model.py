"""Builds the small model or the EAGLE-3 head that drafts, beside the model on the CPU pool."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

from moeserve.kernels.cpu_stream import CpuStream
from moeserve.kv.cache import KvCache
from moeserve.kv.states import StateCache
from moeserve.models.blocks.cpu.decoder import CpuDecoder
from moeserve.models.blocks.cpu.draft_head import CpuDraftHeadBlock
from moeserve.models.interface import ModelShape
from moeserve.models.loading.cpu_draft_head import CpuDraftHead, CpuDraftHeadLoader
from moeserve.models.loading.cpu_loader import CpuLoader
from moeserve.models.loading.cpu_weights import CpuWeights
from moeserve.models.loading.progress import OnProgress
from moeserve.worker.drafts.drafter import Reading
from moeserve.worker.drafts.foretold import Foretell
from moeserve.worker.drafts.model_drafter import ModelDrafter
from moeserve.worker.engines.cpu.small_model import CpuSmallModel
from moeserve.worker.loading.cpu.pool_start import check_ram
from moeserve.worker.loading.draft_model import DraftModel


@dataclass(frozen=True, slots=True)
class LoadedDraftModel:
    """The parts that stay constant while the server runs; forked processes share them."""

    model: DraftModel
    weights: CpuWeights | CpuDraftHead


def load_draft_model(
    stream: CpuStream, model: DraftModel, on_progress: OnProgress, target: ModelShape, *, in_place: bool
) -> LoadedDraftModel:
    """Loads the weights of a drafting model or head into RAM, and returns it with them. target: the shape of the model
    that it drafts for. in_place: a small model computes from the mapped file instead, without a copy. Raises
    ConfigError if RAM does not suffice."""
    if not in_place or model.head is not None:
        check_ram(model.weight_bytes, remedy="or leave out --speculative-model")
    if model.head is not None:
        loader = CpuDraftHeadLoader(stream, model.source, model.head, target, on_progress)
        return LoadedDraftModel(model, loader.load_head())
    in_file = in_place and model.source.is_mapped
    return LoadedDraftModel(model, CpuLoader(stream, model.source, model.shape, on_progress, in_file).load())


def build_model_drafter(
    loaded: LoadedDraftModel,
    stream: CpuStream,
    *,
    vocab_size: int,
    most_rows: int,
    max_model_len: int,
    max_num_seqs: int,
    num_kv_slots: int,
    reading: Reading,
    foretell: Foretell,
) -> partial[ModelDrafter]:
    """Allocates KV cache, states and buffers. Returns a function that makes the drafter from the runner's record of
    requests. vocab_size: of the model that is drafted for. most_rows: of a step of either model. num_kv_slots: of the
    pool."""
    layout, shape = loaded.model.layout, loaded.model.shape
    assert isinstance(loaded.weights, CpuWeights)
    decoder = CpuDecoder(
        shape,
        loaded.weights,
        stream,
        KvCache(
            *(layout, num_kv_slots, range(layout.num_layers)),
            num_states=2 * max_num_seqs,
            step_rows=most_rows,
        ).layers,
        most_rows,
        max_model_len,
        states=StateCache(layout, 2 * max_num_seqs, range(shape.num_layers)).layers,
    )
    return partial(
        ModelDrafter,
        model=CpuSmallModel(decoder, stream),
        vocab_size=vocab_size,
        most_rows=most_rows,
        num_kv_slots=num_kv_slots,
        reading=reading,
        foretell=foretell,
    )


def build_draft_head(
    loaded: LoadedDraftModel,
    stream: CpuStream,
    model: CpuDecoder,
    weights: CpuWeights,
    *,
    most_rows: int,
    max_model_len: int,
    num_kv_slots: int,
) -> CpuDraftHeadBlock:
    """Allocates the KV cache and the buffers of a head. model, weights: of the model that it drafts for."""
    head = loaded.model.head
    assert head is not None
    assert isinstance(loaded.weights, CpuDraftHead)
    kv = KvCache(loaded.model.layout, num_kv_slots, range(1)).layers[0]
    return CpuDraftHeadBlock(head, loaded.weights, stream, kv, model, weights, most_rows, max_model_len)
