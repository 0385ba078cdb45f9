"""Loads a Runner for the CPU from a configuration: weights, KV pool, threads."""

from __future__ import annotations

import dataclasses
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from moeserve.config import ServerConfig, drafts_of, num_drafts
from moeserve.errors import ConfigError
from moeserve.grammar.engine import GrammarEngine
from moeserve.kv.cache import KvCache
from moeserve.kv.capacity import SHARE_OF_FREE_MEMORY, KvCapacity, KvMemoryBudget, plan_capacity
from moeserve.kv.layout import KvLayout, check_cpu_reads, layout_of
from moeserve.kv.slot_kinds import spare_bytes
from moeserve.kv.state_capacity import state_slots
from moeserve.kv.states import StateCache
from moeserve.models.adapters.adapter import Adapter
from moeserve.models.blocks.cpu.decoder import CpuDecoder
from moeserve.models.blocks.cpu.forms import RopeTables, angles_of
from moeserve.models.cpu_step_buffers import most_drafts
from moeserve.models.interface import ModelShape
from moeserve.models.latent import AttentionForm
from moeserve.models.loading.cpu_loader import CpuLoader
from moeserve.models.loading.cpu_weights import CpuWeights
from moeserve.models.loading.progress import OnProgress
from moeserve.models.next_token import drafting_shape
from moeserve.models.registry import read_checked_shape
from moeserve.models.sources.source import ModelSource
from moeserve.placement import ModelSizes, place
from moeserve.placement.engine_memory import draft_record_bytes
from moeserve.placement.expert_pins import Pinned
from moeserve.placement.expert_ram import READER_BYTES, dense_bytes, expert_bytes, slot_bytes
from moeserve.placement.options import placement_options
from moeserve.placement.step_tokens import step_tokens
from moeserve.processes.embedding_files import EmbeddingFiles
from moeserve.processes.free_memory import available_bytes, is_free_memory_short
from moeserve.tokenizer.text_tokenizer import TextTokenizer
from moeserve.worker.adapters.cpu import cpu_adapters, read_adapters
from moeserve.worker.adapters.memory import adapter_memory, later_bytes, open_adapters
from moeserve.worker.adapters.resident import AdapterAtStart, ResidentAdapters
from moeserve.worker.constraints.slot_guides import Constraints
from moeserve.worker.drafts.drafter import Reading
from moeserve.worker.drafts.next_token_drafter import DraftingBlock
from moeserve.worker.engines.cpu.engine import CpuEngine
from moeserve.worker.engines.cpu.sampler import CpuSampler
from moeserve.worker.engines.disk_reads import DiskReads
from moeserve.worker.engines.request_embeddings import RequestEmbeddings
from moeserve.worker.loading.cpu.draft_model import (
    LoadedDraftModel,
    build_draft_head,
    build_model_drafter,
    load_draft_model,
)
from moeserve.worker.loading.cpu.expert_ram import open_disk, plan_expert_slots
from moeserve.worker.loading.cpu.huge_pages import use_huge_pages
from moeserve.worker.loading.cpu.pool_start import check_ram, choose_products, open_stream
from moeserve.worker.loading.draft_model import open_draft_model
from moeserve.worker.loading.drafting import drafting_of, refuse_records_of_drafts
from moeserve.worker.loading.ready import log_skipped, ready_message
from moeserve.worker.loading.self_test import check_logits
from moeserve.worker.loading.setup import open_weights, set_up_torch
from moeserve.worker.recording.step_recorder import StepRecorder, open_recorder
from moeserve.worker.runner import Runner
from moeserve.worker.tiers.storage import PageTiersPlan, claim_directory, plan_tiers


@dataclass(frozen=True, slots=True)
class CpuModel:
    """The parts of a CPU server that stay constant while it serves; forked processes share them."""

    config: ServerConfig
    source: ModelSource
    shape: ModelShape
    weights: CpuWeights
    grammar: Future[GrammarEngine]  # finished; its error, if any, is raised at the first use of a grammar
    step_tokens: int
    capacity: KvCapacity
    recorder: StepRecorder | None
    state_slots: int  # of recurrent state
    tiers: PageTiersPlan | None
    adapters: list[Adapter]
    angles: dict[AttentionForm, RopeTables]
    pinned: Pinned | None  # experts that stay in RAM; None: all are there
    draft_model: LoadedDraftModel | None  # --speculative-model

    @property
    def layout(self) -> KvLayout:
        beside = None if self.draft_model is None else self.draft_model.model.layout
        return layout_of(self.config, self.shape, beside)

    @property
    def most_rows(self) -> int:
        """Largest number of rows of a step."""
        return max(self.step_tokens, self.config.max_num_seqs)


def load_cpu_runner(
    config: ServerConfig, on_progress: OnProgress, spans: EmbeddingFiles | None = None
) -> Runner:
    """Loads the CPU's runner. spans: see `build_cpu_runner`."""
    return build_cpu_runner(load_cpu_model(config, on_progress), spans)


def try_cpu_model(loaded: CpuModel, spans: EmbeddingFiles | None = None, *, is_first: bool) -> Runner:
    """Builds a runner, tests its logits, and returns it. Raises ModelError if the logits are not finite. Later workers
    skip the test, because answers wait for them and the first worker has tested the weights; only weights in a
    memory-mapped file are tested again. Only the first worker records steps."""
    runner = build_cpu_runner(loaded if is_first else dataclasses.replace(loaded, recorder=None), spans)
    if is_first or loaded.config.weight_layout == "file":
        check_logits(runner, Path(loaded.config.model))
    return runner


def load_cpu_model(config: ServerConfig, on_progress: OnProgress) -> CpuModel:
    """Reads the weights, builds the vocabulary and chooses the KV pool's size. Leaves no thread running."""
    _refuse_gpu_flags(config)
    refuse_records_of_drafts(config)
    set_up_torch()
    directory = claim_directory(config)
    stream = open_stream(config)
    source = open_weights(config)
    with ThreadPoolExecutor(1) as helper:  # builds the vocabulary while this thread loads the weights
        grammar = helper.submit(lambda: GrammarEngine(TextTokenizer.from_gguf(source)))
        drafts = drafts_of(config)
        shape = drafting_shape(
            read_checked_shape(source), source, None if drafts is None else drafts.block_method
        )
        small = open_draft_model(config, source, shape)
        log_skipped(shape, source, config)
        checked = open_adapters(config, shape)  # a bad adapter ends the start before the weights are read
        layout = layout_of(config, shape, None if small is None else small.layout)
        check_cpu_reads(layout)
        sizes = ModelSizes.of(source.tensors, layout)
        options = placement_options(config, shape)
        in_place = config.weight_layout == "file"
        if in_place and not source.is_mapped:
            raise ConfigError(
                "--weight-layout file needs a GGUF file and no --load-format dummy; leave it out, or say panels"
            )
        if in_place and config.expert_ram is not None:
            raise ConfigError("--expert-ram has no effect with --weight-layout file; leave one of them out")
        loaded_small = (
            None if small is None else load_draft_model(stream, small, on_progress, shape, in_place=in_place)
        )
        slots = None if in_place else plan_expert_slots(config, source, shape, layout)
        if slots is not None:  # rules have said which experts stay in RAM
            options = dataclasses.replace(options, rules=None)
        place(sizes, options, gpu=None)  # refuses the flags of GPUs
        slots_bytes = 0 if slots is None else slot_bytes(sizes, slots.counts)
        tokens = step_tokens(
            config.max_num_batched_tokens, shape, None, None if slots is None else slots_bytes
        )
        recorder = open_recorder(config, shape, max(tokens, config.max_num_seqs))
        if not in_place:
            expert_ram = expert_bytes(sizes) if slots is None else slots_bytes + READER_BYTES
            check_ram(
                dense_bytes(sizes) + expert_ram, remedy="or read it from disk with --weight-layout file"
            )
        counts = slots and slots.counts
        weights = CpuLoader(stream, source, shape, on_progress, in_place, counts, is_free_memory_short).load()
        use_huge_pages()
        of_adapters = adapter_memory(config, shape, checked, max(tokens, config.max_num_seqs))
        adapters = read_adapters(checked, of_adapters)
        free = available_bytes() - of_adapters.resident - of_adapters.later - slots_bytes
        free -= draft_record_bytes(config, shape, tokens)
        free -= spare_bytes(layout, config.max_num_seqs) + layout.step_key_bytes(
            max(tokens, config.max_num_seqs)
        )
        free -= 0 if small is None else small.state_bytes(config.max_num_seqs)
        states = state_slots(config, layout.state_bytes(), free)
        budget = KvMemoryBudget("memory", free - states.num_bytes, None, SHARE_OF_FREE_MEMORY)
        capacity = plan_capacity(config, layout, [budget], max(tokens, config.max_num_seqs))
        tiers = plan_tiers(config, directory, 0, source, layout, f"cpu {stream.isa} {config.weight_layout}")
        return CpuModel(
            config,
            source,
            shape,
            weights,
            grammar,
            tokens,
            capacity,
            recorder,
            states.num_slots,
            tiers,
            adapters,
            angles_of(shape, capacity.max_model_len, weights.rope_factors),
            slots and slots.pinned,
            loaded_small,
        )


def build_cpu_runner(loaded: CpuModel, spans: EmbeddingFiles | None = None) -> Runner:
    """Starts the pool's threads, allocates the KV pool and all step buffers, and returns the runner. spans: files of
    requests' embeddings; None: requests have none."""
    config, shape, capacity = loaded.config, loaded.shape, loaded.capacity
    layout, small = loaded.layout, loaded.draft_model
    stream = open_stream(config)
    products = choose_products(stream, config, loaded.source)
    has_drafts = num_drafts(config) > 0
    constraints = Constraints(config.max_num_seqs, loaded.grammar.result, drafts=has_drafts)
    windows = capacity.num_window_slots
    kv = KvCache(
        *(layout, capacity.num_slots, range(layout.num_layers)),
        num_window_slots=windows,
        kinds=capacity.kinds,
        num_states=loaded.state_slots,
        step_rows=loaded.most_rows,
    ).layers
    states = StateCache(layout, loaded.state_slots, range(shape.num_layers)).layers
    adapters = cpu_adapters(config, shape, loaded.adapters, loaded.most_rows)
    at_start = [AdapterAtStart(adapter.name, adapter.key, adapter.num_bytes) for adapter in loaded.adapters]
    resident = None
    if adapters is not None:
        resident = ResidentAdapters(adapters, at_start, later_bytes(config), config.lora_dir)
    disk = open_disk(loaded.weights, stream, shape, loaded.pinned)
    model = CpuDecoder(
        shape,
        loaded.weights,
        stream,
        kv,
        loaded.most_rows,
        capacity.max_model_len,
        states=states,
        most_drafts=most_drafts(loaded.step_tokens, config.max_num_seqs, num_drafts(config)),
        adapters=adapters,
        angles=loaded.angles,
        disk=disk,
        taps=() if small is None or not has_drafts else small.model.taps,
        repeats_steps=True,
    )
    sampler = CpuSampler(config.max_num_seqs, shape.vocab_size, stream.pool, stream.isa)
    embeddings = None if spans is None else RequestEmbeddings(spans, shape)
    engine = CpuEngine(stream, model, sampler, embeddings, products)
    pages = None if loaded.tiers is None else loaded.tiers.open(kv, states)
    reading, small_drafter = Reading(), None
    block: DraftingBlock | None = model.next_token
    if small is not None and has_drafts and small.model.head is not None:
        block = build_draft_head(
            *(small, stream, model, loaded.weights),
            most_rows=loaded.most_rows,
            max_model_len=capacity.max_model_len,
            num_kv_slots=capacity.num_slot_numbers,
        )
    elif small is not None and has_drafts:
        small_drafter = build_model_drafter(
            small,
            stream,
            vocab_size=shape.vocab_size,
            most_rows=loaded.most_rows,
            max_model_len=capacity.max_model_len,
            max_num_seqs=config.max_num_seqs,
            num_kv_slots=capacity.num_slot_numbers,
            reading=reading,
            foretell=sampler.foretell,
        )
    ready = ready_message(
        config,
        layout,
        capacity,
        loaded.weights.bytes + (0 if small is None else small.weights.bytes),
        engine.description,
        loaded.step_tokens,
        loaded.state_slots,
        pages,
        at_start,
        embedding_size=0 if spans is None else shape.embedding_size,
    )
    return Runner(
        engine,
        ready,
        constraints,
        loaded.recorder,
        pages,
        resident,
        drafting_of(
            config,
            engine,
            block,
            constraints,
            small_model=small_drafter,
            reading=reading,
            rotary=None if embeddings is None else embeddings.rotary,
        ),
        DiskReads.of(
            None if disk is None else disk.native,
            None if loaded.weights.ngrams is None else loaded.weights.ngrams.table,
            capacity.num_slot_numbers,
            loaded.state_slots,
        ),
    )


def _refuse_gpu_flags(config: ServerConfig) -> None:
    """Raises ConfigError for GPU flags without effect on the CPU, except placement flags, which `place` refuses."""
    if config.gpu_prefill_token_threshold is not None:
        flag = "--gpu-prefill-token-threshold"
    elif config.gpus != "1":
        flag = "--gpus"
    elif config.parallel != "auto":
        flag = "--parallel"
    elif config.kv_ram:
        raise ConfigError(
            "--kv-ram: has no effect on the CPU engine, whose KV pool is in RAM already; raise --max-total-tokens"
        )
    else:
        return
    raise ConfigError(f"{flag}: has no effect on the CPU engine; leave it out, or choose a GPU")
