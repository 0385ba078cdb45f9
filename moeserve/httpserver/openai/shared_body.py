"""The fields that /v1/completions and /v1/chat/completions share."""

from __future__ import annotations

from functools import cached_property
from typing import Annotated, ClassVar

from pydantic import Field, model_validator
from pydantic_core import PydanticCustomError

from moeserve.httpserver.generation.request.asked import Asked, ChatPrompt, PlainPrompts
from moeserve.httpserver.generation.request.caller import Caller
from moeserve.httpserver.generation.request.fields import (
    INT32_MAX,
    INT64_MAX,
    MAX_CHOICES,
    Bias,
    CacheSalt,
    ModelName,
    StopString,
    StopStrings,
    TokenId,
    TokenKey,
)
from moeserve.httpserver.generation.request.sampler_fields import SAMPLER_LISTS, SamplerFields
from moeserve.httpserver.generation.request.sampling_fields import OpenAISampling
from moeserve.httpserver.openai.beam_body import BeamFields
from moeserve.httpserver.openai.grammar_body import StructuredFields
from moeserve.httpserver.transport.request_model import NO_EFFECT, FreeDict, Label, RequestModel
from moeserve.messages.beams import BeamParams


class StreamOptions(RequestModel):
    include_usage: bool = Field(False, description="End with a chunk that carries `usage` and `timings`.")
    continuous_usage_stats: bool = Field(False, description="`usage` so far in every chunk as well (vLLM).")
    include_obfuscation: Annotated[bool, NO_EFFECT] = False

    @model_validator(mode="after")
    def _continuous_is_an_addition(self) -> StreamOptions:
        if self.continuous_usage_stats and not self.include_usage:
            raise PydanticCustomError("stream_options", "continuous_usage_stats needs include_usage true")
        return self


class OpenAIRequest(StructuredFields, BeamFields, OpenAISampling, SamplerFields):
    """The shared fields, with vLLM's defaults. Fields that OpenAI lacks have vLLM's names."""

    takes_whole_floats: ClassVar = True
    empty: ClassVar = (
        StructuredFields.empty
        | SAMPLER_LISTS
        | {
            *("stream_options", "logit_bias", "stop", "stop_token_ids", "bad_words", "allowed_token_ids"),
            *("cache_salt", "user", "metadata"),
        }
    )

    model: ModelName | None = None
    n: Annotated[int, Field(ge=1, le=MAX_CHOICES)] = 1
    stream: bool = False
    stream_options: StreamOptions | None = None

    logit_bias: Annotated[dict[TokenKey, Bias], Field(max_length=1024, default_factory=dict)]
    seed: Annotated[
        int | None,
        Field(ge=-INT64_MAX - 1, le=INT64_MAX, description="Random seed. Choice i of n uses seed + i."),
    ] = None

    stop: Annotated[StopStrings, Field(default_factory=list)]
    stop_token_ids: Annotated[list[TokenId], Field(max_length=256, default_factory=list)]
    include_stop_str_in_output: bool = False
    no_stop_trim: Annotated[
        bool, Field(description="Another name for include_stop_str_in_output (SGLang).")
    ] = False
    ignore_eos: bool = False
    min_tokens: Annotated[int, Field(ge=0, le=INT32_MAX)] = 0
    skip_special_tokens: bool = True
    return_tokens_as_token_ids: Annotated[
        bool, Field(description='Tokens in logprobs read "token_id:123", so that no two are alike.')
    ] = False
    bad_words: Annotated[
        list[StopString],
        Field(
            max_length=256,
            default_factory=list,
            description="Words that the answer must not contain, each with and without a blank before it.",
        ),
    ]
    allowed_token_ids: Annotated[
        list[TokenId],
        Field(
            max_length=1024,
            default_factory=list,
            description="The only tokens that the answer may contain; at most 1024.",
        ),
    ]
    truncate_prompt_tokens: Annotated[
        int | None,
        Field(ge=-1, le=INT32_MAX, description="Only the prompt's last tokens are read; -1: as many as fit."),
    ] = None
    prompt_logprobs: Annotated[
        int | None,
        Field(
            ge=0,
            le=20,
            description="Log-probabilities of each prompt token but the first, and of this many most likely tokens "
            "(vLLM).",
        ),
    ] = None
    priority: Annotated[
        int,
        Field(
            ge=-INT32_MAX - 1, le=INT32_MAX, description="Requests with a lower number are computed sooner."
        ),
    ] = 0
    cache_salt: CacheSalt = ""
    return_progress: Annotated[
        bool,
        Field(description="Sends chunks with `prompt_progress` while the prompt is computed (llama-server)."),
    ] = False

    user: Annotated[Label | None, NO_EFFECT] = None
    metadata: Annotated[FreeDict | None, NO_EFFECT] = None

    @model_validator(mode="after")
    def _stream_fields_need_a_stream(self) -> OpenAIRequest:
        if self.stream_options is not None and not self.stream:
            raise PydanticCustomError("stream_options", "is only allowed with stream true")
        if self.prompt_logprobs is not None and self.stream:
            raise PydanticCustomError("prompt_logprobs", "is only allowed with stream false")
        if self.truncate_prompt_tokens == 0:
            raise PydanticCustomError("truncate_prompt_tokens", "must be -1 or at least 1, got 0")
        if self.return_progress and not self.stream:
            raise PydanticCustomError("return_progress", "is only allowed with stream true")
        _ = self.beams  # raises if the fields contradict each other
        return self

    @cached_property
    def beams(self) -> BeamParams | None:
        return self.beam_params(self.n)

    def shared_asked(self, caller: Caller, prompt: ChatPrompt | PlainPrompts) -> Asked:
        """Returns an `Asked` with the values that these fields determine. The subclass replaces the values that its own
        fields determine."""
        return Asked(
            caller=caller,
            prompt=prompt,
            model=self.model,
            n=self.n,
            beams=self.beams,
            grammar=self.grammar_constraint,
            min_tokens=self.min_tokens,
            sampler=self.sampler_settings(),
            samplers=self.samplers,
            dry_sequence_breakers=tuple(self.dry_sequence_breakers),
            logit_bias={int(token): bias for token, bias in self.logit_bias.items()},
            seed=self.seed,
            bad_words=tuple(self.bad_words),
            allowed_token_ids=tuple(self.allowed_token_ids),
            truncate_prompt_tokens=self.truncate_prompt_tokens,
            prompt_logprobs=self.prompt_logprobs,
            chosen=self.chosen_settings(),
            stop=tuple(self.stop),
            stop_token_ids=tuple(self.stop_token_ids),
            include_stop=self.include_stop_str_in_output or self.no_stop_trim,
            skip_special_tokens=self.skip_special_tokens,
            ignore_eos=self.ignore_eos,
            priority=self.priority,
            cache_salt=self.cache_salt,
            progress=self.return_progress,
        )
