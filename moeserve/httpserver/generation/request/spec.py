"""GenerationSpec: what one HTTP request asks the engine for, in terms that all APIs share."""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass, field
from typing import Any

from moeserve.grammar.spec import GrammarSpec
from moeserve.httpserver.generation.request.sampler_fields import DRY_BREAKERS
from moeserve.httpserver.generation.request.thinking import ThinkingOptions
from moeserve.httpserver.generation.request.tool_use import ToolUse
from moeserve.messages.beams import BeamParams
from moeserve.messages.sampling import SamplingParams, TextOptions, Thinking
from moeserve.sampling.order import heeded
from moeserve.sampling.parameters import DEFAULTS, SamplerSettings


@dataclass(frozen=True, slots=True)
class GrammarConstraint:
    """A grammar that the answer must match. `param` is the client's name for it, for messages."""

    spec: GrammarSpec
    param: str


@dataclass(slots=True)
class GenerationSpec:
    """Mutable, and written in three phases:

    1. the API's request body fills it;
    2. `prepare.py` resolves what depends on the model: the fields under "resolved";
    3. `RequestBuilder.build` freezes it into one GenerateRequest for each choice. Nothing changes it from then on.

    The prompt is `messages`, a conversation for the chat template, or else `prompts`. Fields of sampling and text mean
    the same as in SamplingParams and TextOptions. `*_param` are the client's names of fields, for messages.
    """

    arrival: float  # time.monotonic()
    model: str | None = None  # None: the served one

    messages: list[dict[str, Any]] | None = None
    prompts: Sequence[str | list[int]] = ()
    tools: ToolUse = field(default_factory=ToolUse)
    template_kwargs: Mapping[str, Any] = field(default_factory=dict)
    add_generation_prompt: bool = True
    continue_final_message: bool = False  # the answer goes on from the last message, which is the assistant's
    truncate_prompt_tokens: int | None = None  # how many to keep, the last ones; -1: as many as fit
    prompt_param: str = "prompt"

    n: int = 1  # choices for each prompt
    beams: BeamParams | None = None  # they are the answers of a beam search
    max_tokens: int | None = None  # None: `default_max_tokens`
    default_max_tokens: int | None = None  # an upper bound only; None: the rest of the context
    max_tokens_param: str = "max_tokens"
    ends_with_context: bool = False  # max_tokens beyond the context means its end; else it is refused
    thinking: ThinkingOptions = field(default_factory=ThinkingOptions)
    show_reasoning: bool = True
    separate_reasoning: bool = True  # False: it is part of the text
    grammar: GrammarConstraint | None = None

    min_tokens: int = 0
    sampler: SamplerSettings = DEFAULTS
    # Names of sampler parameters that the request itself has set; others get the server's defaults. None: all stay.
    chosen: Set[str] | None = None
    samplers: tuple[str, ...] = ()  # their order; empty: DEFAULT_ORDER
    dry_sequence_breakers: tuple[str, ...] = DRY_BREAKERS
    logit_bias: dict[int, float] = field(default_factory=dict)
    bad_words: tuple[str, ...] = ()
    bad_sequences: tuple[tuple[int, ...], ...] = ()  # of those with several tokens
    allowed_token_ids: tuple[int, ...] = ()  # the only ones of the answer; empty: all
    seed: int | None = None  # None: one is drawn
    logprobs: int | None = None
    prompt_logprobs: int | None = None

    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()  # the client's own
    stop_token_ids_param: str = "stop_token_ids"
    include_stop: bool = False
    skip_special_tokens: bool = True
    ignore_eos: bool = False

    priority: int = 0
    cache_salt: str = ""
    progress: bool = False

    # resolved by prepare.py
    adapter: str = ""  # GenerateRequest.adapter
    compiled_grammar: str = ""
    dry_breakers: bytes = b""
    thinking_tokens: Thinking | None = None
    shown_tokens: tuple[int, ...] = ()  # control tokens that the chat format reads from the text
    format_stop_token_ids: tuple[int, ...] = ()  # the chat format's, after which the answer is complete

    def sampling(
        self, *, max_tokens: int, seed: int, stop_token_ids: tuple[int, ...], scores_prompt: bool
    ) -> SamplingParams:
        """Returns the frozen parameters of one choice; the arguments depend on its prompt and on the model.
        scores_prompt: one choice of a prompt does, for all (`prompt_scores.py`)."""
        return SamplingParams(
            max_tokens=max_tokens,
            min_tokens=self.min_tokens,
            **heeded(self.sampler, self.samplers),
            samplers=self.samplers,
            dry_breakers=self.dry_breakers,
            logit_bias=self.logit_bias,
            seed=seed,
            logprobs=self.logprobs,
            prompt_logprobs=self.prompt_logprobs if scores_prompt else None,
            stop_token_ids=stop_token_ids,
            bad_sequences=self.bad_sequences,
            grammar=self.compiled_grammar,
            thinking=self.thinking_tokens,
        )

    def text_options(self) -> TextOptions:
        return TextOptions(
            stop=self.stop,
            include_stop=self.include_stop,
            skip_special_tokens=self.skip_special_tokens,
            shown_tokens=self.shown_tokens,
            min_tokens=self.min_tokens,
        )
