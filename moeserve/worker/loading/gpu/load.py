"""Loads a Runner for a GPU from a configuration: memory plan, weights, KV pool, CUDA graphs."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import msgspec
import torch

from moeserve.config import ServerConfig, num_drafts
from moeserve.grammar.engine import GrammarEngine
from moeserve.kernels.handoff import ExpertHandoff
from moeserve.kernels.stream_operands import KvLayer, StateLayer
from moeserve.kv.cache import KvCache
from moeserve.kv.capacity import KvCapacity, plan_capacity
from moeserve.kv.layout import KvLayout
from moeserve.kv.states import StateCache
from moeserve.messages.steps import WorkerReady
from moeserve.models.blocks.gpu.decoder import GpuDecoder
from moeserve.models.blocks.gpu.draft_head import PlacedDraftHead
from moeserve.models.blocks.gpu.lora import GpuAdapterMatrices
from moeserve.models.interface import ModelShape
from moeserve.models.loading.progress import OnProgress
from moeserve.models.loading.ram_experts import RamExperts
from moeserve.models.ranks.rank_share import RankShare
from moeserve.models.sources.source import ModelSource
from moeserve.models.step_buffers import gpu_state_drafts, step_sizes
from moeserve.processes.embedding_files import EmbeddingFiles
from moeserve.processes.free_memory import available_bytes
from moeserve.tokenizer.text_tokenizer import TextTokenizer
from moeserve.worker.adapters.resident import ResidentAdapters
from moeserve.worker.constraints.slot_guides import Constraints
from moeserve.worker.drafts.drafter import Drafter, LateDrafts, Reading
from moeserve.worker.drafts.gpu_next_token_drafter import GpuNextTokenDrafter
from moeserve.worker.drafts.model_drafter import ModelDrafter
from moeserve.worker.engines.disk_reads import DiskReads
from moeserve.worker.engines.gpu.cpu_stage import CpuStage
from moeserve.worker.engines.gpu.engine import GpuEngine
from moeserve.worker.engines.gpu.measure.stored import stored_measurements
from moeserve.worker.engines.gpu.steps.slot_tables import SlotTables
from moeserve.worker.engines.request_embeddings import RequestEmbeddings
from moeserve.worker.engines.rotary_positions import RotaryPositions
from moeserve.worker.group.ranks import RankGroup
from moeserve.worker.loading.drafting import drafting_of, least_probability
from moeserve.worker.loading.gpu.cpu_layers import kv_budgets, make_cpu_stage
from moeserve.worker.loading.gpu.device_description import describe_device
from moeserve.worker.loading.gpu.load_plan import GpuLoadPlan, plan_load
from moeserve.worker.loading.gpu.load_weights import LoadedWeights, load_weights
from moeserve.worker.loading.gpu.moving_experts import MovingExperts
from moeserve.worker.loading.gpu.small_model import build_small_drafter
from moeserve.worker.loading.gpu.start_steps import start_steps
from moeserve.worker.loading.ready import ready_message
from moeserve.worker.loading.start import Start
from moeserve.worker.recording.step_recorder import StepRecorder
from moeserve.worker.runner import Runner
from moeserve.worker.sequences import Sequences
from moeserve.worker.tiers.page_mover import PageMover
from moeserve.worker.tiers.storage import plan_tiers, ram_tier_bytes

log = logging.getLogger(__name__)

HANG_SECONDS = 180.0  # a step without progress for this long has failed; the first steps compile kernels
PIN_AFTER_S = 2.0  # delay of pinning memory if answers wait, so that their prompts are computed first


@dataclass(frozen=True, slots=True)
class LoadedGpuEngine:
    engine: GpuEngine
    ready: WorkerReady
    recorder: StepRecorder | None
    pages: PageMover | None
    adapters: ResidentAdapters[GpuAdapterMatrices] | None
    share: RankShare | None = None  # None: this GPU has the whole model
    most_drafts: int | None = None  # of a step; None: as many as the router grants
    disk: DiskReads | None = None  # None: all weights are in memory
    rotary: RotaryPositions | None = None  # RoPE positions of pictures; None: each token has its number
    small_drafter: partial[ModelDrafter] | None = None  # of --speculative-model; None: no small model drafts


def load_gpu_runner(
    config: ServerConfig,
    source: ModelSource,
    on_progress: OnProgress,
    device: torch.device,
    start: Start,
    forced_rows: int = 0,
    spans: EmbeddingFiles | None = None,
) -> Runner:
    """Loads the model on a GPU, allocates everything that a step needs, and returns the runner. forced_rows: see
    `GpuDecoder`. spans: where requests' embeddings lie; None: they have none. Raises ModelError for a bad file,
    ConfigError if the GPU's memory does not suffice."""
    constraints = gpu_constraints(config, source, start.inherited.grammar)
    loaded = load_gpu_engine(config, source, on_progress, device, start, forced_rows, spans=spans)
    late, reading = LateDrafts(), Reading()
    return Runner(
        loaded.engine,
        loaded.ready,
        constraints,
        loaded.recorder,
        loaded.pages,
        loaded.adapters,
        drafting_of(
            *(config, loaded.engine, None, constraints),
            small_model=_model_drafter(loaded, least_probability(config), late, reading),
            reading=reading,
            most=loaded.most_drafts,
            late=late,
            keeping=None if loaded.engine.block_steps is None else loaded.engine.block_steps.keeping,
        ),
        loaded.disk,
    )


def _model_drafter(
    loaded: LoadedGpuEngine, least: float, late: LateDrafts, reading: Reading
) -> Callable[[Sequences], Drafter] | None:
    """Returns the maker of the drafter of the small model, the model's own block or its head; None if there is none.
    least: the probability that a draft needs. late, reading: where the drafter notes drafts that a step need not wait
    for, and what the small model reads."""
    if loaded.small_drafter is not None:
        return partial(loaded.small_drafter, reading=reading, least_probability=least)
    chain, steps = loaded.engine.next_token_chain, loaded.engine.block_steps
    if chain is None or steps is None:
        return None
    # If the host must know a step's tokens, it waits for the drafts.
    late_drafts = late if loaded.engine.runs_ahead else None
    # A head rotates by the tokens' numbers.
    rotary = loaded.rotary if chain.has_sections else None
    return lambda sequences: GpuNextTokenDrafter(
        *(sequences, chain, least, late_drafts, rotary, steps.keeping)
    )


def gpu_constraints(
    config: ServerConfig, source: ModelSource, engine: GrammarEngine | None = None
) -> Constraints:
    """Returns the constraints. Without `engine`, a helper thread builds the vocabulary while the caller loads the
    weights."""
    return Constraints(
        config.max_num_seqs,
        lambda: engine or GrammarEngine(TextTokenizer.from_gguf(source)),
        drafts=num_drafts(config) > 0,
    )


def load_gpu_engine(
    config: ServerConfig,
    source: ModelSource,
    on_progress: OnProgress,
    device: torch.device,
    start: Start,
    forced_rows: int = 0,
    ranks: RankGroup | None = None,
    spans: EmbeddingFiles | None = None,
) -> LoadedGpuEngine:
    """Loads and returns a GPU engine without a runner. Raises as `load_gpu_runner` does. ranks: the group that shares
    the model, with `device` this process's GPU; None: this GPU has the whole model. spans: see `load_gpu_runner`."""
    plan = plan_load(config, source, device, ranks)
    start.clock.ended("plan")
    weights = load_weights(config, plan, on_progress, device, ranks)
    start.clock.ended("weights")
    buffers = _make_buffers(config, plan, weights, device, ranks)
    embeddings = None if spans is None else RequestEmbeddings(spans, plan.shape)
    engine = _make_engine(config, plan, weights, buffers, device, forced_rows, ranks, embeddings)
    stored = None
    if device.type == "cuda" and ranks is None:
        stored = stored_measurements(
            config, plan.source, plan.shape, buffers.capacity, plan.max_tokens, engine.description, device
        )
    start.clock.ended("buffers")
    capacity = buffers.capacity
    measured = start_steps(
        engine,
        config,
        capacity.max_model_len,
        start,
        on_progress,
        ranks,
        stored,
        before_timing=lambda: buffers.tables.spread_dummy_slot(
            capacity.num_whole_slots, capacity.num_window_slots
        ),
        is_gpu=device.type == "cuda",
    )
    kv_bytes = capacity.kv_bytes(plan.layout)
    if ranks is not None:
        kv_bytes = ranks.total(kv_bytes)
    pages = None
    if ranks is None and not plan.placement.layers_in_ram:
        pages = _open_tiers(config, plan, buffers, kv_bytes, device, 0.0 if start.is_first else PIN_AFTER_S)
    ready = msgspec.structs.replace(
        _ready(config, plan, weights, buffers, engine, kv_bytes, pages, takes_embeddings=spans is not None),
        measured_steps=list(measured),
        start_seconds=start.clock.seconds,  # those of the first step are added later
    )
    resident = None if weights.adapters is None else weights.adapters.resident
    most = gpu_state_drafts(plan.shape, config.max_num_seqs, num_drafts(config)) or None
    in_ram = weights.in_ram
    native = None if in_ram is None or in_ram.experts is None else in_ram.experts.disk
    disk = DiskReads.of(native, weights.table, capacity.num_slot_numbers, buffers.state_slots)
    small_drafter = None
    if plan.draft_model is not None and weights.draft_model is not None:
        small_drafter = build_small_drafter(
            *(config, plan.draft_model, weights.draft_model, buffers.tables.slots, on_progress, start),
            target=engine,
            vocab_size=plan.shape.vocab_size,
            max_tokens=plan.max_tokens,
            num_kv_slots=capacity.num_slot_numbers,
        )
    return LoadedGpuEngine(
        *(engine, ready, plan.recorder, pages, resident, plan.share, most, disk),
        None if embeddings is None else embeddings.rotary,
        small_drafter,
    )


@dataclass(frozen=True, slots=True)
class _Buffers:
    """The memory of requests: KV, recurrent states, and the tables that index them."""

    capacity: KvCapacity
    tables: SlotTables
    kv: Sequence[KvLayer]
    states: Sequence[StateLayer]
    draft_head: PlacedDraftHead | None
    state_slots: int
    cpu_stage: CpuStage | None


def _make_buffers(
    config: ServerConfig,
    plan: GpuLoadPlan,
    weights: LoadedWeights,
    device: torch.device,
    ranks: RankGroup | None,
) -> _Buffers:
    placement, layout = plan.placement, plan.layout
    budgets = kv_budgets(config, placement, layout, step_sizes(plan.max_tokens)[-1])
    capacity = plan_capacity(config, layout, budgets, plan.max_tokens)
    state_slots = placement.state_slots
    if ranks is not None:
        capacity = KvCapacity(ranks.least(capacity.num_slots), ranks.least(capacity.max_model_len))
        state_slots = ranks.least(state_slots)
    drafts = gpu_state_drafts(plan.shape, config.max_num_seqs, num_drafts(config))
    cpu_stage = make_cpu_stage(weights.in_ram, layout, placement, capacity, plan.max_tokens, device, drafts)
    windows = capacity.num_window_slots
    tables = SlotTables.empty(
        config.max_num_seqs + 1, capacity.max_model_len, device, has_windows=windows > 0
    )
    on_gpu = range(placement.layers_in_ram, plan.shape.num_layers)
    with_kv = range(placement.layers_in_ram, len(plan.shape.loaded_layers))
    kv = KvCache(
        *(layout, capacity.num_slots, with_kv, device),
        zeroed=True,
        num_window_slots=windows,
        kinds=capacity.kinds,
        num_states=state_slots,
        step_rows=step_sizes(plan.max_tokens)[-1],
    ).layers
    states = StateCache(layout, state_slots, on_gpu, device, zeroed=True).layers
    head = _draft_head(plan, weights, capacity, device)
    return _Buffers(capacity, tables, kv, states, head, state_slots, cpu_stage)


def _draft_head(
    plan: GpuLoadPlan, weights: LoadedWeights, capacity: KvCapacity, device: torch.device
) -> PlacedDraftHead | None:
    """Returns the EAGLE-3 head with its KV; None without one."""
    small = plan.draft_model
    if small is None or small.head is None or weights.draft_head is None:
        return None
    kv = KvCache(small.layout, capacity.num_slot_numbers, range(1), device, zeroed=True).layers[0]
    return PlacedDraftHead(small.head, weights.draft_head, kv, capacity.max_model_len)


def _make_engine(
    config: ServerConfig,
    plan: GpuLoadPlan,
    weights: LoadedWeights,
    buffers: _Buffers,
    device: torch.device,
    forced_rows: int,
    ranks: RankGroup | None,
    embeddings: RequestEmbeddings | None,
) -> GpuEngine:
    placement, share, connections = plan.placement, plan.share, plan.connections
    experts = None if weights.in_ram is None else weights.in_ram.experts
    moving = MovingExperts.of(weights.on_gpu, experts, placement, plan.shape, device)
    by_rank = share is not None and not share.is_stage
    model = GpuDecoder(
        plan.shape,
        weights.on_gpu,
        buffers.kv,
        buffers.tables.slots,
        max_tokens=plan.max_tokens,
        max_model_len=buffers.capacity.max_model_len,
        handoff=None if experts is None else _handoff(experts, plan.shape, plan.max_tokens, device),
        expert_stream=moving.stream,
        prefill=[layer.prefill for layer in placement.gpu_layers],
        from_cpu=None if buffers.cpu_stage is None else buffers.cpu_stage.x,
        states=buffers.states,
        forced_rows=forced_rows,
        sums=connections.sums,
        adapters=None if weights.adapters is None else weights.adapters.slots,
        window_table=buffers.tables.windows,
        stage=connections.stage,
        num_in_ram=[len(ids) for ids in weights.ram_ids] if by_rank else None,
        slots_ahead=buffers.tables.ahead,
        max_drafts=num_drafts(config),
        draft_head=buffers.draft_head,
        max_state_drafts=gpu_state_drafts(plan.shape, config.max_num_seqs, num_drafts(config)),
    )
    return GpuEngine(
        model,
        buffers.tables,
        config.max_num_seqs,
        describe_device(placement, device, weights.in_ram, 1 if ranks is None else ranks.num_ranks),
        experts,
        buffers.cpu_stage,
        moving.cache(weights.on_gpu, placement, model, has_drafts=num_drafts(config) > 0),
        bool if ranks is None else ranks.all_say,
        connections.from_first,
        num_drafts(config),
        embeddings,
    )


def _ready(
    config: ServerConfig,
    plan: GpuLoadPlan,
    weights: LoadedWeights,
    buffers: _Buffers,
    engine: GpuEngine,
    kv_bytes: int,
    pages: PageMover | None,
    *,
    takes_embeddings: bool,
) -> WorkerReady:
    """Returns the ready message without measurements."""
    message = ready_message(
        config,
        plan.layout,
        buffers.capacity,
        weights.nbytes,
        engine.description,
        plan.step_tokens,
        buffers.state_slots,
        pages,
        () if weights.adapters is None else weights.adapters.at_start,
        plan.shape.embedding_size if takes_embeddings else 0,
    )
    return msgspec.structs.replace(
        message,
        kv_bytes=kv_bytes,
        num_experts=plan.whole.num_experts,
        experts_per_token=plan.whole.top_k,
        state_bytes=KvLayout(plan.whole).state_bytes(),
        prompts_first=weights.in_ram is None,
        streams_prompts=engine.can_stream,
    )


def _open_tiers(
    config: ServerConfig,
    plan: GpuLoadPlan,
    buffers: _Buffers,
    pool_bytes: int,
    device: torch.device,
    pin_after: float,
) -> PageMover | None:
    """Opens the tiers behind the KV pool; None if there are none. Under Triton's interpreter there is no tier in RAM by
    default."""
    # Refused by `plan_load`; a tier does not keep the keys of a head that drafts.
    if buffers.capacity.kinds or buffers.draft_head is not None:
        return None
    in_ram, has_window_pool = 0, buffers.capacity.num_window_slots > 0
    if config.kv_ram is not None or device.type == "cuda":
        in_ram = ram_tier_bytes(config, pool_bytes, available_bytes(), has_window_pool=has_window_pool)
    tiers = plan_tiers(config, plan.directory, in_ram, plan.source, plan.layout, "gpu")
    return None if tiers is None else tiers.open(buffers.kv, buffers.states, device, pin_after_s=pin_after)


def _handoff(experts: RamExperts, shape: ModelShape, max_tokens: int, device: torch.device) -> ExpertHandoff:
    return ExpertHandoff(
        experts.stream,
        experts.layers,
        step_sizes(max_tokens)[-1],
        shape.experts_input_width,
        shape.top_k,
        device,
        timeout_s=HANG_SECONDS,
        disk=experts.disk,
    )
