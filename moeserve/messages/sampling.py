"""Parts of several messages: how a request samples and limits its text, and the logprobs of a token."""

from __future__ import annotations

from typing import Literal

import msgspec

from moeserve.messages.reasoning import Headers, Thinking
from moeserve.sampling.parameters import SamplerSettings

FinishReason = Literal["stop", "length", "abort", "error"]


class SamplingParams(SamplerSettings, frozen=True, omit_defaults=True):
    """The parameters of sampling: the samplers' settings, and the limits and constraints of the answer.

    Processing order: logit_bias, penalties, DRY, min_tokens mask, grammar mask, the samplers, draw. Logprobs are of the
    raw logits, before any of these, as in vLLM's default.
    """

    max_tokens: int  # >= 0; if the client sets none: max_model_len - prompt length
    min_tokens: int = 0  # stop_token_ids are masked until the answer has this many tokens
    samplers: tuple[str, ...] = ()  # their order; empty: DEFAULT_ORDER
    dry_breakers: bytes = b""  # int32: token sequences that end DRY's repetitions, each closed by -1
    logit_bias: dict[int, float] = msgspec.field(default_factory=dict)
    seed: int = 0  # always set: httpserver draws one if the client sets none
    # None: no logprobs; N <= 20: those of the sampled token and of the N most likely.
    logprobs: int | None = None
    prompt_logprobs: int | None = None  # the same for prompt tokens 1.. (the first has none)
    stop_token_ids: tuple[int, ...] = ()  # end-of-sequence ids included, unless ignore_eos
    # Token sequences of two or more tokens that must not appear in the answer; single tokens are in logit_bias.
    bad_sequences: tuple[tuple[int, ...], ...] = ()
    grammar: str = ""  # the answer after its reasoning must match it (llguidance's notation); "": no grammar
    # Set with a reasoning budget, or with a grammar for a model that may reason.
    thinking: Thinking | None = None


class TextOptions(msgspec.Struct, frozen=True, omit_defaults=True):
    """The parameters with which the detokenizer turns a request's tokens into text."""

    stop: tuple[str, ...] = ()
    include_stop: bool = False  # keep the stop string in the text
    skip_special_tokens: bool = True
    # Control tokens that stay in the text although special tokens are skipped.
    shown_tokens: tuple[int, ...] = ()
    min_tokens: int = 0  # a stop string that is completed earlier than this many tokens is ordinary text
    reasoning: Thinking | Headers | None = None  # a part in which stop strings are ordinary text


class TokenLogprob(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """One position: the chosen token's natural-log probability and rank (1: most likely), and the most likely tokens.

    An answer may have 50,000 of these with 20 other tokens each. As untracked structs of tuples they cost the garbage
    collector nothing; otherwise each collection took 0.1 s."""

    token_id: int
    logprob: float
    rank: int
    top_ids: tuple[int, ...]
    top_logprobs: tuple[float, ...]


class RequestContext(msgspec.Struct, frozen=True, array_like=True):
    """The HTTP request that an answer belongs to, for log lines and traces."""

    request_id: str = ""  # X-Request-Id, visible ASCII
    trace: str = ""  # W3C's traceparent of its parent span; "" if tracing is off
