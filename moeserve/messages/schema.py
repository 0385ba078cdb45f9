"""The messages between processes, as msgspec structs. Those of router and worker are in `steps.py`, the router's counts
in `router_metrics.py`.

`codec.py` encodes them as msgpack. From the project, this module imports only other modules of this package.
Integer vectors that may be long (token ids, KV slots) are `bytes` of little-endian int32, so that neither side loops
over them.

Times are seconds of `time.monotonic()`, which on Linux is one clock for all processes of a machine. Fields named `_ms`
are milliseconds.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, Literal

import msgspec

from moeserve.messages.adapters import (
    AdapterAnswer,
    AdaptersReport,
    AdaptersServed,
    LoadAdapter,
    ServedAdapter,
    UnloadAdapter,
)
from moeserve.messages.beams import BeamParams
from moeserve.messages.pictures import EncodePicture, PictureEncoded, PictureRefused
from moeserve.messages.prompt_embeddings import EmbeddingSpan
from moeserve.messages.reasoning import EarlyEnd
from moeserve.messages.refusal import Refusal
from moeserve.messages.router_metrics import LoadReport
from moeserve.messages.sampling import FinishReason, RequestContext, SamplingParams, TextOptions, TokenLogprob
from moeserve.messages.steps import ExpertUse, StepResult, WorkerError, WorkerReady

# The lowest priority. Its requests are computed in the background, in a small share of the time while others run.
BACKGROUND_PRIORITY: Final = (1 << 31) - 1

# ---------------------------------------------------------------- httpserver -> router


class Resumed(msgspec.Struct, frozen=True, array_like=True):
    """The part of an answer that the client already has, when the router or detokenizer that had the request was lost.
    The answer continues from there."""

    token_ids: bytes  # int32: the answer so far
    num_scored: int  # prompt positions whose logprobs the client has
    # Cached tokens of the prompt when the request first ran; None if no token was sampled yet.
    cached_tokens: int | None
    first_token_at: float | None


class GenerateRequest(msgspec.Struct, frozen=True, tag=True):
    id: int  # unique while the server runs
    token_ids: bytes  # int32, at least one; len + max_tokens <= max_model_len
    sampling: SamplingParams
    text: TextOptions
    arrival: float
    priority: int = 0  # lower is sooner, up to BACKGROUND_PRIORITY
    key_name: str = ""  # name of the client's API key; "" without API keys
    cache_salt: str = ""  # only requests with the same salt share cached prefixes
    adapter: str = ""  # key of a LoRA adapter (ServedAdapter); "": the model itself
    context: RequestContext = RequestContext()
    progress: bool = False  # send a PrefillProgress after each step that prefills a part of its prompt
    resumed: Resumed | None = None
    # Set if the request is one answer of a beam search, whose text comes all at the end.
    beams: BeamParams | None = None
    early_end: EarlyEnd | None = None  # None: every stop token ends the answer
    spans: list[
        EmbeddingSpan
    ] = []  # sorted: positions of the prompt that are embeddings; `token_ids` has placeholders there


class GenerateBatch(msgspec.Struct, frozen=True, tag=True):
    """The choices of an HTTP request, which have the same grammar. The grammar may have megabytes, so it is sent
    once."""

    grammar: str
    requests: list[GenerateRequest]  # their `sampling` has no grammar

    @classmethod
    def of(cls, requests: Sequence[GenerateRequest]) -> GenerateBatch:
        """Returns a batch of requests with the same grammar."""
        without = [_with_grammar(request, "") for request in requests]
        return cls(requests[0].sampling.grammar, without)

    def unpacked(self) -> list[GenerateRequest]:
        """Returns the requests with their grammar, which all share as one object."""
        return [_with_grammar(request, self.grammar) for request in self.requests]


def _with_grammar(request: GenerateRequest, grammar: str) -> GenerateRequest:
    replace = msgspec.structs.replace
    return replace(request, sampling=replace(request.sampling, grammar=grammar))


class Abort(msgspec.Struct, frozen=True, tag=True):
    """The client has disconnected. No final message follows; the router frees everything within one step."""

    id: int


class ExpertUseRequest(msgspec.Struct, frozen=True, tag=True):
    """Asks for an ExpertUse. Requests that overlap get a single one."""


class EngineReadyRequest(msgspec.Struct, frozen=True, tag=True):
    """Asks for an EngineReady, which is sent once a worker is ready. httpserver sends it when it starts, and when it is
    told of a lost router."""


# ---------------------------------------------------------------- router -> detokenizer


class RouterStarted(msgspec.Struct, frozen=True, tag=True):
    """The first message of a router. Requests of an earlier router are void; httpserver sends them again under other
    ids."""


class DetokenizeStart(msgspec.Struct, frozen=True, tag=True):
    """A request was accepted: create its text state, as it is after `output`."""

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
    disk_tokens: int = 0  # cached tokens that were read from disk
    ram_tokens: int = 0  # cached tokens that were read from the tier in RAM
    draft_tokens: int = 0  # tokens drafted
    accepted_draft_tokens: int = 0  # drafted tokens that were accepted


class PrefillProgress(msgspec.Struct, frozen=True, array_like=True):
    """The progress of a prompt's prefill: `done` of its `total` tokens. `cached` of the done tokens were found in the
    prefix cache."""

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
    logprobs: list[TokenLogprob] | None = None  # one for each of token_ids, if requested
    prompt_logprobs: list[TokenLogprob] | None = None  # of the next prompt positions, in order
    finish_reason: FinishReason | None = None
    stop_token: int | None = None
    usage: Usage | None = None
    progress: PrefillProgress | None = None  # in an item without tokens
    cached_tokens: int | None = None  # with the first token: prompt tokens that were in the prefix cache
    score: float | None = None  # of a beam search's answer; see BeamParams


class TokensOut(msgspec.Struct, frozen=True, tag=True):
    items: list[TokensItem]


class RequestError(msgspec.Struct, frozen=True, tag=True):
    """The final message of a request that failed. The detokenizer forwards it to httpserver."""

    id: int
    status: int  # HTTP status
    message: str
    retry_after: int | None = None  # seconds, with a 503 after which a retry may succeed
    refusal: Refusal | None = None  # None: an error of the server, or the status alone says why


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
    score: float | None = None


class TextOut(msgspec.Struct, frozen=True, tag=True):
    items: list[TextItem]


# ---------------------------------------------------------------- router -> httpserver


class EngineReady(msgspec.Struct, frozen=True, tag=True):
    ready: WorkerReady
    adapters: list[ServedAdapter] = []


class EngineLost(msgspec.Struct, frozen=True, tag=True):
    """There is no worker until the next EngineReady. Open requests wait; requests that the loss ends get a
    RequestError."""

    cause: str


# ---------------------------------------------------------------- launcher -> httpserver


class ProcessLost(msgspec.Struct, frozen=True, tag=True):
    """This process has ended, and another is started. Messages in it are lost, so httpserver sends its open requests
    again."""

    process: Literal["router", "detokenizer", "visualserver"]
    cause: str
    by_itself: bool  # it was not killed from outside


# ---------------------------------------------------------------- worker -> httpserver


class LoadProgress(msgspec.Struct, frozen=True, tag=True):
    stage: str
    done: int  # bytes, or kernels where the stage compiles them
    total: int


# ---------------------------------------------------------------- any process -> launcher, launcher -> any


class ProcessReady(msgspec.Struct, frozen=True, tag=True):
    process: str
    pid: int
    url: str | None = None  # from httpserver: where it listens, with its actual port
    engine: WorkerReady | None = None  # from the worker; the launcher's ready line shows it


class ProcessFailed(msgspec.Struct, frozen=True, tag=True):
    """A start-up error, shown to the user unchanged: it names the cause and the remedy."""

    process: str
    message: str


class ReplaceWorker(msgspec.Struct, frozen=True, tag=True):
    """Sent by the router: the worker cannot be used any more, whether or not its process still lives."""

    pid: int
    cause: str


class WorkerExited(msgspec.Struct, frozen=True, tag=True):
    """Sent by the launcher to the router, before another worker is started."""

    cause: str
    by_itself: bool  # it crashed, failed or hung; False: it was killed or stopped from outside


class HttpserverLost(msgspec.Struct, frozen=True, tag=True):
    """Sent by the launcher to the router: the httpserver that had the requests with ids below `first_id` is gone, so
    nothing reads their answers. The next httpserver's ids begin at `first_id`."""

    first_id: int


class HeartbeatRequest(msgspec.Struct, frozen=True, tag=True):
    """Sent by the launcher to httpserver, the router and the detokenizer: a process that does not answer hangs."""


class Heartbeat(msgspec.Struct, frozen=True, tag=True):
    """The answer to a HeartbeatRequest. The detokenizer also sends one to httpserver every second."""

    process: str


class Shutdown(msgspec.Struct, frozen=True, tag=True):
    """Finish and exit. The launcher sends it to the router and the detokenizer after httpserver has drained."""


ToRouter = (
    GenerateRequest
    | GenerateBatch
    | Abort
    | ExpertUseRequest
    | EngineReadyRequest
    | LoadAdapter
    | UnloadAdapter
    | StopHit
    | WorkerExited
    | HttpserverLost
    | HeartbeatRequest
    | Shutdown
)
ToDetokenizer = (
    RouterStarted | DetokenizeStart | DetokenizeEnd | TokensOut | RequestError | HeartbeatRequest | Shutdown
)
ToHttp = (
    TextOut
    | RequestError
    | LoadReport
    | ExpertUse
    | EngineReady
    | EngineLost
    | ProcessLost
    | LoadProgress
    | AdaptersServed
    | AdapterAnswer
    | PictureEncoded
    | PictureRefused
    | Heartbeat
    | HeartbeatRequest
)
ToVisualServer = EncodePicture | HeartbeatRequest | Shutdown
ToLauncher = ProcessReady | ProcessFailed | ReplaceWorker | Heartbeat
FromWorker = WorkerReady | StepResult | ExpertUse | AdaptersReport | WorkerError
