"""The parts that several messages share: how a request samples and limits its text, and what is reported about a
token."""

from __future__ import annotations

from typing import Literal

import msgspec

from moeserve.sampling.parameters import SamplerSettings

FinishReason = Literal["stop", "length", "abort", "error"]


class Thinking(msgspec.Struct, frozen=True, array_like=True):
    """The reasoning part of an answer, for constraints that hold only within it (a token budget) or after it (a
    grammar). The model opens it with the answer's first token, unless the prompt has opened it already."""

    open_token: int  # <think>
    close_token: int  # </think>
    ending: tuple[int, ...]  # tokens that end a reasoning part at its budget; contain close_token once
    is_open: bool  # the prompt ends within the reasoning part
    budget: int | None = None  # reasoning tokens after which `ending` is forced; None: no limit
    call_token: int | None = (
        None  # begins a call of the grammar, which ends a reasoning part that is not closed
    )
    call_lead: int | None = (
        None  # the token before `call_token` in the call's first tag; None: it comes first
    )


class SamplingParams(SamplerSettings, frozen=True, omit_defaults=True):
    """How to sample tokens: the samplers' settings, and what bounds and constrains the answer.

    Processing order: logit_bias, penalties, DRY, min_tokens mask, grammar mask, the samplers, draw. Logprobs are of the
    raw logits, before any of these, as in vLLM's default.
    """

    max_tokens: int  # >= 0; where the client gives none, max_model_len - prompt length
    min_tokens: int = 0  # stop_token_ids are masked until the answer has this many tokens
    samplers: tuple[str, ...] = ()  # their order; empty: DEFAULT_ORDER
    dry_breakers: bytes = b""  # int32: token sequences over which no repetition goes on, each closed by -1
    logit_bias: dict[int, float] = msgspec.field(default_factory=dict)
    seed: int = 0  # always set: httpserver draws one where the client gives none
    logprobs: int | None = None  # None: none; N: of the sampled token and of the N most likely, N <= 20
    prompt_logprobs: int | None = None  # the same for prompt tokens 1.. (the first has none)
    stop_token_ids: tuple[int, ...] = ()  # end-of-sequence ids included, unless ignore_eos
    # Token sequences, each of two or more, of which none may be completed; shorter ones are in logit_bias.
    bad_sequences: tuple[tuple[int, ...], ...] = ()
    grammar: str = ""  # the answer after its reasoning must match it (llguidance's notation); "": none
    # Set with a reasoning budget, or with a grammar for a model that may reason.
    thinking: Thinking | None = None


class TextOptions(msgspec.Struct, frozen=True, omit_defaults=True):
    """The parameters with which the detokenizer turns a request's tokens into text."""

    stop: tuple[str, ...] = ()
    include_stop: bool = False  # keep the stop string in the text
    skip_special_tokens: bool = True
    shown_tokens: tuple[int, ...] = ()  # control tokens that are part of the text even so
    min_tokens: int = 0  # a stop string that is complete before this many tokens is ordinary text


class TokenLogprob(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """One position: the chosen token's natural-log probability and rank (1: most likely), and the most likely tokens.

    An answer may have 50,000 with 20 others each. In tuples, and untracked themselves, they are nothing to the garbage
    collector, which looked through them again and again for 0.1 s each time."""

    token_id: int
    logprob: float
    rank: int
    top_ids: tuple[int, ...]
    top_logprobs: tuple[float, ...]


class RequestContext(msgspec.Struct, frozen=True, array_like=True):
    """The HTTP request that a generation belongs to, for log lines and traces."""

    request_id: str = ""  # X-Request-Id, visible ASCII
    trace: str = ""  # W3C's traceparent of its parent span; "" where traces are off
