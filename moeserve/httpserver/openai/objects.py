"""What the API answers, as typed dicts: mypy checks them, FastAPI documents them, orjson writes them as they
are (a pydantic model per streamed token would cost more than the token's detokenisation)."""

from __future__ import annotations

from typing import Literal, NotRequired

from typing_extensions import TypedDict  # pydantic takes no other before Python 3.12

FinishReason = Literal["stop", "length", "abort", "error"]
ChatFinishReason = FinishReason | Literal["tool_calls"]


class PromptTokensDetails(TypedDict):
    cached_tokens: int


class CompletionTokensDetails(TypedDict):
    reasoning_tokens: int


class UsageInfo(TypedDict):
    """OpenAI's usage. A prompt counts once, however many choices it got."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails
    completion_tokens_details: CompletionTokensDetails


class Timings(TypedDict):
    """Where the time of a request went. With several choices the milliseconds are those of the slowest one
    and the tokens those of all together; a rate is over the time from the first one's start to the last one's end, and
    null where its phase took no time."""

    queue_ms: float
    prefill_ms: float
    decode_ms: float
    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int
    prefill_tokens_per_second: float | None
    decode_tokens_per_second: float | None


class PromptProgress(TypedDict):
    """llama-server's: `processed` of `total` prompt tokens, `cache` of them not computed anew, `time_ms` since
    the first of them was."""

    total: int
    cache: int
    processed: int
    time_ms: float


class CompletionLogprobs(TypedDict):
    """Parallel lists over tokens; `text_offset` counts characters of the tokens' own strings."""

    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None]
    text_offset: list[int]


class CompletionChoice(TypedDict):
    """`prompt_token_ids` is null but in a stream's first chunk of the choice."""

    index: int
    text: str
    logprobs: CompletionLogprobs | None
    finish_reason: FinishReason | None
    stop_reason: str | int | None
    token_ids: NotRequired[list[int]]
    prompt_token_ids: NotRequired[list[int] | None]


class Completion(TypedDict):
    """The answer, and each chunk of a stream (where usage comes only when asked for)."""

    id: str
    object: Literal["text_completion"]
    created: int
    model: str
    choices: list[CompletionChoice]
    usage: NotRequired[UsageInfo | None]
    timings: NotRequired[Timings]
    prompt_progress: NotRequired[PromptProgress]


class TopLogprob(TypedDict):
    token: str
    logprob: float
    bytes: list[int]


class ChatLogprob(TypedDict):
    token: str
    logprob: float
    bytes: list[int]
    top_logprobs: list[TopLogprob]


class ChatLogprobs(TypedDict):
    content: list[ChatLogprob]
    refusal: None


class FunctionCall(TypedDict):
    name: str
    arguments: str


class ToolCall(TypedDict):
    id: str
    type: Literal["function"]
    function: FunctionCall


class FunctionDelta(TypedDict):
    name: NotRequired[str]
    arguments: str


class ToolCallDelta(TypedDict):
    """The first of a call has its id and name, the others more of its arguments."""

    index: int
    id: NotRequired[str]
    type: NotRequired[Literal["function"]]
    function: FunctionDelta


class ChatMessage(TypedDict):
    """`reasoning` and `reasoning_content` are the same thought, where there was one; `content` is null beside
    calls without a word."""

    role: Literal["assistant"]
    content: str | None
    refusal: None
    reasoning: NotRequired[str]
    reasoning_content: NotRequired[str]
    tool_calls: NotRequired[list[ToolCall]]


class ChatChoice(TypedDict):
    index: int
    message: ChatMessage
    logprobs: ChatLogprobs | None
    finish_reason: ChatFinishReason | None
    stop_reason: str | int | None


class ChatCompletion(TypedDict):
    id: str
    object: Literal["chat.completion"]
    created: int
    model: str
    choices: list[ChatChoice]
    usage: UsageInfo
    timings: Timings


class ChatDelta(TypedDict):
    role: NotRequired[Literal["assistant"]]
    content: NotRequired[str]
    reasoning: NotRequired[str]
    reasoning_content: NotRequired[str]
    tool_calls: NotRequired[list[ToolCallDelta]]


class ChatChunkChoice(TypedDict):
    index: int
    delta: ChatDelta
    logprobs: ChatLogprobs | None
    finish_reason: ChatFinishReason | None
    stop_reason: NotRequired[str | int | None]


class ChatCompletionChunk(TypedDict):
    id: str
    object: Literal["chat.completion.chunk"]
    created: int
    model: str
    choices: list[ChatChunkChoice]
    usage: NotRequired[UsageInfo | None]
    timings: NotRequired[Timings]
    prompt_progress: NotRequired[PromptProgress]


class GenerateToken(TypedDict):
    id: int | None
    text: str
    logprob: float | None
    special: bool
    count_output_tokens: NotRequired[int]
    prompt_tokens: NotRequired[int]


class GenerateResponse(TypedDict):
    """LightLLM's /generate: per-choice values are lists where n > 1, `generated_text` always is one."""

    generated_text: list[str]
    count_output_tokens: int | list[int]
    finish_reason: FinishReason | list[FinishReason | None] | None
    prompt_tokens: int
    tokens: NotRequired[list[GenerateToken] | list[list[GenerateToken]]]
    timings: NotRequired[Timings]


class GenerateEvent(TypedDict):
    """One token of LightLLM's /generate_stream. `details` comes with the last one."""

    token: GenerateToken
    generated_text: str | None
    finished: bool
    finish_reason: FinishReason | None
    details: Timings | None


class ModelCard(TypedDict):
    id: str
    object: Literal["model"]
    created: int
    owned_by: str
    root: str
    parent: None
    max_model_len: int | None


class ModelList(TypedDict):
    object: Literal["list"]
    data: list[ModelCard]


class Health(TypedDict):
    """`stage` and `fraction` while loading, `cause` when the engine is dead."""

    status: Literal["ok", "loading", "dead", "draining"]
    stage: NotRequired[str]
    fraction: NotRequired[float]
    cause: NotRequired[str]


class Experts(TypedDict):
    object: Literal["experts"]
    model: str
    layers: int
    experts: int  # of a layer
    experts_per_token: int
    counts: list[list[int]]  # [layers][experts]: tokens routed to each since the start
    gpu_experts: list[list[int]]  # of each layer: the ids of those in GPU memory, ascending


class ExpertsHeat(TypedDict):
    """The file that --expert-heat reads, as docs/placement.md describes it."""

    format: Literal["moeserve-expert-heat"]
    version: Literal[1]
    model: str
    layers: int
    experts: int
    experts_per_token: int
    counts: list[list[int]]
