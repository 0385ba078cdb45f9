"""What Ollama's API answers, as typed dicts. Durations are nanoseconds."""

from __future__ import annotations

from typing import Any, Literal, NotRequired

from typing_extensions import TypedDict  # pydantic takes no other before Python 3.12


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
    """The figures of an answer's last line."""

    done_reason: NotRequired[str]
    total_duration: NotRequired[int]
    load_duration: NotRequired[int]
    prompt_eval_count: NotRequired[int]
    prompt_eval_duration: NotRequired[int]
    eval_count: NotRequired[int]
    eval_duration: NotRequired[int]


class ChatLine(Figures):
    """The answer, and each line of a stream."""

    model: str
    created_at: str
    message: ChatMessage
    done: bool


class GenerateLine(Figures):
    """The answer, and each line of a stream."""

    model: str
    created_at: str
    response: str
    thinking: NotRequired[str]
    done: bool


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
