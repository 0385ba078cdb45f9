"""What llama-server's API answers, as typed dicts. Times are milliseconds."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal, NotRequired

from typing_extensions import TypedDict  # pydantic takes no other before Python 3.12

from moeserve.httpserver.generation.usage import PromptProgress
from moeserve.sampling.parameters import PARAMETERS, TYPES, SamplerSettings, settings_of


class LlamaTimings(TypedDict):
    """A rate is null if its phase took no time. `prompt_n` leaves out the `cache_n` tokens from the cache."""

    cache_n: int
    prompt_n: int
    prompt_ms: float
    prompt_per_token_ms: float | None
    prompt_per_second: float | None
    predicted_n: int
    predicted_ms: float
    predicted_per_token_ms: float | None
    predicted_per_second: float | None


def sampler_object(settings: SamplerSettings) -> dict[str, float]:
    """The settings under llama-server's names."""
    values = settings_of(settings).items()
    return {PARAMETERS[name].name_in("llama_server", name): value for name, value in values}


if TYPE_CHECKING:
    GenerationSettings = dict[str, Any]
else:
    GenerationSettings = TypedDict(
        "GenerationSettings",
        {
            "seed": NotRequired[int],
            **{of.name_in("llama_server", name): TYPES[name] for name, of in PARAMETERS.items()},
            "n_predict": int,
            "stop": NotRequired[list[str]],
        },
    )
    GenerationSettings.__doc__ = "The parameters that an answer was made with, its seed included."


class CompletionChunk(TypedDict):
    """A piece of a streamed answer."""

    index: int
    content: str
    tokens: list[int]
    stop: bool
    id_slot: int
    tokens_predicted: int
    tokens_evaluated: int
    prompt_progress: NotRequired[PromptProgress]


class LlamaCompletion(CompletionChunk):
    """A whole answer, and the last chunk of a stream, whose `content` is what the chunks before lack."""

    model: str
    prompt: str | list[int]
    generation_settings: GenerationSettings
    stop_type: Literal["eos", "limit", "word"]
    stopping_word: str
    truncated: bool
    tokens_cached: int
    timings: LlamaTimings


class DefaultSettings(TypedDict):
    n_ctx: int
    params: GenerationSettings


class Modalities(TypedDict):
    vision: bool
    audio: bool


class Props(TypedDict):
    default_generation_settings: DefaultSettings
    total_slots: int
    model_alias: str
    model_path: str
    chat_template: str
    bos_token: str
    eos_token: str
    modalities: Modalities
    build_info: str
