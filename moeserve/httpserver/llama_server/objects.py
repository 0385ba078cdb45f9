"""The answers of llama-server's API, as typed dicts. Times are milliseconds."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final, Literal, NotRequired

from typing_extensions import TypedDict  # pydantic takes no other before Python 3.12

from moeserve.httpserver.generation.chat.model_text import ModelText
from moeserve.httpserver.generation.logprobs import finite
from moeserve.httpserver.generation.usage import PromptProgress
from moeserve.messages.sampling import TokenLogprob
from moeserve.sampling.parameters import PARAMETERS, TYPES, SamplerSettings, settings_of

_ABSENT: Final = object()


class LlamaTimings(TypedDict):
    """Token counts, times and rates of an answer. A rate is null if its phase took no time. `prompt_n` does not count
    the `cache_n` tokens from the cache."""

    cache_n: int
    prompt_n: int
    prompt_ms: float
    prompt_per_token_ms: float | None
    prompt_per_second: float | None
    predicted_n: int
    predicted_ms: float
    predicted_per_token_ms: float | None
    predicted_per_second: float | None
    draft_n: NotRequired[int]  # only if tokens were drafted
    draft_n_accepted: NotRequired[int]


def sampler_object(settings: SamplerSettings) -> dict[str, float]:
    """Returns the settings under llama-server's names."""
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


class TokenProbability(TypedDict):
    """A token's log-probability in the model's distribution, before the samplers."""

    id: int
    token: str
    bytes: list[int]
    logprob: float


class CompletionProbability(TokenProbability):
    top_logprobs: list[TokenProbability]


def probabilities(text: ModelText, tokens: Sequence[TokenLogprob], top: int) -> list[CompletionProbability]:
    """Returns one object for each token, with the `top` most likely alternatives."""

    def entry(token_id: int, logprob: float) -> TokenProbability:
        return {
            "id": token_id,
            "token": text.token_text(token_id),
            "bytes": list(text.token_bytes(token_id)),
            "logprob": finite(logprob),
        }

    def ranked(token: TokenLogprob) -> list[TokenProbability]:
        pairs = zip(token.top_ids[:top], token.top_logprobs, strict=False)
        return [entry(token_id, logprob) for token_id, logprob in pairs]

    return [{**entry(token.token_id, token.logprob), "top_logprobs": ranked(token)} for token in tokens]


class CompletionPiece(TypedDict):
    """The fields that a stream's chunks and a complete answer share."""

    index: int
    content: str
    tokens: list[int]
    stop: bool
    id_slot: int
    tokens_predicted: int
    tokens_evaluated: int
    completion_probabilities: NotRequired[list[CompletionProbability]]  # with n_probs


class CompletionChunk(CompletionPiece):
    """A piece of a streamed answer."""

    prompt_progress: NotRequired[PromptProgress]
    timings: NotRequired[LlamaTimings]  # with timings_per_token


class LlamaCompletion(CompletionPiece):
    """A complete answer, or the last chunk of a stream; the chunk's `content` is only the text that no earlier chunk
    had."""

    model: str
    prompt: str | list[int]
    generation_settings: GenerationSettings
    stop_type: Literal["eos", "limit", "word"]
    stopping_word: str
    truncated: bool
    tokens_cached: int
    timings: LlamaTimings


def fields_of(answer: Mapping[str, Any], names: Sequence[str]) -> Mapping[str, Any]:
    """Returns the answer with the named fields only. A path such as `timings/prompt_ms` names a field of a nested
    object. Without names, returns the whole answer."""
    if not names:
        return answer
    found: dict[str, Any] = {}
    for name in names:
        value: Any = answer
        for step in name.split("/"):
            value = value.get(step, _ABSENT) if isinstance(value, Mapping) else _ABSENT
        if value is not _ABSENT:
            found[name] = value
    return found


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
    media_marker: str  # stands for a picture in the prompts of /completion
    build_info: str
