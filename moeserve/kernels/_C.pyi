"""The C++ extension (moeserve/kernels/csrc). cpu_stream.py has the shapes; where an int stands for memory, it is an
address (Tensor.data_ptr()) that nothing checks."""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
from torch import Tensor

from moeserve.kernels.stream_operands import DiskLayer, ExpertAdapters, KvLayer

PANEL_ROWS: int
MADV_COLLAPSE: int
FEW_TOKENS: int  # each number of tokens up to this one has a form of product chosen for it
SOME_TOKENS: int  # the numbers from there up to this one share a form

def quantized_row_bytes(cols: int) -> int: ...
def dequantize_row(type: int, row: int, cols: int, out: int) -> None: ...

class QuantType:
    """A row of csrc/formats/quant_types.h; the fields of `moeserve.quantization.QuantType` and its layout."""

    name: str
    number: int
    block_columns: int
    block_bytes: int
    is_quantised: bool
    low: tuple[int, int, int]  # at, width, bits; bits 0: there is none
    high: tuple[int, int, int]
    group: int
    stored_scales: int
    halves_at: int
    octets_at: int
    octets: int
    offset: int
    levels: list[int]
    e4m3: bool
    trits: list[tuple[int, int, int]]  # at, width and digits of a byte of each run
    # entries, columns, most, high_bits, signs, scales, eighths; then at, group and step of low, word and high
    book: tuple[tuple[int, ...], tuple[int, int, int], tuple[int, int, int], tuple[int, int, int]]

def quant_types() -> list[QuantType]: ...
def set_codebook(type: int, entries: npt.NDArray[np.int8]) -> None:
    """entries: [entries * columns]. ValueError for a type without a codebook, or for other entries. Before that,
    the type is not supported."""

class Matrix:
    type: int
    rows: int
    cols: int
    experts: int
    bytes: int
    nodes: int  # NUMA nodes among which the panels are divided
    integer: bool
    ordered: bool
    address: int  # of the panels, or of the file's rows
    def set_order(self, order: Tensor) -> None:
        """int32 [experts, cols]: stored column j is column order[j] of the input, which is gathered so. Matrices that
        share the tensor share the gathered input."""

class LinearGroup:
    def __init__(self, matrices: list[Matrix], biases: Sequence[Tensor | None] | None = None) -> None:
        """Up to three matrices over one input; biases: float32 [rows] of each, None where it has none."""

class LoraTable:
    """A and B of one product, or of one for each expert, by adapter."""

    cols: int
    rows: int
    experts: int
    most_rank: int
    def __init__(self, cols: int, rows: int, experts: int, adapters: int) -> None: ...
    def set(self, adapter: int, expert: int, a: Tensor | None, b: Tensor | None) -> None:
        """a: float32 [rank, cols], b: [panels, rank, 32], borrowed; rank is a multiple of 4. Only after a wait."""

class Activations:
    rows: int
    cols: int
    def __init__(self, f32: Tensor | None, q8: Tensor | None, cols: int) -> None:
        """Borrows the tensors."""

class AttentionPlan:
    split: bool
    cuts: int
    slices: int
    together: int
    latent_together: int
    chooses: bool
    has_tiles: bool
    def __init__(self) -> None: ...
    def build(
        self,
        rows: npt.NDArray[np.int32],
        counts: npt.NDArray[np.int32],
        positions: npt.NDArray[np.int32],
        req_slots: npt.NDArray[np.int32],
        slot_table: npt.NDArray[np.int32],
        heads: int,
        kv_heads: int,
        value_dim: int,
        threads: int,
        ends: npt.NDArray[np.int32] | None = None,
        top: int = 0,
        block: int = 1,
        local: int = 0,
    ) -> None: ...
    @property
    def chosen(self) -> list[tuple[int, list[int]]]:
        """Of each row that chooses its keys: the row, and their KV slots. If each KV head chooses: row * KV heads +
        head, and slots * KV heads + head."""

class CompressedPlan:
    attention: AttentionPlan
    chooses: bool
    copies_keys: bool
    def __init__(self) -> None: ...
    @property
    def key_rows(self) -> list[int]:
        """Of each row of the step: the row of the layer's keys in which its key is stored."""

    def build(
        self,
        rows: npt.NDArray[np.int32],
        counts: npt.NDArray[np.int32],
        positions: npt.NDArray[np.int32],
        req_slots: npt.NDArray[np.int32],
        state_slots: npt.NDArray[np.int32],
        slot_table: npt.NDArray[np.int32],
        window: int,
        ratio: int,
        top: int,
        first_ring: int,
        ring_rows: int,
        num_rings: int,
        heads: int,
        parts: int,
        dim: int,
        threads: int,
    ) -> None: ...

class DeltaHeads:
    state_values: int
    def __init__(
        self,
        key_heads: int,
        value_heads: int,
        key_dim: int,
        value_dim: int,
        taps: int,
        tiled: bool,
        kimi: bool,
        mamba2: bool = False,
        sigmoid: bool = False,
        bound: float = 0.0,
    ) -> None: ...

class Pool:
    threads: int
    operation_names: list[str]
    def time_phases(self, room: int) -> None: ...
    def phase_times(self, thread: int) -> bytes: ...
    @staticmethod
    def phase_ticks() -> int: ...
    @staticmethod
    def phase_ticks_per_second() -> float: ...

class ProductSpeed:
    type: int
    tokens: int
    form: str
    speeds: list[float]
    is_known: bool

def copy_ids(what: str, source: Tensor, target: Tensor, count: int) -> None: ...

class RecordedOperations:
    def __init__(self) -> None: ...

class Stream:
    isa: str
    threads: int
    recomputed: int
    fetched_ahead: int
    pool: Pool
    def __init__(self, threads: list[tuple[int, list[int]]], isa: str = "") -> None: ...
    def wait(self) -> None: ...
    def begin_record(self, record: RecordedOperations) -> None: ...
    def end_record(self, record: RecordedOperations) -> None: ...
    def repeat(self, record: RecordedOperations) -> bool: ...
    def choose_products(
        self, types: list[int], weight_bytes: int, least_gain: float, known: dict[int, list[list[float]]]
    ) -> list[ProductSpeed]: ...
    def pack(self, source: int, bytes: int, type: int, rows: int, cols: int, experts: int) -> Matrix: ...
    def slots(self, type: int, rows: int, cols: int, count: int) -> Matrix: ...
    def view(self, source: int, bytes: int, type: int, rows: int, cols: int, experts: int) -> Matrix: ...
    def embed(
        self, table: int, bytes: int, type: int, ids: Tensor, n: int, x: Tensor, scale: float, copies: int
    ) -> None: ...
    def norm(
        self,
        x: Tensor,
        weight: Tensor,
        eps: float,
        n: int,
        y: Activations,
        rows: Tensor | None,
        centered: bool,
    ) -> None: ...
    def add_norm(
        self, source: Tensor, weight: Tensor, eps: float, n: int, x: Tensor, factor: float
    ) -> None: ...
    def softcap(self, x: Tensor, n: int, cap: float) -> None: ...
    def gelu_gate(self, gate: Tensor | None, up: Tensor, column: int, n: int, out: Activations) -> None: ...
    def linear(self, x: Activations, n: int, weights: LinearGroup, out: list[Tensor], add: bool) -> None: ...
    def linear_panels(self, x: Activations, n: int, weights: Matrix, panels: Tensor, out: Tensor) -> None: ...
    def lora(
        self,
        x: Activations,
        n: int,
        rows: Tensor,
        adapters: Tensor,
        tables: list[LoraTable | None],
        out: list[Tensor],
        shrunk: Tensor,
    ) -> None: ...
    def rope_store(
        self,
        q: Tensor,
        k: Tensor | None,
        v: Tensor | None,
        q_norm: Tensor | None,
        k_norm: Tensor | None,
        eps: float,
        cos: Tensor,
        sin: Tensor,
        positions: Tensor | None,
        slots: Tensor,
        kv: KvLayer,
        n: int,
        heads: int,
        kv_heads: int,
        dim: int,
        value_dim: int,
        scale: float | None,
        v_norm: Tensor | None,
        v_from_k: bool,
        v_scale: float,
        norm_after: bool,
    ) -> None: ...
    def attention(
        self,
        plan: AttentionPlan,
        q: Tensor,
        kv: KvLayer,
        out: Activations,
        heads: int,
        kv_heads: int,
        dim: int,
        value_dim: int,
        is_latent: bool,
        window: int,
        sinks: Tensor | None,
        gate: Tensor | None,
        gate_softplus: bool,
        score_cap: float,
    ) -> None: ...
    def index_store(
        self,
        q: Tensor | None,
        keys: Tensor,
        norm: Tensor,
        bias: Tensor,
        eps: float,
        cos: Tensor,
        sin: Tensor,
        positions: Tensor | None,
        slots: Tensor,
        index_keys: Tensor,
        n: int,
        heads: int,
        in_pairs: bool,
    ) -> None: ...
    def index_blocks(
        self,
        plan: AttentionPlan,
        q: Tensor,
        keys: Tensor,
        q_norm: Tensor,
        k_norm: Tensor,
        eps: float,
        cos: Tensor,
        sin: Tensor,
        first_cos: Tensor | None,
        first_sin: Tensor | None,
        index_keys: Tensor,
        heads: int,
    ) -> None: ...
    def index_pools(
        self,
        plan: AttentionPlan,
        keys: Tensor,
        gates: Tensor,
        norm: Tensor,
        bias: Tensor,
        eps: float,
        ape: Tensor,
        index_keys: Tensor,
    ) -> None: ...
    def choose_keys(
        self, plan: AttentionPlan, q: Tensor, weights: Tensor | None, index_keys: Tensor, heads: int
    ) -> None: ...
    def latent_store(
        self,
        q: Tensor,
        latent: Tensor,
        norm: Tensor,
        eps: float,
        cos: Tensor,
        sin: Tensor,
        positions: Tensor | None,
        slots: Tensor,
        keys: Tensor,
        n: int,
        heads: int,
        scale: float,
        nope: Activations,
        queries: Tensor,
    ) -> None: ...
    def compressed_store(
        self,
        q: Tensor,
        kv: Tensor,
        norm: Tensor,
        eps: float,
        cos: Tensor,
        sin: Tensor,
        positions: Tensor,
        plan: CompressedPlan,
        keys: Tensor,
        n: int,
        heads: int,
        scale: float,
        index_q: Tensor | None,
        index_heads: int,
    ) -> None: ...
    def compress(
        self,
        kv: Tensor,
        gate: Tensor,
        bias: Tensor,
        norm: Tensor,
        eps: float,
        cos: Tensor,
        sin: Tensor,
        positions: Tensor,
        slots: Tensor,
        entries: Tensor,
        states: Tensor,
        first_state: int,
        row: Tensor,
        count: Tensor,
        slot: Tensor,
        drafts: Tensor | None,
        kept: Tensor | None,
        pending: Tensor | None,
        n: int,
    ) -> None: ...
    def commit_compressed(
        self,
        bias: Tensor,
        dim: int,
        states: Tensor,
        first_state: int,
        slot: Tensor,
        kept: Tensor,
        accepted: Tensor,
        pending: Tensor,
    ) -> None: ...
    def choose_entries(
        self, plan: CompressedPlan, q: Tensor, weights: Tensor, index_keys: Tensor, heads: int
    ) -> None: ...
    def keep_keys(self, plan: CompressedPlan, keys: Tensor) -> None: ...
    def rotate_back(
        self, x: Activations, n: int, heads: int, dim: int, cos: Tensor, sin: Tensor, positions: Tensor
    ) -> None: ...
    def linear_by_head(self, x: Activations, n: int, weights: Matrix, out: Activations) -> None: ...
    def delta_net(
        self,
        q: Tensor,
        k: Tensor | None,
        v: Tensor | None,
        z: Tensor,
        b: Tensor,
        a: Tensor | None,
        conv: Tensor,
        rate: Tensor,
        dt_bias: Tensor,
        norm: Tensor,
        eps: float,
        heads: DeltaHeads,
        states: Tensor,
        first: int,
        row: Tensor,
        count: Tensor,
        slot: Tensor,
        drafts: Tensor | None,
        kept: Tensor | None,
        pending: Tensor | None,
        n: int,
        out: Activations,
    ) -> None: ...
    def mamba2(
        self,
        projected: Tensor,
        decays: Tensor,
        conv: Tensor,
        conv_bias: Tensor | None,
        rate: Tensor,
        dt_bias: Tensor,
        skip: Tensor,
        norm: Tensor | None,
        eps: float,
        heads: DeltaHeads,
        states: Tensor,
        first: int,
        row: Tensor,
        count: Tensor,
        slot: Tensor,
        drafts: Tensor | None,
        kept: Tensor | None,
        pending: Tensor | None,
        n: int,
        out: Activations,
    ) -> None: ...
    def short_conv(
        self,
        projected: Tensor,
        conv: Tensor,
        states: Tensor,
        first: int,
        row: Tensor,
        count: Tensor,
        slot: Tensor,
        drafts: Tensor | None,
        kept: Tensor | None,
        pending: Tensor | None,
        n: int,
        out: Activations,
    ) -> None: ...
    def commit_states(
        self,
        heads: DeltaHeads,
        states: Tensor,
        first: int,
        slot: Tensor,
        kept: Tensor,
        accepted: Tensor,
        pending: Tensor,
    ) -> None: ...
    def copy_states(self, states: Tensor, pairs: Tensor) -> None: ...
    def stream_norm(
        self, x: Tensor, weight: Tensor, eps: float, n: int, y: Activations, rows: Tensor | None
    ) -> None: ...
    def scaled_silu(self, x: Tensor, factor: float, n: int, out: Activations) -> None: ...
    def mix_streams(self, gate: Tensor, x: Activations, n: int, out: Activations) -> None: ...
    def inject(self, block: Tensor, weights: Tensor, n: int, x: Tensor) -> None: ...
    def read_streams(
        self,
        products: Tensor | None,
        x: Tensor,
        rows: Tensor | None,
        base: Tensor | None,
        scale: Tensor | None,
        eps: float,
        iterations: int,
        norm: Tensor,
        norm_eps: float,
        n: int,
        y: Activations,
        weights: Tensor | None,
    ) -> None: ...
    def add_streams(self, block: Tensor, weights: Tensor, n: int, x: Tensor) -> None: ...
    def attend_streams(
        self,
        x: Tensor,
        rows: Tensor | None,
        score: Tensor,
        norm: Tensor,
        eps: float,
        num: int,
        n: int,
        y: Activations,
    ) -> None: ...
    def put_stream(self, block: Tensor, stream: int, add: bool, n: int, x: Tensor) -> None: ...
    def ngram_gate(
        self,
        x: Tensor,
        key: Tensor,
        value: Tensor,
        query_norm: Tensor,
        key_norm: Tensor,
        conv_norm: Tensor,
        eps: float,
        n: int,
        factors: Tensor,
    ) -> None: ...
    def ngram_conv(
        self,
        inputs: Tensor,
        factors: Tensor,
        value: Tensor,
        conv: Tensor,
        dilation: int,
        states: Tensor,
        first: int,
        row: Tensor,
        count: Tensor,
        slot: Tensor,
        drafts: Tensor | None,
        kept: Tensor | None,
        pending: Tensor | None,
        n: int,
        x: Tensor,
    ) -> None: ...
    def commit_windows(
        self,
        states: Tensor,
        first: int,
        kept_rows: int,
        slot: Tensor,
        kept: Tensor,
        accepted: Tensor,
        pending: Tensor,
    ) -> None: ...
    def route(
        self,
        logits: Tensor,
        n: int,
        ids: Tensor,
        weights: Tensor,
        scoring: str,
        normalize: bool,
        scale: float,
        groups: int,
        top_groups: int,
        group_best: int,
        bias: Tensor | None,
        expert_scale: Tensor | None,
        table: Tensor | None,
        tokens: Tensor | None,
    ) -> None: ...
    def shared_gate(
        self, y: Activations, n: int, weight: Tensor | None, ids: Tensor, weights: Tensor
    ) -> None: ...
    def experts(
        self,
        gate: Matrix,
        up: Matrix,
        down: Matrix,
        y: Activations,
        n: int,
        ids: Tensor,
        weights: Tensor,
        starts: Tensor,
        active: Tensor,
        routes: Tensor,
        h: Activations,
        expert_token_counts: Tensor | None,
        x: Tensor,
        activation: str,
        limit: float,
        alpha: float,
        weighs_input: bool,
        gate_bias: Tensor | None,
        up_bias: Tensor | None,
        down_bias: Tensor | None,
        lora: ExpertAdapters | None,
        add: bool,
        disk: DiskLayer | None,
    ) -> None: ...
    def read(self, matrix: Matrix) -> None: ...

class SamplerState:
    def __init__(
        self, max_num_seqs: int, vocab: int, pool: Pool | None = None, isa: str | None = None
    ) -> None: ...
    def bind(
        self,
        slot: int,
        *,
        seed: int = 0,
        min_tokens: int = 0,
        logprobs: int = -1,
        bias_ids: npt.NDArray[np.int32] | None = None,
        bias_values: npt.NDArray[np.float32] | None = None,
        stop_ids: npt.NDArray[np.int32] | None = None,
        prompt: npt.NDArray[np.int32] | None = None,
        output: npt.NDArray[np.int32] | None = None,
        order: int = 0,
        dry_breakers: npt.NDArray[np.int32] | None = None,
        **settings: float,
    ) -> None: ...
    @staticmethod
    def settings() -> dict[str, tuple[str, float]]: ...
    def sample(
        self,
        logits: Tensor,
        slots: npt.NDArray[np.int32],
        masks: npt.NDArray[np.int32] | None = None,
        mask_of: npt.NDArray[np.int32] | None = None,
    ) -> tuple[npt.NDArray[np.int32], list[tuple[int, float, int, list[int], list[float]] | None]]: ...
    def logprobs(
        self, logits: Tensor, targets: npt.NDArray[np.int32], top_n: int
    ) -> list[tuple[int, float, int, list[int], list[float]] | None]: ...
    def survivors(
        self, logits: Tensor, slot: int
    ) -> tuple[npt.NDArray[np.int32], npt.NDArray[np.float32]]: ...

def uniform_at(seed: int, position: int, stream: int = 0) -> float: ...
def runs_by_lag(text: npt.NDArray[np.int32]) -> npt.NDArray[np.int32]: ...

class DiskCounts:
    hits: int
    misses: int
    bytes: int
    waited_us: int
    busy_us: int
    predicted: int
    predicted_right: int
    errors: int

class DiskExperts:
    bytes: int  # of all experts in the files
    patience: float  # seconds
    def __init__(
        self,
        stream: Stream,
        paths: list[str],
        layers: list[tuple[int, list[tuple[Matrix, int, int, int]], list[int], list[int]] | None],
        threads: int,
        piece_bytes: int,
        decay: float,
        patience: float,
    ) -> None: ...
    def take_failures(self) -> list[tuple[int, str]]: ...
    def counts(self) -> DiskCounts: ...
    def hold(self, layer: int, expert: int) -> int: ...
    def release(self, layer: int, expert: int) -> None: ...
    def mark_holdable(self, layer: int, marks: npt.NDArray[np.bool_]) -> None: ...
    def mark_absent(self, layer: int, marks: npt.NDArray[np.bool_]) -> None: ...

class ReadAhead:
    def __init__(self, layers: int) -> None: ...
    def pause_begins(self, layer: int, now: float) -> None: ...
    def pause_ends(self, layer: int, now: float) -> None: ...
    def guessed(self, count: int, right: int) -> None: ...
    def bytes_worth_reading(self, layer: int, rate: float, piece: int) -> int: ...

class ExpertCachePolicy:
    def __init__(
        self, cached: npt.NDArray[np.bool_], movable: npt.NDArray[np.bool_], decay: float, pays: float
    ) -> None: ...
    def observe(self, counts: npt.NDArray[np.int64], *, streamed: bool) -> int: ...
    def choose(
        self, most: int, *, pays: bool, ready: npt.NDArray[np.bool_] | None = None
    ) -> npt.NDArray[np.int64]: ...
    def adopt(self, cached: npt.NDArray[np.bool_]) -> None: ...
    def learn(self) -> None: ...
    def scores(self) -> npt.NDArray[np.float32]: ...
    def forget(self) -> None: ...

class HostMaps:
    def __init__(
        self, slots: npt.NDArray[np.int32], in_ram: npt.NDArray[np.int32], places: npt.NDArray[np.int32]
    ) -> None: ...
    def start(self, moves: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]: ...
    def land(self, batch: npt.NDArray[np.int64]) -> None: ...

class PromotionTables:
    def __init__(
        self,
        host: npt.NDArray[np.int64],
        kind_starts: list[int],
        *,
        source: npt.NDArray[np.int64],
        each: npt.NDArray[np.int64],
        offset: npt.NDArray[np.int64],
        kind: npt.NDArray[np.int64],
        target: npt.NDArray[np.int64],
        target_each: npt.NDArray[np.int64],
        bias_source: npt.NDArray[np.int64],
        bias_target: npt.NDArray[np.int64],
        bias_each: npt.NDArray[np.int64],
        staging: int,
        staging_bytes: int,
        most: int,
        experts: int,
    ) -> None: ...
    def write(self, batch: npt.NDArray[np.int64]) -> None: ...

class HandoffLayer:
    def __init__(
        self,
        gate: Matrix | None,
        up: Matrix | None,
        down: Matrix | None,
        expert_token_counts: int,
        activation: str = "silu",
        limit: float = 0.0,
        alpha: float = 0.0,
        gate_bias: int = 0,
        up_bias: int = 0,
        down_bias: int = 0,
    ) -> None: ...

class HandoffSlot:
    def __init__(self, y: Activations, ids: int, weights: int, result: int) -> None: ...

class Handoff:
    FLAG_BYTES: int
    def __init__(
        self,
        stream: Stream,
        layers: list[HandoffLayer],
        requests: int,
        answers: int,
        even: HandoffSlot,
        odd: HandoffSlot,
        h: Activations,
        starts: int,
        active: int,
        routes: int,
        max_tokens: int,
        top_k: int,
        timeout_s: float,
        disk: DiskExperts | None = None,
    ) -> None: ...
    def begin(self) -> None: ...
    def expert_reads(self, layers: npt.NDArray[np.bool_]) -> int: ...
    def error(self) -> str: ...
    def abandon(self, why: str) -> None: ...

class BlockFloatMatrix:
    """moeserve/kernels/block_float.py"""

    rows: int
    cols: int
    def __init__(self, matrix: Tensor, threads: int) -> None: ...
    def multiply(self, x: Tensor, bias: Tensor | None, out: Tensor, threads: int) -> None: ...

def block_float_attention(
    q: Tensor, k: Tensor, v: Tensor, dim: int, scale: float, out: Tensor, threads: int
) -> None: ...
def has_block_float() -> bool: ...

NGRAM_JOB: int  # the address of a CUhostFn, whose argument a `NgramTable.job` is

def run_ngram_job(job: int) -> None: ...

class NgramTable:
    """csrc/ngrams/ngram_table.h. tokens: int32 [n]; previous: int32 [n, earlier tokens]."""

    @staticmethod
    def make(
        parts: Sequence[tuple[int, int, int, int, int]],
        files: Sequence[tuple[int, int, int, int, int]],
        heads: tuple[
            Sequence[int], Sequence[int], Sequence[int], int
        ],  # multipliers, rows, offsets, end token
        form: tuple[int, int, int, int, float],  # type, columns, bytes, scaled block, scale
        cached: int,
    ) -> NgramTable: ...
    def take(
        self, tokens: npt.NDArray[np.int32], previous: npt.NDArray[np.int32], out: npt.NDArray[np.uint8]
    ) -> None: ...
    def job(self, tokens: int, previous: npt.NDArray[np.int32], out: int) -> int: ...
    def take_failures(self, but: int) -> list[int]: ...
    def take_counts(self) -> tuple[int, int]: ...
