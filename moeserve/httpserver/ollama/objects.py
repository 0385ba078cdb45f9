"""The answers of Ollama's API, as typed dicts. Durations are nanoseconds."""

from __future__ import annotations

from typing import Any, Literal, NotRequired

from typing_extensions import TypedDict  # pydantic takes no other before Python 3.12


class PullLine(TypedDict):
    """A download's progress. `completed` and `total` are bytes of all files that were missing."""

    status: str
    digest: NotRequired[str]
    total: NotRequired[int]
    completed: NotRequired[int]


class Function(TypedDict):
    index: int
    name: str
    arguments: dict[str, Any]


class Call(TypedDict):
    id: str
    function: Function


class ChatMessage(TypedDict):
    role: Literal["assistant"]
    content: str
    thinking: NotRequired[str]
    tool_calls: NotRequired[list[Call]]


class Figures(TypedDict):
    """Token counts and durations, in an answer's last line."""

    done_reason: NotRequired[str]
    total_duration: NotRequired[int]
    load_duration: NotRequired[int]
    prompt_eval_count: NotRequired[int]
    prompt_eval_duration: NotRequired[int]
    eval_count: NotRequired[int]
    eval_duration: NotRequired[int]


class OllamaLogprob(TypedDict):
    token: str
    logprob: float
    bytes: list[int]


class OllamaTokenLogprob(OllamaLogprob):
    top_logprobs: NotRequired[list[OllamaLogprob]]


class Line(Figures):
    model: str
    created_at: str
    logprobs: NotRequired[list[OllamaTokenLogprob]]
    done: bool


class ChatLine(Line):
    """The answer, and each line of a stream."""

    message: ChatMessage


class GenerateLine(Line):
    """The answer, and each line of a stream."""

    response: str
    thinking: NotRequired[str]


class Details(TypedDict):
    parent_model: str
    format: str
    family: str
    families: list[str]
    parameter_size: str
    quantization_level: str


class Model(TypedDict):
    name: str
    model: str
    modified_at: str
    size: int
    digest: str
    details: Details


class Models(TypedDict):
    models: list[Model]


class RunningModel(Model):
    expires_at: str
    size_vram: int  # always 0: the bytes in GPU memory are not reported here
    context_length: int


class RunningModels(TypedDict):
    models: list[RunningModel]


class Shown(TypedDict):
    modelfile: str
    parameters: str
    template: str
    details: Details
    model_info: dict[str, Any]
    capabilities: list[str]
    modified_at: str


class OllamaVersion(TypedDict):
    version: str


class OllamaError(TypedDict):
    error: str
