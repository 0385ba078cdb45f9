"""Opens the small model that drafts (--speculative-model), for the worker and `moeserve plan`."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from moeserve.config import ServerConfig, drafts_of
from moeserve.kv.layout import KvLayout, check_cpu_reads, layout_of
from moeserve.models.draft_heads import refuse_draft_head
from moeserve.models.interface import ModelShape
from moeserve.models.open import open_dummy_model, open_metadata, open_model
from moeserve.models.registry import read_checked_shape
from moeserve.models.sources.source import ModelSource
from moeserve.placement import ModelSizes
from moeserve.placement.engine_memory import cpu_logits_bytes, cpu_workspace_bytes
from moeserve.placement.expert_ram import dense_bytes, expert_bytes
from moeserve.tokenizer.same_vocabulary import check_same_vocabulary


@dataclass(frozen=True, slots=True)
class DraftModel:
    """The small model, which has all its weights in RAM."""

    source: ModelSource
    shape: ModelShape
    layout: KvLayout

    @property
    def weight_bytes(self) -> int:
        sizes = ModelSizes.of(self.source.tensors, self.layout)
        return dense_bytes(sizes) + expert_bytes(sizes)

    def state_bytes(self, max_num_seqs: int) -> int:
        """Returns the bytes of its recurrent states: two for each request, one of them for drafts."""
        return 2 * max_num_seqs * self.layout.state_bytes()

    def buffer_bytes(self, rows: int, max_num_seqs: int) -> int:
        """Returns the bytes of its buffers for a step of `rows` rows, with the requests' states."""
        buffers = cpu_workspace_bytes(self.shape, rows) + cpu_logits_bytes(self.shape, max_num_seqs)
        return buffers + self.layout.step_key_bytes(rows) + self.state_bytes(max_num_seqs)


def open_draft_model(
    config: ServerConfig, model: ModelSource, *, has_tensors: bool = True
) -> DraftModel | None:
    """Opens the small model; None if there is none. model: the one that it drafts for. has_tensors: its weights will be
    read. Raises ModelError, also for another vocabulary, and ConfigError."""
    drafts = drafts_of(config)
    if drafts is None or drafts.model is None:
        return None
    path = Path(drafts.model)
    if not has_tensors:
        source = open_metadata(path)
    else:
        source = open_dummy_model(path) if config.load_format == "dummy" else open_model(path)
    refuse_draft_head(path, source.architecture)  # these files lack a vocabulary
    check_same_vocabulary(model, source)
    layout = layout_of(config, read_checked_shape(source))
    check_cpu_reads(layout)
    return DraftModel(source, layout.shape, layout)
