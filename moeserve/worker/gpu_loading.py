"""From a configuration to a Runner on a GPU: memory planned, weights, KV pool, recorded decode steps."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass

import msgspec
import torch

from moeserve.config import ServerConfig
from moeserve.errors import ConfigError
from moeserve.grammar.engine import GrammarEngine
from moeserve.kernels.cpu_stream import CpuStream
from moeserve.kernels.handoff import ExpertHandoff
from moeserve.kernels.stream_operands import KvLayer, StateLayer
from moeserve.kv.cache import KvCache
from moeserve.kv.capacity import SHARE_OF_FREE_MEMORY, KvCapacity, KvMemoryBudget, plan_capacity
from moeserve.kv.disk.directory import DiskDirectory
from moeserve.kv.layout import KvLayout, check_cpu_reads, layout_of
from moeserve.kv.states import StateCache
from moeserve.messages.steps import WorkerReady
from moeserve.models.blocks.cpu.decoder import CpuDecoder
from moeserve.models.blocks.gpu.decoder import GpuDecoder
from moeserve.models.blocks.gpu.lora import GpuAdapterMatrices
from moeserve.models.interface import ModelShape
from moeserve.models.loading.cpu_loader import CpuLoader
from moeserve.models.loading.cpu_weights import CpuWeights
from moeserve.models.loading.gpu_loader import GpuLoader
from moeserve.models.loading.gpu_weights import float_type
from moeserve.models.loading.lanes import check_lanes
from moeserve.models.loading.progress import OnProgress
from moeserve.models.loading.ram_experts import RamExperts, load_ram_experts
from moeserve.models.rank_share import RankShare
from moeserve.models.registry import read_checked_shape
from moeserve.models.sources.rank_source import RankSource
from moeserve.models.sources.source import ModelSource
from moeserve.models.step_buffers import step_sizes
from moeserve.placement import Placement
from moeserve.placement.group import share_among
from moeserve.placement.options import heat_counts
from moeserve.tokenizer.text_tokenizer import TextTokenizer
from moeserve.worker.adapter_memory import plan_gpu_adapters, refuse_adapters
from moeserve.worker.constraints import Constraints
from moeserve.worker.cpu_stream import check_ram, open_stream
from moeserve.worker.engines.cpu_stage import CpuStage
from moeserve.worker.engines.gpu import GpuEngine
from moeserve.worker.engines.slot_tables import SlotTables
from moeserve.worker.gpu_adapters import load_gpu_adapters
from moeserve.worker.gpu_memory import check_kv_numbers, plan_placement, step_tokens_on
from moeserve.worker.gpu_start import start_steps
from moeserve.worker.group.rank_stream import open_rank_stream
from moeserve.worker.group.ranks import RankGroup
from moeserve.worker.group.shares import Connections, gpu_experts
from moeserve.worker.group.shares import connect as connect_share
from moeserve.worker.measure.kept import kept_measurements
from moeserve.worker.memory import available_bytes
from moeserve.worker.moving_experts import MovingExperts
from moeserve.worker.page_mover import PageMover
from moeserve.worker.page_tiers import claim_directory, plan_tiers, ram_tier_bytes, refuse_tiers
from moeserve.worker.ram_expert_order import ram_expert_order
from moeserve.worker.ready import log_skipped, ready_message
from moeserve.worker.resident_adapters import ResidentAdapters
from moeserve.worker.runner import Runner
from moeserve.worker.start import Start
from moeserve.worker.step_recorder import StepRecorder, open_recorder

log = logging.getLogger(__name__)

HANG_SECONDS = (
    180.0  # a step that stands still for so long has failed; the first ones compile kernels on the way
)
PIN_AFTER_S = 2.0  # where answers wait: their prompts are computed first


@dataclass(frozen=True, slots=True)
class LoadedGpuEngine:
    engine: GpuEngine
    ready: WorkerReady
    recorder: StepRecorder | None
    pages: PageMover | None
    adapters: ResidentAdapters[GpuAdapterMatrices] | None
    share: RankShare | None = None  # of several GPUs: None: all of the model is here


def load_gpu_runner(
    config: ServerConfig,
    source: ModelSource,
    on_progress: OnProgress,
    device: torch.device,
    start: Start,
    forced_rows: int = 0,
) -> Runner:
    """Loads the model and allocates everything a step needs. forced_rows: see `GpuDecoder`. Raises ModelError for a bad
    file, ConfigError where the GPU's memory does not suffice."""
    constraints = gpu_constraints(config, source, start.inherited.grammar)
    loaded = load_gpu_engine(config, source, on_progress, device, start, forced_rows)
    return Runner(loaded.engine, loaded.ready, constraints, loaded.recorder, loaded.pages, loaded.adapters)


def gpu_constraints(
    config: ServerConfig, source: ModelSource, engine: GrammarEngine | None = None
) -> Constraints:
    """Without an engine, its helper thread builds the vocabulary while the caller loads the weights."""
    return Constraints(config.max_num_seqs, lambda: engine or GrammarEngine(TextTokenizer.from_gguf(source)))


def load_gpu_engine(
    config: ServerConfig,
    source: ModelSource,
    on_progress: OnProgress,
    device: torch.device,
    start: Start,
    forced_rows: int = 0,
    ranks: RankGroup | None = None,
) -> LoadedGpuEngine:
    """The same without a runner. ranks: the GPUs among which the model is divided, of which `device` is this process's;
    None: it has all of it."""
    if config.weight_layout == "file":
        raise ConfigError("--weight-layout file is for the CPU alone; leave it out, or choose --device cpu")
    if ranks is not None:
        refuse_tiers(config, "with several GPUs")
        refuse_adapters(config)
    directory = claim_directory(config)
    shape = read_checked_shape(source)
    # One that does not fit the model ends the start now.
    of_adapters = plan_gpu_adapters(config, shape, 2 if device.type == "cuda" else 4)
    log_skipped(shape, source)
    check_lanes(source, shape, "GPU")
    whole, share, counts = shape, None, heat_counts(config, shape)
    if ranks is not None:
        share = share_among(config, shape, source.tensors, ranks.rank, ranks.num_ranks, counts)
        source, shape = RankSource(source, share), share.shape
        ranks.barrier()
    layout = layout_of(config, shape)
    check_kv_numbers(layout, device)
    in_a_step = step_tokens_on(device, config, shape)
    if ranks is not None:
        in_a_step = ranks.least(in_a_step)
    max_tokens = max(in_a_step, config.max_num_seqs)
    recorder = open_recorder(config, shape, max_tokens)
    connections = Connections()
    if ranks is not None and share is not None:
        connections = connect_share(share, ranks, max_tokens, is_observed=recorder is not None)
    placement = plan_placement(config, layout, source, max_tokens, device, share, of_adapters, counts)
    if placement.layers_in_ram:
        check_cpu_reads(layout)
        refuse_tiers(config, "where the first layers are the CPU's")
    start.clock.ended("plan")
    has_ends = connections.stage is None or connections.stage.is_first
    weights = GpuLoader(source, shape, device, on_progress).load(
        gpu_experts(placement, share),
        placement.layers_in_ram,
        with_embedding=has_ends and not placement.begins_in_ram,
        with_head=has_ends,
    )
    ram_bytes = placement.cpu_weight_bytes if ranks is None else ranks.total(placement.cpu_weight_bytes)
    ram_ids = ram_expert_order(config, placement, share, counts)
    in_ram = _in_ram(config, shape, source, placement, device, on_progress, ram_ids, ram_bytes, ranks)
    adapters = load_gpu_adapters(config, of_adapters, shape, placement, float_type(weights, device), device)
    _empty_cache(device)
    start.clock.ended("weights")
    capacity = plan_capacity(config, layout, _kv_budgets(placement, layout), max_tokens)
    if ranks is not None:
        capacity = KvCapacity(ranks.least(capacity.num_slots), ranks.least(capacity.max_model_len))
    cpu_stage = _cpu_stage(in_ram, layout, placement, capacity, max_tokens, device)
    windows = capacity.num_window_slots
    tables = SlotTables.empty(
        config.max_num_seqs + 1, capacity.max_model_len, device, has_windows=windows > 0
    )
    experts = None if in_ram is None else in_ram.experts
    moving = MovingExperts.of(weights, experts, placement, shape, device)
    on_gpu = range(placement.layers_in_ram, shape.num_layers)
    state_slots = placement.state_slots if ranks is None else ranks.least(placement.state_slots)
    kv = KvCache(layout, capacity.num_slots, on_gpu, device, zeroed=True, num_window_slots=windows).layers
    states = StateCache(layout, state_slots, on_gpu, device, zeroed=True).layers
    model = GpuDecoder(
        shape,
        weights,
        kv,
        tables.slots,
        max_tokens=max_tokens,
        max_model_len=capacity.max_model_len,
        handoff=None if experts is None else _handoff(config, experts, shape, max_tokens, device),
        expert_stream=moving.stream,
        prefill=[layer.prefill for layer in placement.gpu_layers],
        from_cpu=None if cpu_stage is None else cpu_stage.x,
        states=states,
        forced_rows=forced_rows,
        sums=connections.sums,
        adapters=None if adapters is None else adapters.slots,
        window_table=tables.windows,
        stage=connections.stage,
        num_in_ram=None if share is None or share.is_stage else [len(ids) for ids in ram_ids],
    )
    name = _device(placement, device, in_ram, 1 if ranks is None else ranks.num_ranks)
    cache = moving.cache(weights, placement, model)
    agree = bool if ranks is None else ranks.all_say
    engine = GpuEngine(
        model, tables, config.max_num_seqs, name, experts, cpu_stage, cache, agree, connections.from_first
    )
    is_gpu = device.type == "cuda"
    kept = None
    if is_gpu and ranks is None:
        kept = kept_measurements(config, source, shape, capacity, max_tokens, name, device)
    start.clock.ended("buffers")
    measured = start_steps(
        engine,
        config,
        capacity.max_model_len,
        start,
        on_progress,
        ranks,
        kept,
        before_timing=lambda: tables.spread_nobody(capacity.num_slots, windows),
        is_gpu=is_gpu,
    )
    weight_bytes = placement.gpu_weight_bytes + placement.cpu_weight_bytes
    kv_bytes = capacity.kv_bytes(layout)
    if ranks is not None:
        weight_bytes, kv_bytes = ranks.total(weight_bytes), ranks.total(kv_bytes)
    pages = None
    if ranks is None and not placement.layers_in_ram:
        pin_after = 0.0 if start.is_first else PIN_AFTER_S
        pages = _open_tiers(
            config, directory, source, layout, kv_bytes, windows > 0, device, kv, states, pin_after
        )
    ready = msgspec.structs.replace(
        ready_message(
            config,
            layout,
            capacity,
            weight_bytes,
            engine.description,
            in_a_step,
            state_slots,
            pages,
            () if adapters is None else adapters.at_start,
        ),
        kv_bytes=kv_bytes,
        num_experts=whole.num_experts,
        experts_per_token=whole.top_k,
        state_bytes=KvLayout(whole).state_bytes(),
        prompts_first=in_ram is None,
        streams_prompts=model.can_stream,
        measured_steps=list(measured),
        start_seconds=start.clock.seconds,  # to which those of the first step come
    )
    resident = None if adapters is None else adapters.resident
    return LoadedGpuEngine(engine, ready, recorder, pages, resident, share)


def _open_tiers(
    config: ServerConfig,
    directory: DiskDirectory | None,
    source: ModelSource,
    layout: KvLayout,
    pool_bytes: int,
    has_window_pool: bool,
    device: torch.device,
    kv: Sequence[KvLayer],
    states: Sequence[StateLayer],
    pin_after: float,
) -> PageMover | None:
    """Those behind the KV pool. Under Triton's interpreter there is none in RAM by itself."""
    in_ram = 0
    if config.kv_ram is not None or device.type == "cuda":
        in_ram = ram_tier_bytes(config, pool_bytes, available_bytes(), has_window_pool=has_window_pool)
    tiers = plan_tiers(config, directory, in_ram, source, layout, "gpu")
    return None if tiers is None else tiers.open(kv, states, device, pin_after_s=pin_after)


@dataclass(frozen=True, slots=True)
class InRam:
    """What the GPU has no room for, on the pool's stream."""

    stream: CpuStream
    cpu_stage: CpuWeights | None  # None: the GPU begins with the embedding
    experts: RamExperts | None  # of the GPU's layers; None: all are there


def _in_ram(
    config: ServerConfig,
    shape: ModelShape,
    source: ModelSource,
    placement: Placement,
    device: torch.device,
    on_progress: OnProgress,
    ids: Sequence[Sequence[int]],
    ram_bytes: int,
    ranks: RankGroup | None,
) -> InRam | None:
    """ids: of the experts in RAM, by layer on the GPU. ram_bytes: of all ranks' parts together."""
    if not placement.begins_in_ram and not placement.shares_layers:
        return None
    check_ram(ram_bytes)
    stream = open_stream(config) if ranks is None else open_rank_stream(config, ranks)
    count = placement.layers_in_ram
    first = None
    if placement.begins_in_ram:
        first = CpuLoader(stream, source, shape, on_progress).load_first(count)
    experts = None
    if placement.shares_layers:
        experts = load_ram_experts(stream, source, shape, ids, device, on_progress, first_layer=count)
    return InRam(stream, first, experts)


def _kv_budgets(placement: Placement, layout: KvLayout) -> list[KvMemoryBudget]:
    """A token's KV lies where its layers are."""
    assert placement.kv_bytes is not None
    in_ram, count = placement.layers_in_ram, len(placement.layers)
    on_gpu = range(in_ram, count)
    budgets = [KvMemoryBudget("GPU memory", placement.kv_bytes, on_gpu)]
    if in_ram:
        free = available_bytes() - placement.state_slots * layout.state_bytes(range(in_ram))
        budgets.append(KvMemoryBudget("memory", free, range(in_ram), SHARE_OF_FREE_MEMORY))
    return budgets


def _cpu_stage(
    in_ram: InRam | None,
    layout: KvLayout,
    placement: Placement,
    capacity: KvCapacity,
    max_tokens: int,
    device: torch.device,
) -> CpuStage | None:
    if in_ram is None or in_ram.cpu_stage is None:
        return None
    model = CpuDecoder(
        layout.shape,
        in_ram.cpu_stage,
        in_ram.stream,
        KvCache(layout, capacity.num_slots, range(placement.layers_in_ram)).layers,
        step_sizes(max_tokens)[-1],
        capacity.max_model_len,
        states=StateCache(layout, placement.state_slots, range(placement.layers_in_ram)).layers,
        pinned=device.type == "cuda",
    )
    return CpuStage(in_ram.stream, model)


def _handoff(
    config: ServerConfig, experts: RamExperts, shape: ModelShape, max_tokens: int, device: torch.device
) -> ExpertHandoff:
    deferred = config.max_deferred_experts_per_token
    if deferred and shape.is_sandwiched:
        raise ConfigError(
            f"--max-deferred-experts-per-token: {shape.architecture} normalises the sum of a layer's experts, which "
            "none may come late to; leave it out"
        )
    if deferred > shape.top_k:
        raise ConfigError(
            f"--max-deferred-experts-per-token: {deferred}, but a token has {shape.top_k} experts"
        )
    return ExpertHandoff(
        experts.stream,
        experts.layers,
        step_sizes(max_tokens)[-1],
        shape.hidden_size,
        shape.top_k,
        device,
        max_deferred=deferred,
        timeout_s=HANG_SECONDS,
    )


def _empty_cache(device: torch.device) -> None:
    """What unpacking left behind goes back to the device, whose free memory is then asked for."""
    if device.type == "cuda":
        torch.cuda.empty_cache()


def _device(placement: Placement, device: torch.device, in_ram: InRam | None, num_gpus: int) -> str:
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else "Triton's interpreter"
    if num_gpus > 1:
        name = f"{num_gpus} x {name}"
    if in_ram is None:
        return f"{device.type} ({name})"
    layers = len(placement.layers)
    here = f"{placement.num_gpu_experts} of {sum(of.num_experts for of in placement.layers)} experts"
    if placement.layers_in_ram:
        here = f"the last {len(placement.gpu_layers)} of {layers} layers and {here}"
    elif placement.begins_in_ram:
        here = f"all but the embedding and {here}"
    stream = in_ram.stream
    return f"{device.type} ({name} with {here}, the others in RAM: {stream.isa}, {stream.threads} threads)"
