"""Opens the small model or the EAGLE-3 head that drafts (--speculative-model), for the worker and `moeserve plan`."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

from moeserve.config import ServerConfig, drafts_of, num_drafts
from moeserve.errors import ConfigError
from moeserve.kv.layout import KvLayout, check_cpu_reads, layout_of
from moeserve.models.draft_heads import is_eagle3_folder, refuse_block_alone, refuse_draft_head
from moeserve.models.eagle3.folder import open_draft_head_folder
from moeserve.models.eagle3.gpu_memory import gpu_head_bytes
from moeserve.models.eagle3.shape import (
    ARCHITECTURE,
    DraftHeadShape,
    draft_head_tensors,
    input_bytes,
    read_draft_head,
    read_ids,
)
from moeserve.models.gpu_features import check_gpu_features, gpu_shape
from moeserve.models.interface import ModelShape
from moeserve.models.loading.engine_types import check_cpu_types, check_gpu_types
from moeserve.models.loading.gpu_orders import check_gpu_orders
from moeserve.models.loading.lanes import check_lanes
from moeserve.models.open import open_dummy_model, open_metadata, open_model
from moeserve.models.registry import read_checked_shape
from moeserve.models.sources.source import ModelSource
from moeserve.models.tensors import id_tensors, unloaded_tensors
from moeserve.placement import ModelSizes
from moeserve.placement.engine_memory import cpu_logits_bytes, cpu_workspace_bytes, gpu_reserved_bytes
from moeserve.placement.expert_ram import dense_bytes, expert_bytes
from moeserve.placement.sizes import has_float_weights, plane_bytes
from moeserve.tokenizer.same_vocabulary import check_same_vocabulary

MOST_SMALL_ROWS = 512  # of a small model's step on a GPU: texts are read in pieces, and buffers stay small


@dataclass(frozen=True, slots=True)
class DraftModel:
    """The small model, or the head."""

    source: ModelSource
    shape: ModelShape
    layout: KvLayout
    head: DraftHeadShape | None = None  # None: a whole model

    def gpu_bytes(
        self, config: ServerConfig, model: ModelShape, max_tokens: int, *, on_cuda: bool = True
    ) -> int:
        """Returns the bytes on a GPU beside KV: weights and buffers. model: the one that it drafts for. max_tokens:
        rows of its step. on_cuda: False for Triton's interpreter, which multiplies in float32."""
        if self.head is None:
            sizes = ModelSizes.of(self.source.tensors, self.layout)
            length = config.max_model_len or model.context_length
            return sizes.gpu_bytes + gpu_reserved_bytes(
                *(replace(config, max_model_len=length), self.shape, small_step_tokens(config, max_tokens)),
                *(sizes, sizes.gpu_bytes),
                float_weights=has_float_weights(self.source.tensors, self.shape),
                on_cuda=on_cuda,
            )
        buffers = gpu_head_bytes(
            self.head,
            model,
            max_tokens=max_tokens,
            max_model_len=config.max_model_len or model.context_length,
            max_num_seqs=config.max_num_seqs,
            drafts=num_drafts(config),
            floats="bfloat16" if on_cuda else "float32",
        )
        return buffers + sum(plane_bytes(tensor) for tensor in self.source.tensors.values())

    @property
    def weight_bytes(self) -> int:
        if self.head is not None:
            return sum(tensor.nbytes for tensor in self.source.tensors.values())
        sizes = ModelSizes.of(self.source.tensors, self.layout)
        return dense_bytes(sizes) + expert_bytes(sizes)

    @property
    def taps(self) -> tuple[int, ...]:
        """Layers before which a head reads the model's residual."""
        return () if self.head is None else self.head.taps

    def state_bytes(self, max_num_seqs: int) -> int:
        """Returns the bytes of its recurrent states: two for each request, one of them for drafts."""
        return 2 * max_num_seqs * self.layout.state_bytes()

    def buffer_bytes(self, rows: int, max_num_seqs: int) -> int:
        """Returns the bytes of its buffers for a step of `rows` rows, with the requests' states."""
        buffers = cpu_workspace_bytes(self.shape, rows) + cpu_logits_bytes(self.shape, max_num_seqs)
        if self.head is not None:
            buffers += input_bytes(self.head, rows)
        return buffers + self.layout.step_key_bytes(rows) + self.state_bytes(max_num_seqs)


def open_draft_model(
    config: ServerConfig,
    model: ModelSource,
    shape: ModelShape,
    *,
    has_tensors: bool = True,
    on_gpu: bool = False,
) -> DraftModel | None:
    """Opens and returns the small model or the head that drafts; None if there is none. model, shape: of the one that
    it drafts for. has_tensors: its weights will be read. on_gpu: the model's engine is a GPU's. Raises ModelError, also
    for another vocabulary, and ConfigError."""
    drafts = drafts_of(config)
    if drafts is None or drafts.model is None:
        return None
    path = Path(drafts.model)
    source: ModelSource
    if is_eagle3_folder(path):
        return _head_of(config, open_draft_head_folder(path), shape, on_gpu=on_gpu)
    if not has_tensors:
        source = open_metadata(path)
    else:
        source = open_dummy_model(path) if config.load_format == "dummy" else open_model(path)
    if drafts.method == "eagle3" or source.architecture == ARCHITECTURE:
        return _head_of(config, source, shape, on_gpu=on_gpu)
    refuse_draft_head(path, source.architecture)  # these files lack a vocabulary
    refuse_block_alone(source)
    check_same_vocabulary(model, source)
    own = read_checked_shape(source)
    layout = layout_of(
        config, gpu_shape(own, config.max_model_len or shape.context_length) if on_gpu else own
    )
    if on_gpu:
        _check_gpu_computes(source, layout)
    else:
        check_cpu_reads(layout)
    return DraftModel(source, layout.shape, layout)


def small_step_tokens(config: ServerConfig, max_tokens: int) -> int:
    """Returns the largest number of rows of a small model's step on a GPU, where the large model's is `max_tokens`."""
    return min(max_tokens, max(MOST_SMALL_ROWS, config.max_num_seqs))


def _check_gpu_computes(source: ModelSource, layout: KvLayout) -> None:
    """Raises ModelError or ConfigError if a GPU cannot draft with this small model."""
    shape = layout.shape
    kinds = {
        "recurrent layers or compressed attention": layout.state_bytes() > 0,
        "n-gram embeddings": shape.ngrams is not None,
    }
    if found := [kind for kind, has in kinds.items() if has]:
        raise ConfigError(
            f"--speculative-model: a small model with {found[0]} drafts on the CPU alone so far; name one that only "
            'attends, draft by look-up with --speculative-config {"method": "ngram", "num_speculative_tokens": 4}, or '
            "say --device cpu"
        )
    check_lanes(source, shape, "GPU")
    unloaded = unloaded_tensors(shape)
    check_cpu_types(source, unloaded)
    check_gpu_types(source, source.tensors.keys() - unloaded - id_tensors(shape))
    check_gpu_orders(source, is_shared=False)
    check_gpu_features(source, shape)


def _head_of(config: ServerConfig, source: ModelSource, model: ModelShape, *, on_gpu: bool) -> DraftModel:
    head = read_draft_head(source, model)
    if config.load_format == "dummy":
        raise ConfigError(
            "--load-format dummy: an EAGLE-3 head needs the weights of its model; leave one of them out"
        )
    if config.kv_disk:
        raise ConfigError(
            "--kv-disk: an EAGLE-3 head's keys are not kept on disk; leave it out, or draft in another way"
        )
    if config.kv_ram and on_gpu:
        raise ConfigError(
            "--kv-ram: an EAGLE-3 head's keys are not kept in RAM; leave it out, or draft in another way"
        )
    layout = layout_of(config, head.own)
    if on_gpu:
        _check_gpu_reads(source, head, model)
    else:
        check_cpu_reads(layout)
    return DraftModel(source, layout.shape, layout, head)


def _check_gpu_reads(source: ModelSource, head: DraftHeadShape, model: ModelShape) -> None:
    """Raises ModelError if the head has a type or a head size without GPU kernels, or ids that the model lacks."""
    check_gpu_types(source, list(draft_head_tensors(head, model)))
    check_lanes(source, head.own, "GPU", {"attention.key_length": head.attention.head_dim})
    if head.has_ids:
        read_ids(source, model)
