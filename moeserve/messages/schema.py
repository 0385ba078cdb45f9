"""Every message between processes, as msgspec structs.

`codec.py` encodes them as msgpack. Of the project, this module imports `sampling.py` and `pages.py` alone.
Integer vectors that may be long (token ids, KV slots) are `bytes` of little-endian int32, so that neither side loops
over them.

Times are seconds of `time.monotonic()`, which on Linux is one clock for all processes of a machine. Fields named `_ms`
are milliseconds.
"""

from __future__ import annotations

from typing import Final, Literal

import msgspec

from moeserve.messages.expert_cache import ExpertCacheCounts
from moeserve.messages.pages import DiskCounts, PageOrders, PageReport
from moeserve.messages.sampling import FinishReason, RequestContext, SamplingParams, TextOptions, TokenLogprob

# ---------------------------------------------------------------- httpserver -> router


class Resumed(msgspec.Struct, frozen=True, array_like=True):
    """What a client has of a request that a lost router or detokenizer had. The rest follows from it."""

    token_ids: bytes  # int32: the answer so far
    num_scored: int  # prompt positions whose logprobs it has
    cached_tokens: (
        int | None
    )  # of the prompt, when it was first bound; None: without a token it does not matter
    first_token_at: float | None


class GenerateRequest(msgspec.Struct, frozen=True, tag=True):
    id: int  # unique while the server runs
    token_ids: bytes  # int32, at least one; len + max_tokens <= max_model_len
    sampling: SamplingParams
    text: TextOptions
    arrival: float
    priority: int = 0  # lower is sooner
    key_name: str = ""  # name of the client's API key; "" without API keys
    cache_salt: str = ""  # only requests with the same salt share cached prefixes
    context: RequestContext = RequestContext()
    progress: bool = False  # send a PrefillProgress after each step that prefills a part of its prompt
    resumed: Resumed | None = None


class Abort(msgspec.Struct, frozen=True, tag=True):
    """The client has disconnected. No final message follows; the router frees everything within one step."""

    id: int


class ExpertUseRequest(msgspec.Struct, frozen=True, tag=True):
    """Requests one ExpertUse; requests that overlap get one together."""


# ---------------------------------------------------------------- router -> detokenizer


class DetokenizeStart(msgspec.Struct, frozen=True, tag=True):
    """A request was accepted: create its text state, that after `output`."""

    id: int
    text: TextOptions
    context: RequestContext = RequestContext()
    output: bytes = b""  # int32: tokens of the answer that the client has


class DetokenizeEnd(msgspec.Struct, frozen=True, tag=True):
    """A request was aborted: drop its text state and send nothing."""

    id: int


class Usage(msgspec.Struct, frozen=True, array_like=True):
    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int  # prompt tokens whose KV was in the prefix cache
    queue_ms: float  # arrival to first prefill chunk planned
    prefill_ms: float  # first chunk planned to first token
    decode_ms: float  # first token to last token
    disk_tokens: int = 0  # of the cached ones, those that were read from disk for it


class PrefillProgress(msgspec.Struct, frozen=True, array_like=True):
    """How far a prompt has been prefilled: `done` of `total` tokens, `cached` of them found in the prefix cache."""

    total: int
    cached: int
    done: int
    ms: float  # since its first chunk was planned


class TokensItem(msgspec.Struct, frozen=True, array_like=True):
    """New tokens of one request. `finish_reason` and `usage` are set together, on the last item only.

    A stop token that ended the request is in `stop_token`, not in `token_ids`.
    """

    id: int
    token_ids: list[int]
    logprobs: list[TokenLogprob] | None = None  # as long as token_ids, where requested
    prompt_logprobs: list[TokenLogprob] | None = None  # of the next prompt positions, in order
    finish_reason: FinishReason | None = None
    stop_token: int | None = None
    usage: Usage | None = None
    progress: PrefillProgress | None = None  # in an item without tokens
    cached_tokens: int | None = None  # with the first token: prompt tokens that were in the prefix cache


class TokensOut(msgspec.Struct, frozen=True, tag=True):
    items: list[TokensItem]


class RequestError(msgspec.Struct, frozen=True, tag=True):
    """The final message of a request that failed. The detokenizer forwards it to httpserver."""

    id: int
    status: int  # HTTP status
    message: str
    retry_after: int | None = None  # seconds, with a 503 after which a retry may succeed


# ---------------------------------------------------------------- detokenizer -> router


class StopHit(msgspec.Struct, frozen=True, tag=True):
    """A stop string was found: the router ends the request and sends its final TokensItem."""

    id: int
    num_tokens: int  # output tokens up to and including the one that completed the stop string


# ---------------------------------------------------------------- detokenizer -> httpserver


class TextItem(msgspec.Struct, frozen=True, array_like=True):
    """New text of one request. Exactly one item of a request has a finish_reason, the last."""

    id: int
    text: str
    token_ids: list[int]
    logprobs: list[TokenLogprob] | None = None
    prompt_logprobs: list[TokenLogprob] | None = None
    finish_reason: FinishReason | None = None
    stop_reason: str | int | None = None  # the stop string or stop token that ended it
    usage: Usage | None = None
    progress: PrefillProgress | None = None
    cached_tokens: int | None = None


class TextOut(msgspec.Struct, frozen=True, tag=True):
    items: list[TextItem]


# ---------------------------------------------------------------- router -> httpserver


class HistogramCounts(msgspec.Struct, frozen=True, array_like=True):
    """counts[i] is the number of values <= bounds[i] and above bounds[i-1]; the last count is of those above all."""

    bounds: list[float] = []
    counts: list[int] = []
    sum: float = 0.0


class LoadReport(msgspec.Struct, frozen=True, tag=True):
    """The router's gauges and totals since the start. Sent when they change, at most every 50 ms, at once when the last
    request ends, and at least every second: a router that sends none is stuck."""

    num_running: int
    num_waiting: int
    kv_slots_used: int  # by running requests; unreferenced cached prefixes do not count
    kv_slots_total: int
    prompt_tokens: int  # computed, or found in the prefix cache
    generation_tokens: int
    cached_tokens: int
    preemptions: int
    aborts: int
    steps: int
    kv_slots_cached: int = 0  # by cached prefixes that no running request references
    queued_tokens: int = 0  # to compute before the waiting requests' next tokens
    repeated_tokens: int = 0  # recomputed after preemptions
    decode_step_ms: HistogramCounts = HistogramCounts()  # compute time of steps without prompt tokens
    prefill_step_ms: HistogramCounts = HistogramCounts()  # compute time of steps with prompt tokens
    idle_ms: HistogramCounts = HistogramCounts()  # the worker's wait between two steps of one request
    kernels_compiled: int = 0  # while serving
    state_slots_total: int = 0  # of recurrent state; 0: the model has none
    state_slots_running: int = 0  # by running requests
    state_slots_snapshots: int = 0  # by snapshots in the prefix cache
    state_snapshot_hits: int = 0  # requests that continued from a snapshot
    state_snapshot_evictions: int = 0  # snapshots given up for another state; not those whose KV was evicted
    engine_losses: int = 0  # workers that were lost
    continued: int = 0  # requests that a lost worker was computing, and the next one went on with
    disk: DiskCounts = DiskCounts()  # of the disk tier
    expert_cache: ExpertCacheCounts = ExpertCacheCounts()


class EngineReady(msgspec.Struct, frozen=True, tag=True):
    ready: WorkerReady


class EngineLost(msgspec.Struct, frozen=True, tag=True):
    """There is no worker until the next EngineReady. Open requests wait; those that end of it get a RequestError."""

    cause: str


# ---------------------------------------------------------------- launcher -> httpserver


class ProcessLost(msgspec.Struct, frozen=True, tag=True):
    """This process has ended, and another is started. What was on its way through it is lost: httpserver sends its open
    requests again."""

    process: Literal["router", "detokenizer"]
    cause: str
    by_itself: bool  # it was not killed from outside


# ---------------------------------------------------------------- worker -> httpserver


class LoadProgress(msgspec.Struct, frozen=True, tag=True):
    stage: str
    done: int  # bytes, or kernels where the stage compiles them
    total: int


# ---------------------------------------------------------------- router <-> worker


class MeasuredStep(msgspec.Struct, frozen=True, array_like=True):
    """How long a step took at the start: of rows that decode, and of a prompt's tokens."""

    rows: int
    decode_context: int  # sum of the positions that the rows attend to
    start: int  # of the prompt's tokens
    prompt: int
    ms: float


class WorkerReady(msgspec.Struct, frozen=True, tag=True):
    """What the router may use of a worker; `Worker.ready` returns it."""

    num_kv_slots: int
    max_num_seqs: int  # request slots 0..max_num_seqs-1
    max_model_len: int
    vocab_size: int
    weight_bytes: int
    kv_bytes: int
    rss_bytes: int
    device: str  # "cpu (avx512_vnni, 2 threads)"
    max_num_batched_tokens: int = 512  # tokens of one step
    num_experts: int = 0  # of a layer; 0: a dense model. A token is routed to experts_per_token of them
    experts_per_token: int = 0
    num_state_slots: int = (
        0  # slots 0.. of recurrent state, running or snapshot; 0: the model has no recurrent state
    )
    prompts_first: bool = False  # steps are worth most when prompts fill them: all experts are on a GPU
    kv_page_tokens: int = 0  # of a page of the disk tier; 0: there is none
    kv_page_bytes: int = 0
    measured_steps: list[MeasuredStep] = []


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


class Row(msgspec.Struct, frozen=True, array_like=True):
    """Computes positions start .. start+count-1 of a request slot and writes their KV to `kv_slots`.

    A row may read KV that another row of the same plan writes (a shared prefix): in each layer, the KV of all rows is
    written before any row attends.

    A decode row has count 1. Its token is the one that the worker sampled last and appended to its own token table, so
    that the plan of step N+1 can be built and sent while step N runs.
    """

    req_slot: int
    start: int
    count: int
    kv_slots: bytes  # int32, `count` of them
    sample: bool  # sample the next token after the last position


class StepPlan(msgspec.Struct, frozen=True, tag=True, omit_defaults=True):
    """One step: page orders and state copies, then new sequences, then rows. Without rows, the worker waits a moment
    for pages that are under way, so that a router that awaits them need not ask all the time.

    `state_copies` are pairs (source, destination) of state slots, int32 [n, 2], executed one after the other before any
    row. Source -1 zeroes the destination. Plans are executed in order, so a copy reads the state that the rows of the
    plan before have left, although that plan may still run when this one is sent.
    """

    step: int
    new_seqs: list[NewSeq]
    rows: list[Row]
    state_copies: bytes = b""
    pages: PageOrders | None = None


COSTLY_MASK_MS: Final = 0.1  # 63 rows of 2 ms each would make a step of 5 ms last 126


class Sampled(msgspec.Struct, frozen=True, array_like=True):
    token_id: int  # -1: none could be sampled, and the request ends with `error`
    logprob: TokenLogprob | None = None
    error: str | None = None
    late: bool = (
        False  # its grammar was not ready: nothing is sampled for this request until it is bound again
    )


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


class ExpertUse(msgspec.Struct, frozen=True, tag=True):
    """Tokens routed to each expert since the start, and where its weights are. The router forwards it to httpserver."""

    layers: int
    experts: int  # of a layer
    experts_per_token: int
    tokens: bytes  # int64 [layers, experts]: tokens routed to each
    on_gpu: bytes  # uint8 [layers, experts]: 1 where the expert's weights are in GPU memory


class WorkerError(msgspec.Struct, frozen=True, tag=True):
    """A call has failed and the worker ends; `message` has the exception's type and text."""

    message: str


# ---------------------------------------------------------------- any process -> launcher, launcher -> any


class ProcessReady(msgspec.Struct, frozen=True, tag=True):
    process: str
    pid: int
    url: str | None = None  # from httpserver: where it listens, with its actual port
    engine: WorkerReady | None = None  # from the worker; the launcher's ready line shows it


class ProcessFailed(msgspec.Struct, frozen=True, tag=True):
    """A start-up error, shown to the user as it is: it names the cause and the remedy."""

    process: str
    message: str


class ReplaceWorker(msgspec.Struct, frozen=True, tag=True):
    """From the router: this worker is of no use any more, whether its process still lives or not."""

    pid: int
    cause: str


class WorkerExited(msgspec.Struct, frozen=True, tag=True):
    """From the launcher to the router, before another worker is started."""

    cause: str
    by_itself: bool  # it crashed, failed or hung; False: it was killed or stopped from outside


class HeartbeatRequest(msgspec.Struct, frozen=True, tag=True):
    """From the launcher to the router and the detokenizer: a process that does not answer hangs."""


class Heartbeat(msgspec.Struct, frozen=True, tag=True):
    """The answer."""

    process: str


class Shutdown(msgspec.Struct, frozen=True, tag=True):
    """Finish and exit. The launcher sends it to the router and the detokenizer after httpserver has drained."""


ToRouter = GenerateRequest | Abort | ExpertUseRequest | StopHit | WorkerExited | HeartbeatRequest | Shutdown
ToDetokenizer = DetokenizeStart | DetokenizeEnd | TokensOut | RequestError | HeartbeatRequest | Shutdown
ToHttp = (
    TextOut | RequestError | LoadReport | ExpertUse | EngineReady | EngineLost | ProcessLost | LoadProgress
)
ToLauncher = ProcessReady | ProcessFailed | ReplaceWorker | Heartbeat
FromWorker = WorkerReady | StepResult | ExpertUse | WorkerError
