"""Asked: the content of one HTTP request, in a form that all APIs share."""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass, field
from typing import Any

from moeserve.grammar.spec import GrammarSpec
from moeserve.httpserver.generation.request.caller import Caller
from moeserve.httpserver.generation.request.documents import PdfFile
from moeserve.httpserver.generation.request.pictures import Picture, PicturedText
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
    # Of an answer's schema, what no grammar can enforce is left out instead of refused.
    is_lenient: bool = False


@dataclass(frozen=True, slots=True)
class ChatPrompt:
    """A conversation for the chat template."""

    messages: Sequence[dict[str, Any]]  # marks in their texts stand for pictures and PDFs
    pictures: Sequence[Picture] = ()  # the pictures of all messages, in order
    pdfs: Sequence[PdfFile] = ()  # likewise
    tools: ToolUse = field(default_factory=ToolUse)
    thinking: ThinkingOptions = field(default_factory=ThinkingOptions)
    template_kwargs: Mapping[str, Any] = field(default_factory=dict)
    add_generation_prompt: bool = True
    continue_final_message: bool = False  # the answer continues the last message, which is an assistant's
    show_reasoning: bool = True
    separate_reasoning: bool = True  # False: reasoning is returned as part of the text


@dataclass(frozen=True, slots=True)
class FimFile:
    """A file of the repository, for context."""

    name: str
    text: str


@dataclass(frozen=True, slots=True)
class FimPrompt:
    """Two texts; the answer is the text between them (fill-in-the-middle)."""

    prefix: str | list[int]
    suffix: str
    # True: the prompt has the layout of a repository, and parts that do not fit are left out. False: the prompt has no
    # `files`, and is refused if it is too long.
    is_cut_to_fit: bool = False
    files: Sequence[FimFile] = ()
    begun: str = ""  # the beginning of the middle
    param: str = "suffix"  # the client's name of the suffix, for error messages


# A text with pictures is a request's only prompt.
PlainPrompts = Sequence[str | list[int] | FimPrompt | PicturedText]


@dataclass(frozen=True, slots=True)
class Asked:
    """A request of any API. Each API maps its bodies to `Asked`, with the API's defaults. `resolve/` turns an `Asked`
    into a `Resolved`.

    Fields of sampling and text have the same meaning as in SamplingParams and TextOptions. `*_param` are the client's
    names of fields, for error messages.
    """

    caller: Caller
    prompt: ChatPrompt | PlainPrompts
    prompt_param: str = "prompt"
    truncate_prompt_tokens: int | None = None  # the number of last tokens to keep; -1: as many as fit
    model: str | None = None  # None: the served model

    n: int = 1  # choices for each prompt
    beams: BeamParams | None = None  # if given, the choices are the results of this beam search
    max_tokens: int | None = None  # None: `default_max_tokens`
    # Used without `max_tokens`, as an upper bound. None: the server's default, or the rest of the context.
    default_max_tokens: int | None = None
    max_tokens_param: str = "max_tokens"
    # For a prompt plus max_tokens that exceed the context. True: the answer ends where the context ends. False: the
    # request is refused.
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
    def pictures(self) -> Sequence[Picture]:
        if isinstance(self.prompt, ChatPrompt):
            return self.prompt.pictures
        return [one for prompt in self.prompt if isinstance(prompt, PicturedText) for one in prompt.pictures]

    @property
    def num_prompts(self) -> int:
        return 1 if isinstance(self.prompt, ChatPrompt) else len(self.prompt)
