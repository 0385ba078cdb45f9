"""Asked: one HTTP request's wishes, in a form that all APIs share."""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass, field
from typing import Any

from moeserve.grammar.spec import GrammarSpec
from moeserve.httpserver.generation.request.caller import Caller
from moeserve.httpserver.generation.request.pictures import Picture
from moeserve.httpserver.generation.request.sampler_fields import DRY_BREAKERS
from moeserve.httpserver.generation.request.thinking import ThinkingOptions
from moeserve.httpserver.generation.request.tool_use import ToolUse
from moeserve.messages.beams import BeamParams
from moeserve.sampling.parameters import DEFAULTS, SamplerSettings


@dataclass(frozen=True, slots=True)
class GrammarConstraint:
    """A grammar that the answer must match. `param` is the client's name for it, for messages."""

    spec: GrammarSpec
    param: str


@dataclass(frozen=True, slots=True)
class ChatPrompt:
    """A conversation for the chat template."""

    messages: Sequence[dict[str, Any]]  # in their texts, marks stand for pictures
    pictures: Sequence[Picture] = ()  # of all messages
    tools: ToolUse = field(default_factory=ToolUse)
    thinking: ThinkingOptions = field(default_factory=ThinkingOptions)
    template_kwargs: Mapping[str, Any] = field(default_factory=dict)
    add_generation_prompt: bool = True
    continue_final_message: bool = False  # the answer continues the last message, an assistant's
    show_reasoning: bool = True
    separate_reasoning: bool = True  # False: reasoning is returned as part of the text


@dataclass(frozen=True, slots=True)
class FimFile:
    """A file of the repository, for context."""

    name: str
    text: str


@dataclass(frozen=True, slots=True)
class FimPrompt:
    """Two texts of which the answer is the middle (fill-in-the-middle)."""

    prefix: str | list[int]
    suffix: str
    # True: the layout of a repository, from which is left out what does not fit. False: a prompt that is too long is
    # refused, and has no `files`.
    is_cut_to_fit: bool = False
    files: Sequence[FimFile] = ()
    begun: str = ""  # the beginning of the middle
    param: str = "suffix"  # the client's name of the suffix, for messages


PlainPrompts = Sequence[str | list[int] | FimPrompt]


@dataclass(frozen=True, slots=True)
class Asked:
    """The request of any API: each body is mapped to it with that API's defaults. `resolve/` turns it into `Resolved`.

    Fields of sampling and text mean the same as in SamplingParams and TextOptions. `*_param` are the client's names of
    fields, for messages.
    """

    caller: Caller
    prompt: ChatPrompt | PlainPrompts
    prompt_param: str = "prompt"
    truncate_prompt_tokens: int | None = None  # the number of last tokens to keep; -1: as many as fit
    model: str | None = None  # None: the served one

    n: int = 1  # choices for each prompt
    beams: BeamParams | None = None  # if given, the choices are the results of this beam search
    max_tokens: int | None = None  # None: `default_max_tokens`
    # An upper bound only; None: the server's default, or the rest of the context.
    default_max_tokens: int | None = None
    max_tokens_param: str = "max_tokens"
    # If prompt plus max_tokens exceed the context. True: the answer ends with the context. False: the request is
    # refused.
    ends_with_context: bool = False
    min_tokens: int = 0
    grammar: GrammarConstraint | None = None

    sampler: SamplerSettings = DEFAULTS
    # Names of the sampler parameters that the request has set; the others get the server's defaults. None: no parameter
    # gets a default.
    chosen: Set[str] | None = None
    samplers: tuple[str, ...] = ()  # their order; empty: DEFAULT_ORDER
    dry_sequence_breakers: tuple[str, ...] = DRY_BREAKERS
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    bad_words: tuple[str, ...] = ()
    allowed_token_ids: tuple[int, ...] = ()  # the only tokens of the answer; empty: all are allowed
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

    @property
    def num_prompts(self) -> int:
        return 1 if isinstance(self.prompt, ChatPrompt) else len(self.prompt)
