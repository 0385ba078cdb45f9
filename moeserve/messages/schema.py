"""Every message that crosses a process border, as msgspec structs.

Encoded as msgpack by `codec.py`. Nothing here imports anything of ours. Integer vectors that may be
long (token ids, KV slots) travel as `bytes` of little-endian int32, so that neither side loops over them.

Times are seconds of `time.monotonic()`, which on Linux is one clock for all processes of a machine.
"""

from __future__ import annotations

from typing import Literal

import msgspec

FinishReason = Literal["stop", "length", "abort", "error"]


class Thinking(msgspec.Struct, frozen=True, array_like=True):
    """The part of an answer that is reasoning, for what holds only within it (a budget) or after it (a
    grammar). The model opens it with the answer's first token, or the prompt has opened it already."""

    open_token: int  # <think>
    close_token: int  # </think>
    ending: tuple[int, ...]  # how a thought that is cut short ends; holds close_token once
    is_open: bool  # the prompt ends within the thought
    budget: int | None = None  # tokens of thought, after which `ending` is forced


class SamplingParams(msgspec.Struct, frozen=True, omit_defaults=True):
    """How to choose tokens. Ranges are enforced by httpserver; the worker trusts them.

    Processing order: logit_bias, penalties, min_tokens mask, grammar mask, temperature, top_k, min_p, top_p,
    draw. Logprobs are of the raw logits (before any of that), as in vLLM's default.
    """

    max_tokens: int  # >= 0; httpserver resolves "left out" to max_model_len - prompt length
    min_tokens: int = 0  # stop_token_ids are masked until so many tokens came
    temperature: float = 1.0  # 0 is greedy
    top_k: int = 0  # 0 is off
    top_p: float = 1.0
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: dict[int, float] = {}
    seed: int = 0  # always set: httpserver draws one where the client gave none
    logprobs: int | None = None  # None: none; N: the sampled token's and the N most likely, N <= 20
    prompt_logprobs: int | None = None  # the same for prompt tokens 1.. (the first has none)
    stop_token_ids: tuple[int, ...] = ()  # end-of-sequence ids included, unless ignore_eos
    grammar: str = ""  # what the answer after any thought must match (llguidance's notation); "": anything
    thinking: Thinking | None = None  # set where there is a budget, or a grammar and the model may think


class TextOptions(msgspec.Struct, frozen=True, omit_defaults=True):
    """What the detokenizer needs to turn a request's tokens into text."""

    stop: tuple[str, ...] = ()
    include_stop: bool = False  # keep the stop string in the text
    skip_special_tokens: bool = True
    min_tokens: int = 0  # a stop string that is complete before so many tokens came is text as any other


class TokenLogprob(msgspec.Struct, frozen=True, array_like=True):
    """One position: the chosen token's natural-log probability, its rank (1 is most likely) and the top ones."""

    token_id: int
    logprob: float
    rank: int
    top_ids: list[int]
    top_logprobs: list[float]


class RequestContext(msgspec.Struct, frozen=True, array_like=True):
    """The HTTP request that a generation is of, for log lines and traces."""

    request_id: str = ""  # X-Request-Id, visible ASCII
    trace: str = ""  # W3C's traceparent of the span that it is a child of; "" where there are no traces


# ---------------------------------------------------------------- httpserver -> router


class GenerateRequest(msgspec.Struct, frozen=True, tag=True):
    id: int  # unique for the life of the server
    token_ids: bytes  # int32, at least one; len + max_tokens <= max_model_len
    sampling: SamplingParams
    text: TextOptions
    arrival: float
    priority: int = 0  # lower is sooner
    key_name: str = ""  # of the API key it came with; "" where there are none
    cache_salt: str = ""  # only requests with the same salt share cached prefixes
    context: RequestContext = RequestContext()
    progress: bool = False  # a PromptProgress is wanted for each step that reads on in its prompt


class Abort(msgspec.Struct, frozen=True, tag=True):
    """The client has gone. No answer is owed; the router frees everything within one step."""

    id: int


class ExpertUseRequest(msgspec.Struct, frozen=True, tag=True):
    """Asks for one ExpertUse; several that overlap get one together."""


# ---------------------------------------------------------------- router -> detokenizer


class DetokenizeStart(msgspec.Struct, frozen=True, tag=True):
    """A request was accepted: its text state begins."""

    id: int
    text: TextOptions
    context: RequestContext = RequestContext()


class DetokenizeEnd(msgspec.Struct, frozen=True, tag=True):
    """An aborted request: drop its text state, send nothing."""

    id: int


class Usage(msgspec.Struct, frozen=True, array_like=True):
    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int  # prompt tokens that were not computed anew
    queue_ms: float  # arrival to first prefill chunk planned
    prefill_ms: float  # first chunk planned to first token
    decode_ms: float  # first token to last token


class PromptProgress(msgspec.Struct, frozen=True, array_like=True):
    """How far a prompt has been read: `done` of `total` tokens, `cached` of them found rather than computed."""

    total: int
    cached: int
    done: int
    ms: float  # since its first chunk was planned


class TokensItem(msgspec.Struct, frozen=True, array_like=True):
    """New tokens of one request. `finish_reason` and `usage` come together, on the last item only.

    A stop token that ended the request is not in `token_ids`; it is in `stop_token`.
    """

    id: int
    token_ids: list[int]
    logprobs: list[TokenLogprob] | None = None  # as long as token_ids, where asked for
    prompt_logprobs: list[TokenLogprob] | None = None  # the next stretch of the prompt's, in order
    finish_reason: FinishReason | None = None
    stop_token: int | None = None
    usage: Usage | None = None
    progress: PromptProgress | None = None  # alone in its item


class TokensOut(msgspec.Struct, frozen=True, tag=True):
    items: list[TokensItem]


class RequestError(msgspec.Struct, frozen=True, tag=True):
    """The final message of a request that failed. Passed on by the detokenizer."""

    id: int
    status: int  # HTTP status
    message: str
    retry_after: int | None = None  # seconds, with a 503 that a later try may not get


# ---------------------------------------------------------------- detokenizer -> router


class StopHit(msgspec.Struct, frozen=True, tag=True):
    """A stop string was found; the router ends the request and sends its final TokensItem."""

    id: int
    num_tokens: int  # output tokens up to and including the one that completed the stop string


# ---------------------------------------------------------------- detokenizer -> httpserver


class TextItem(msgspec.Struct, frozen=True, array_like=True):
    """New text of one request; exactly one item per request has a finish_reason, the last."""

    id: int
    text: str
    token_ids: list[int]
    logprobs: list[TokenLogprob] | None = None
    prompt_logprobs: list[TokenLogprob] | None = None
    finish_reason: FinishReason | None = None
    stop_reason: str | int | None = None  # the stop string or stop token that ended it
    usage: Usage | None = None
    progress: PromptProgress | None = None


class TextOut(msgspec.Struct, frozen=True, tag=True):
    items: list[TextItem]


# ---------------------------------------------------------------- router -> httpserver


class HistogramCounts(msgspec.Struct, frozen=True, array_like=True):
    """Values so far: counts[i] of those <= bounds[i] and above bounds[i-1], the last count of those above."""

    bounds: list[float] = []
    counts: list[int] = []
    sum: float = 0.0


class LoadReport(msgspec.Struct, frozen=True, tag=True):
    """The router's gauges and running totals; sent when they change, at most every 50 ms, and when idle again."""

    num_running: int
    num_waiting: int
    kv_slots_used: int  # by running requests; cached prefixes that nobody uses do not count
    kv_slots_total: int
    prompt_tokens: int  # total computed or taken from cache since start
    generation_tokens: int
    cached_tokens: int
    preemptions: int
    aborts: int
    steps: int
    kv_slots_cached: int = 0  # by cached prefixes that nobody uses
    queued_tokens: int = 0  # to be computed before the waiting requests' next tokens
    repeated_tokens: int = 0  # total computed again after a pause
    decode_step_ms: HistogramCounts = HistogramCounts()  # compute time of steps without prompt tokens
    prefill_step_ms: HistogramCounts = HistogramCounts()  # and with
    idle_ms: HistogramCounts = HistogramCounts()  # the worker's wait between two steps of one request


class EngineReady(msgspec.Struct, frozen=True, tag=True):
    ready: WorkerReady


class EngineDead(msgspec.Struct, frozen=True, tag=True):
    """The worker is gone. The router has sent, or sends, a RequestError for each open request."""

    cause: str


# ---------------------------------------------------------------- worker -> httpserver


class LoadProgress(msgspec.Struct, frozen=True, tag=True):
    stage: str
    done: int  # bytes
    total: int


# ---------------------------------------------------------------- router <-> worker


class WorkerReady(msgspec.Struct, frozen=True, tag=True):
    """The worker's answer to `hello`: what the router may use."""

    num_kv_slots: int
    max_num_seqs: int  # request slots 0..max_num_seqs-1
    max_model_len: int
    vocab_size: int
    weight_bytes: int
    kv_bytes: int
    rss_bytes: int
    device: str  # "cpu (avx512_vnni, 2 threads)"
    max_num_batched_tokens: int = 512  # in a step
    num_experts: int = 0  # of a layer, 0 for a model without; a token reads experts_per_token of them
    experts_per_token: int = 0


class NewSeq(msgspec.Struct, frozen=True, array_like=True):
    """Binds a request slot: what the worker must know once. Overwrites whatever the slot held.

    The worker keeps, per request slot, a token table and a KV-slot table by position. `token_ids` fill
    the first; `prefix_slots` the first positions of the second (KV already computed: a cached prefix).
    On resume after a pause `token_ids` are prompt and output so far and `num_prompt` tells them apart.
    """

    req_slot: int
    token_ids: bytes  # int32
    num_prompt: int
    prefix_slots: bytes  # int32
    sampling: SamplingParams
    request_id: str = ""  # for log lines


class Row(msgspec.Struct, frozen=True, array_like=True):
    """Compute positions start .. start+count-1 of a request slot and write their KV to `kv_slots`.

    A row may read what another row of the same plan writes (a prefix that both share): in each layer, the KV
    of all rows is written before any row attends.

    A decode row has count 1: its token is the one the worker sampled last and put into its own token
    table, so the plan for step N+1 can be built and sent while step N runs.
    """

    req_slot: int
    start: int
    count: int
    kv_slots: bytes  # int32, `count` of them
    sample: bool  # sample the next token after the last position


class StepPlan(msgspec.Struct, frozen=True, tag=True):
    step: int
    new_seqs: list[NewSeq]
    rows: list[Row]


class Sampled(msgspec.Struct, frozen=True, array_like=True):
    token_id: int  # -1: none could be chosen, and the request ends with `error`
    logprob: TokenLogprob | None = None
    error: str | None = None


class StepResult(msgspec.Struct, frozen=True, tag=True):
    """`sampled` has one entry per row of the plan with `sample`, in order; `prompt_logprobs` is keyed by row
    index and covers, for a chunk start..start+count-1, the tokens at start+1..start+count within the prompt."""

    step: int
    sampled: list[Sampled]
    prompt_logprobs: dict[int, list[TokenLogprob]]
    compute_ms: float
    idle_ms: float  # how long the worker waited for this plan after the step before


class ExpertUse(msgspec.Struct, frozen=True, tag=True):
    """How often each expert was routed to since the start, and where it lives now. Goes on to httpserver."""

    layers: int
    experts: int  # of a layer
    experts_per_token: int
    tokens: bytes  # int64 [layers, experts]: tokens routed to each
    on_gpu: bytes  # uint8 [layers, experts]: 1 where the expert lives in GPU memory


class WorkerError(msgspec.Struct, frozen=True, tag=True):
    message: str


# ---------------------------------------------------------------- any process -> launcher, launcher -> any


class ProcessReady(msgspec.Struct, frozen=True, tag=True):
    process: str
    pid: int
    url: str | None = None  # from httpserver: where it listens, with the port it got
    engine: WorkerReady | None = None  # from the worker: what the launcher reports as ready


class ProcessFailed(msgspec.Struct, frozen=True, tag=True):
    """A start-up error to be shown to the user as it stands: it names the cause and the remedy."""

    process: str
    message: str


class Shutdown(msgspec.Struct, frozen=True, tag=True):
    """Finish and exit. Sent to router and detokenizer after the httpserver has drained."""


ToRouter = GenerateRequest | Abort | ExpertUseRequest | StopHit | Shutdown
ToDetokenizer = DetokenizeStart | DetokenizeEnd | TokensOut | RequestError | Shutdown
ToHttp = TextOut | RequestError | LoadReport | ExpertUse | EngineReady | EngineDead | LoadProgress
ToLauncher = ProcessReady | ProcessFailed
FromWorker = WorkerReady | StepResult | ExpertUse | WorkerError
