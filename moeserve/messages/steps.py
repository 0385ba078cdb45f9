"""What the router and the worker say to one another: plans of steps, and their results.

`schema.py` has how integers and times are written.
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
    decode_context: int  # sum of the positions that the rows attend to
    start: int  # of the prompt's tokens
    prompt: int
    ms: float


class WorkerReady(msgspec.Struct, frozen=True, tag=True):
    """The limits of a worker that the router may use; `Worker.ready` returns it."""

    num_kv_slots: int
    max_num_seqs: int  # request slots 0..max_num_seqs-1
    max_model_len: int
    vocab_size: int
    weight_bytes: int  # on all devices together, as kv_bytes
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
    prompts_first: bool = False  # steps are worth most when prompts fill them: all experts are on a GPU
    # Large steps bring experts in RAM to a GPU: a chunk costs much, whatever its size.
    streams_prompts: bool = False
    kv_page_tokens: int = 0  # of a page of the tiers behind the KV pool; 0: there are none
    kv_page_bytes: int = 0
    kv_write_bytes: int = 0  # of pages, copied out before a step whose decode rows would wait for more
    kv_tiers: list[Tier] = []  # the fastest first
    state_bytes: int = 0  # of one slot of recurrent state
    # Of a pool whose slots are not alike; num_kv_slots is the number of tokens that it holds together.
    kv_slot_kinds: list[SlotKind] = []
    measured_steps: list[MeasuredStep] = []
    start_seconds: dict[str, float] = {}  # of the worker's start, by phase; empty: on a CPU
    adapters: dict[str, str] = {}  # LoRA adapters of --lora-modules: the key of each name
    adapter_bytes: dict[str, int] = {}  # by key
    max_drafts: int = 0  # positions of a row whose tokens are drafted; 0: its rows have none
    # Numbers of a row that may stand for a token: an embedding, and what else the model adds of it; 0: none may.
    embedding_size: int = 0
    disk_wait_s: float = 0.0  # how long a step may wait for experts on disk; 0: there are none
    rotates_in_sections: bool = False  # embeddings may have positions of their own (EmbeddingSpan.positions)
    whole_spans: bool = (
        False  # rows of a span of embeddings see those behind them: no row of a plan ends within one
    )


class NewSeq(msgspec.Struct, frozen=True, array_like=True):
    """Binds a sequence to a request slot, and overwrites what the slot held.

    For each request slot, the worker keeps a token table and a KV-slot table by position. `token_ids` fill the first.
    `prefix_slots` fill the first positions of the second: their KV is computed already, a cached prefix. After a
    preemption, `token_ids` are the prompt and the output so far; the first `num_prompt` of them are the prompt.

    Binding leaves the recurrent state in `state_slot` alone: a state copy of this plan or an earlier one makes it the
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
    grammar: int = 0  # number of its grammar, which `sampling` is without then: see StepPlan; 0: none
    # int32, of the last positions of `prefix_slots`; see WorkerReady.num_window_slots.
    prefix_window_slots: bytes = b""
    # Those that `prefix_slots` do not cover whole, and those with positions of their own, by which all text behind them
    # rotates. They have negative numbers in `token_ids`, by which the worker tells a chunk's rows of embeddings from
    # its tokens.
    spans: list[EmbeddingSpan] = []
    namespace: str = ""  # requests of one may see in the time of their steps what the others' texts are


CONTINUES: Final = -1  # Row.start of a row that may have drafts


class Row(msgspec.Struct, frozen=True, array_like=True):
    """Computes positions start .. start+count-1 of a request slot and writes their KV to `kv_slots`.

    A row may read KV that another row of the same plan writes (a shared prefix): in each layer, the KV of all rows is
    written before any row attends.

    A decode row has count 1. Its token is the one that the worker sampled last and appended to its own token table, so
    that the plan of step N+1 can be built and sent while step N runs.

    A row with drafts has start CONTINUES: it begins at the last token of its request, which the worker alone knows in
    time, and has `count` positions at most. The tokens behind its first are drafted by the worker, which may draft
    fewer; each position is sampled, and what agrees with the drafts is kept, plus one token. `kv_slots` are any number
    of slots, granted for the positions behind those that the request has slots for. They stay its own: a position whose
    draft was rejected is written again, by a later row.
    """

    req_slot: int
    start: int
    count: int
    kv_slots: bytes  # int32, `count` of them
    sample: bool  # sample the next token after the last position
    # int32, as many as `kv_slots` where windowed layers have a pool of their own; else none.
    window_slots: bytes = b""

    @property
    def drafts(self) -> int:
        """How many of its tokens may be drafts."""
        return self.count - 1 if self.start == CONTINUES else 0


class Fork(msgspec.Struct, frozen=True, array_like=True):
    """Before the rows of a plan, request slot `target` takes over the tokens and KV slots of `source` at the positions
    before `position`, where its next row is, and gets `token_id` there. No slot that is another's `source` is the
    target of a slot other than itself."""

    target: int
    source: int
    position: int
    token_id: int


class StepPlan(msgspec.Struct, frozen=True, tag=True, omit_defaults=True):
    """One step: page orders and state copies, then new sequences, forks and rows. Without rows, the worker waits a
    moment for pages that are under way, so that a router that awaits them need not ask all the time.

    `state_copies` are pairs (source, destination) of state slots, int32 [n, 2], executed one after the other before any
    row. Source -1 zeroes the destination. Plans are executed in order, so a copy reads the state that the rows of the
    plan before have left, although that plan may still run when this one is sent.

    A grammar is sent once, in `grammars` by number, with the first plan that has a sequence of it. The worker keeps it
    until a plan has its number in `dropped_grammars`; sequences that are bound keep what they need.

    `keeps_block`: a next-token block on the CPU keeps up with the texts, so that it can draft. False while that costs
    more than drafts bring; the block then draws on what it knows until that point.
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


COSTLY_MASK_MS: Final = 0.1  # 63 rows of 2 ms each would make a step of 5 ms last 126


class Accepted(msgspec.Struct, frozen=True, array_like=True):
    """The outcome of a row's drafts."""

    drafted: int  # tokens, at least one
    token_ids: list[int]  # sampled behind the row's first token: one for each draft that was right
    logprobs: list[TokenLogprob] | None = None  # of these, where requested
    # No draft was wrong: the others were not looked at, behind a stop token or because a mask was late.
    cut_short: bool = False


class Sampled(msgspec.Struct, frozen=True, array_like=True):
    token_id: int  # -1: none could be sampled, and the request ends with `error`
    logprob: TokenLogprob | None = None
    error: str | None = None
    late: bool = False  # its mask was not there: nothing is sampled for this request until it is bound again
    accepted: Accepted | None = None  # None: the row had no drafts


class StepResult(msgspec.Struct, frozen=True, tag=True):
    """`sampled` has one entry for each row of the plan with `sample`, in order. `prompt_logprobs` is keyed by row index
    and has, for a chunk start .. start+count-1, the tokens at start+1 .. start+count that are within the prompt."""

    step: int
    sampled: list[Sampled]
    prompt_logprobs: dict[int, list[TokenLogprob]]
    compute_ms: float
    idle_ms: float  # time that the worker waited for this plan after the step before
    # GPU kernels that were compiled, or loaded, during this step, which therefore says nothing about a step's cost.
    kernels_compiled: int = 0
    # By index of `sampled`: how long the helper thread took for the token's mask. Those above COSTLY_MASK_MS alone.
    mask_ms: dict[int, float] = {}
    pages: PageReport | None = None
    expert_cache: ExpertCacheCounts | None = None  # since the result before; None: there is no cache
    draft_ms: float = 0.0  # of compute_ms, what drafting took, without draft_read_ms
    # Of compute_ms, how long a GPU waited for the host because the step has drafts; others are launched ahead.
    draft_wait_ms: float = 0.0
    # Since the result before; None: all experts are in memory.
    expert_disk: ExpertDiskCounts | None = None
    table_rows: TableRowCounts | None = None  # since the result before; None: no table stays in the file
    # By index of the plan's rows: why a row's results are wrong and its request ends. No row of another request is
    # affected, but the KV that such a row wrote must not be used.
    failed_rows: dict[int, str] = {}
    draft_read_ms: float = 0.0  # of compute_ms, for which a drafting model read texts before it could draft
    # By index of the plan's rows: those without drafts because the drafting model has not read their texts to the end.
    unread_rows: list[int] = []
    draft_keep_ms: float = 0.0  # of compute_ms, for which a next-token block kept up with the texts


class ExpertUse(msgspec.Struct, frozen=True, tag=True):
    """Tokens routed to each expert since the start, and where its weights are. The router forwards it to httpserver."""

    layers: int
    experts: int  # of a layer
    experts_per_token: int
    tokens: bytes  # int64 [layers, experts]: tokens routed to each
    # uint8 [layers, experts]: 0 for an expert in RAM, else 1 and the number of the GPU that has its weights, among the
    # worker's
    on_gpu: bytes
    cache: ExpertCacheCounts | None = None  # since the start; None: experts stay where they are
    on_disk: bytes = (
        b""  # uint8 [layers, experts]: 1 for an expert that is in no memory; empty: all are in one
    )
    disk: ExpertDiskCounts | None = None  # since the start; None: no expert is ever on disk


class WorkerError(msgspec.Struct, frozen=True, tag=True):
    """A call has failed and the worker ends; `message` has the exception's type and text."""

    message: str
