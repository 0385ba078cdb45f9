"""Messages between the router and the worker: plans of steps, and their results.

`schema.py` says how integers and times are encoded.
"""

from __future__ import annotations

from typing import Final

import msgspec

from moeserve.messages.expert_cache import ExpertCacheCounts
from moeserve.messages.expert_disk import ExpertDiskCounts
from moeserve.messages.pages import PageOrders, PageReport, Tier
from moeserve.messages.prompt_embeddings import EmbeddingSpan
from moeserve.messages.sampling import SamplingParams, TokenLogprob
from moeserve.messages.slot_kinds import SlotKind
from moeserve.messages.table_rows import TableRowCounts


class MeasuredStep(msgspec.Struct, frozen=True, array_like=True):
    """A step's time, measured at the start: of a step of decode rows, or of one with a prompt's tokens."""

    rows: int
    decode_context: int  # sum over decode rows of the positions that they attend to
    start: int  # position of the prompt's first token in the step
    prompt: int
    ms: float


class WorkerReady(msgspec.Struct, frozen=True, tag=True):
    """The limits of a worker that the router may use; `Worker.ready` returns it."""

    num_kv_slots: int
    max_num_seqs: int  # request slots 0..max_num_seqs-1
    max_model_len: int
    vocab_size: int
    weight_bytes: int  # on all devices together; kv_bytes likewise
    kv_bytes: int
    device: str  # "cpu (avx512_vnni, 2 threads)"
    max_num_batched_tokens: int = 512  # tokens of one step
    num_experts: int = 0  # of a layer; 0: a dense model. A token is routed to experts_per_token of them
    experts_per_token: int = 0
    # Slots 0.. of recurrent state, running or snapshot; 0: the model has no recurrent state.
    num_state_slots: int = 0
    # Slots of the windowed layers' own KV pool; 0: all layers have one. A row then has two slots for each position, and
    # the worker a second table by position, of which attention reads only the last `window` entries before a row.
    num_window_slots: int = 0
    window: int = 0  # tokens that a windowed layer attends to, at most
    prompts_first: bool = False  # steps should be filled with prompts: all experts are on a GPU
    # Large steps stream RAM experts to a GPU, so a chunk is expensive whatever its size.
    streams_prompts: bool = False
    kv_page_tokens: int = 0  # tokens of a page of the tiers behind the KV pool; 0: no tiers
    kv_page_bytes: int = 0
    # Most bytes of pages to copy out before a step with decode rows, which wait for the copies.
    kv_write_bytes: int = 0
    kv_tiers: list[Tier] = []  # the fastest first
    state_bytes: int = 0  # of one slot of recurrent state
    # Kinds of a pool with different slots; num_kv_slots is then the number of tokens that fit.
    kv_slot_kinds: list[SlotKind] = []
    measured_steps: list[MeasuredStep] = []
    start_seconds: dict[str, float] = {}  # seconds of the worker's start, by phase; empty on a CPU
    adapters: dict[str, str] = {}  # LoRA adapters of --lora-modules: name -> key
    adapter_bytes: dict[str, int] = {}  # by key
    max_drafts: int = 0  # most drafts of a row; 0: no drafts
    # Floats of a row that replaces a token: the embedding, and what deeper layers add (DeepStack); 0: not supported.
    embedding_size: int = 0
    disk_wait_s: float = 0.0  # how long a step may wait for experts on disk; 0: no experts on disk
    rotates_in_sections: bool = False  # embeddings may have positions of their own (EmbeddingSpan.positions)
    # The rows of a span see one another, so no row of a plan ends within a span.
    whole_spans: bool = False


class NewSeq(msgspec.Struct, frozen=True, array_like=True):
    """Binds a sequence to a request slot, and overwrites what the slot held.

    For each request slot, the worker keeps a token table and a table of KV slots, both by position. `token_ids` fill
    the token table. `prefix_slots` fill the first positions of the slot table: a cached prefix, whose KV is already
    computed. After a preemption, `token_ids` are the prompt and the output so far; the first `num_prompt` of them are
    the prompt.

    Binding does not change the recurrent state in `state_slot`: a state copy of this or an earlier plan sets it to the
    state after the tokens of `prefix_slots`. Each row of the sequence reads the state there and overwrites it.
    """

    req_slot: int
    token_ids: bytes  # int32
    num_prompt: int
    prefix_slots: bytes  # int32
    sampling: SamplingParams
    request_id: str = ""  # for log lines
    state_slot: int = -1  # where its recurrent state is; -1: the model has none
    adapter: str = ""  # GenerateRequest.adapter
    tenant: str = ""  # GenerateRequest.key_name
    grammar: int = 0  # number of its grammar, which `sampling` then lacks: see StepPlan; 0: no grammar
    # int32: window slots of the last positions of `prefix_slots`; see WorkerReady.num_window_slots.
    prefix_window_slots: bytes = b""
    # Spans that `prefix_slots` do not cover completely, and all spans with their own positions, which shift the
    # positions of later text. `token_ids` has negative numbers there, which tell the worker which rows are embeddings.
    spans: list[EmbeddingSpan] = []
    # Drafts may come from texts of requests with the same namespace: step times could reveal those texts.
    namespace: str = ""


CONTINUES: Final = -1  # Row.start of a row that may have drafts


class Row(msgspec.Struct, frozen=True, array_like=True):
    """Computes positions start .. start+count-1 of a request slot and writes their KV to `kv_slots`.

    A row may read KV that another row of the same plan writes (a shared prefix): in each layer, the KV of all rows is
    written before any row attends.

    A decode row has count 1. Its token is the last one that the worker sampled and appended to its token table. So the
    plan of step N+1 can be built and sent while step N runs.

    A row with drafts has start CONTINUES: it begins at the last token of its request, whose position only the worker
    knows in time, and has at most `count` positions. The worker drafts the tokens after the first, possibly fewer. Each
    position is sampled; tokens that agree with the drafts are kept, plus one more. `kv_slots` may have any length:
    these slots are for the positions after those that already have slots. The request keeps them: a later row writes
    again to a position whose draft was rejected.
    """

    req_slot: int
    start: int
    count: int
    kv_slots: bytes  # int32, `count` of them
    sample: bool  # sample the next token after the last position
    # int32, as many as `kv_slots` if windowed layers have a pool of their own, otherwise empty.
    window_slots: bytes = b""

    @property
    def drafts(self) -> int:
        """The most of its tokens that may be drafts."""
        return self.count - 1 if self.start == CONTINUES else 0


class Fork(msgspec.Struct, frozen=True, array_like=True):
    """Executed before the rows of a plan: request slot `target` gets the tokens and KV slots of `source` at the
    positions before `position`, and `token_id` at `position`, where its next row begins. A slot that is the source of
    another fork is the target of no other slot's fork."""

    target: int
    source: int
    position: int
    token_id: int


class StepPlan(msgspec.Struct, frozen=True, tag=True, omit_defaults=True):
    """One step: page orders and state copies, then new sequences, forks and rows. If the plan has no rows, the worker
    waits briefly for pages that are being moved, so that a router that needs them need not poll.

    `state_copies` are pairs (source, destination) of state slots, int32 [n, 2], executed one after the other before any
    row. Source -1 zeroes the destination. Plans are executed in order, so a copy reads the state as the previous plan's
    rows leave it, even if that plan still runs when this one is sent.

    A grammar is sent once, in `grammars` by number, with the first plan that binds a sequence with it. The worker keeps
    it until a plan has its number in `dropped_grammars`; bound sequences are not affected.

    `keeps_block`: a next-token block, or an EAGLE-3 head, computes each step's tokens too, so that it can draft. False
    while that costs more than the drafts save; then it drafts nothing.
    """

    step: int
    new_seqs: list[NewSeq]
    rows: list[Row]
    state_copies: bytes = b""
    pages: PageOrders | None = None
    forks: list[Fork] = []
    grammars: dict[int, str] = {}
    dropped_grammars: list[int] = []
    keeps_block: bool = True


COSTLY_MASK_MS: Final = 0.1  # ms; masks above it are costly: 63 of 2 ms would make a 5 ms step take 126 ms


class Accepted(msgspec.Struct, frozen=True, array_like=True):
    """The outcome of a row's drafts."""

    drafted: int  # number of drafted tokens, at least one
    token_ids: list[int]  # the tokens sampled after the row's first token, one for each correct draft
    logprobs: list[TokenLogprob] | None = None  # of token_ids, if requested
    # Verification ended before a wrong draft: at a stop token, or because a mask was late.
    cut_short: bool = False


class Sampled(msgspec.Struct, frozen=True, array_like=True):
    token_id: int  # -1: no token could be sampled; the request ends with `error`
    logprob: TokenLogprob | None = None
    error: str | None = None
    late: bool = False  # its mask was not ready: no token is sampled for this request until it is bound again
    accepted: Accepted | None = None  # None: the row had no drafts


class StepResult(msgspec.Struct, frozen=True, tag=True):
    """`sampled` has one entry for each row of the plan with `sample`, in order. `prompt_logprobs` is keyed by row index
    and has, for a chunk start .. start+count-1, the tokens at start+1 .. start+count that are within the prompt."""

    step: int
    sampled: list[Sampled]
    prompt_logprobs: dict[int, list[TokenLogprob]]
    compute_ms: float
    idle_ms: float  # time from the end of the previous step until this plan arrived
    # GPU kernels compiled or loaded during this step. If any, the step's time says nothing about the cost of steps.
    kernels_compiled: int = 0
    # By index of `sampled`: how long the helper thread took for the token's mask, if more than COSTLY_MASK_MS.
    mask_ms: dict[int, float] = {}
    pages: PageReport | None = None
    expert_cache: ExpertCacheCounts | None = None  # since the previous result; None: no expert cache
    draft_ms: float = 0.0  # part of compute_ms spent drafting, without draft_read_ms
    # Part of compute_ms in which a GPU waited for the host, as a step's layers are launched when its drafts are known.
    draft_wait_ms: float = 0.0
    # Since the previous result; None: all experts are in memory.
    expert_disk: ExpertDiskCounts | None = None
    table_rows: TableRowCounts | None = None  # since the previous result; None: no table on disk
    # By index of the plan's rows: why a row failed; its request ends. Rows of other requests are not affected, but KV
    # that the failed row wrote must not be used.
    failed_rows: dict[int, str] = {}
    # Part of compute_ms in which a drafting model read texts before it could draft.
    draft_read_ms: float = 0.0
    # Indices of the plan's rows that got no drafts because the drafting model has not read their texts to the end.
    lagging_rows: list[int] = []
    draft_keep_ms: float = 0.0  # part of compute_ms in which a next-token block computed the step's tokens


class ExpertUse(msgspec.Struct, frozen=True, tag=True):
    """Tokens routed to each expert since the start, and where its weights are. The router forwards it to httpserver."""

    layers: int
    experts: int  # of a layer
    experts_per_token: int
    tokens: bytes  # int64 [layers, experts]: tokens routed to each
    # uint8 [layers, experts]: 0 for an expert in RAM, otherwise 1 + the index of its GPU among the worker's GPUs
    on_gpu: bytes
    cache: ExpertCacheCounts | None = None  # since the start; None: experts do not move
    # uint8 [layers, experts]: 1 for an expert that is on disk only; empty: no such expert.
    on_disk: bytes = b""
    disk: ExpertDiskCounts | None = None  # since the start; None: no experts on disk


class WorkerError(msgspec.Struct, frozen=True, tag=True):
    """A call has failed and the worker ends; `message` has the exception's type and text."""

    message: str
