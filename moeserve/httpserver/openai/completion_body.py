"""The request body of /v1/completions."""

from __future__ import annotations

from dataclasses import replace
from typing import Annotated, Any, ClassVar, Final

from pydantic import BeforeValidator, Field, model_validator
from pydantic_core import PydanticCustomError

from moeserve.httpserver.generation.request.asked import Asked, FimPrompt, PlainPrompts
from moeserve.httpserver.generation.request.caller import Caller
from moeserve.httpserver.generation.request.fields import INT32_MAX, MAX_CHOICES
from moeserve.httpserver.openai import other_servers
from moeserve.httpserver.openai.shared_body import OpenAIRequest

MAX_PROMPTS: Final = 1024
MAX_LOGPROBS: Final = 20
DEFAULT_MAX_TOKENS: Final = 16  # OpenAI's and vLLM's

Prompt = str | list[int]


def check_token_ids(ids: list[Any]) -> None:
    """Raises PydanticCustomError unless every element is an int (not a bool) within int32."""
    if set(map(type, ids)) - {int}:
        raise PydanticCustomError("prompt_type", "must hold token ids only, or strings only")
    if ids and not (min(ids) >= 0 and max(ids) <= INT32_MAX):
        raise PydanticCustomError("prompt_range", "token ids must be in the range 0 to 2147483647")


def _to_prompts(value: Any) -> list[Prompt]:
    """Returns a list of prompts from any of the four forms of `prompt`: a text, a list of texts, a list of token ids, a
    list of such lists."""
    if isinstance(value, str):
        return [value]
    if not isinstance(value, list) or not value:
        raise PydanticCustomError(
            "prompt_type", "must be a string, a list of token ids, or a list of either, and not empty"
        )
    if isinstance(value[0], int | float):
        check_token_ids(value)
        return [value]
    if len(value) > MAX_PROMPTS:
        raise PydanticCustomError(
            "too_long",
            "at most {most} prompts are taken, got {got}",
            {"most": MAX_PROMPTS, "got": len(value)},
        )
    if all(isinstance(one, str) for one in value):
        return value
    if not all(isinstance(one, list) for one in value):
        raise PydanticCustomError("prompt_type", "must hold strings only, or lists of token ids only")
    for one in value:
        check_token_ids(one)
    return value


class CompletionRequest(OpenAIRequest):
    unsupported_fields: ClassVar = other_servers.COMPLETION
    idle: ClassVar = other_servers.IDLE

    prompt: Annotated[
        Any,
        BeforeValidator(_to_prompts, json_schema_input_type=str | list[int] | list[str] | list[list[int]]),
        Field(description="Each prompt gets n choices, in order."),
    ]
    max_tokens: Annotated[
        int | None,
        Field(
            ge=-1,
            le=INT32_MAX,
            description="Default 16; -1: the rest of the context; 0 with echo scores the prompt alone.",
        ),
    ] = None
    echo: bool = False
    logprobs: Annotated[
        int | None,
        Field(
            ge=0,
            le=MAX_LOGPROBS,
            description="Log-probabilities of the chosen token and of this many most likely tokens.",
        ),
    ] = None
    return_token_ids: Annotated[
        bool,
        Field(description="Each choice has the `token_ids` of its text, and first its prompt's (vLLM)."),
    ] = False

    best_of: Annotated[
        int | None,
        Field(
            ge=1,
            le=MAX_CHOICES,
            description="Number of candidates for each prompt, at least n; the n with the highest log-probability "
            "per token are returned.",
        ),
    ] = None
    suffix: Annotated[
        str | None,
        Field(
            description="The text after the answer (fill-in-the-middle), for models that have tokens for that."
        ),
    ] = None

    @model_validator(mode="after")
    def _fields_agree(self) -> CompletionRequest:
        self._check_best_of()
        if self.suffix and self.echo:
            raise PydanticCustomError("suffix", "cannot be combined with echo")
        if self.max_tokens == 0 and not self.echo:
            raise PydanticCustomError("max_tokens", "0 is only allowed with echo true")
        return self

    def _check_best_of(self) -> None:
        if self.num_candidates < self.n:
            message = "must be at least n, {n}, got {got}"
            raise PydanticCustomError("best_of", message, {"n": self.n, "got": self.num_candidates})
        if self.num_candidates == self.n:
            return
        if self.stream:
            message = "above n cannot be streamed: which are best is known at the end only; leave out stream"
            raise PydanticCustomError("best_of", message)
        if self.use_beam_search:
            raise PydanticCustomError("best_of", "cannot be combined with use_beam_search; use beam_width")

    @property
    def num_candidates(self) -> int:
        """The number of answers to generate for each prompt."""
        return self.n if self.best_of is None else self.best_of

    @property
    def prompts(self) -> list[Prompt]:
        prompts: list[Prompt] = self.prompt
        return prompts

    def _plain_prompts(self) -> PlainPrompts:
        return [FimPrompt(prompt, self.suffix) for prompt in self.prompts] if self.suffix else self.prompts

    def asked(self, caller: Caller) -> Asked:
        """Translates the body to the engine's request."""
        is_bounded = self.max_tokens != -1
        chooses = self.num_candidates > self.n
        scores = self.prompt_logprobs
        if self.echo and self.logprobs is not None:
            scores = max(self.logprobs, scores or 0)
        return replace(
            self.shared_asked(caller, self._plain_prompts()),
            max_tokens=self.max_tokens if is_bounded else None,
            default_max_tokens=DEFAULT_MAX_TOKENS if is_bounded else None,
            n=self.num_candidates,
            logprobs=self.logprobs or 0 if chooses else self.logprobs,
            prompt_logprobs=scores,
        )
