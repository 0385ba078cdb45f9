"""RequestBuilder: turns a resolved request into messages to the engine, and refuses requests that could never run."""

from __future__ import annotations

import random
from array import array
from collections.abc import Callable

from msgspec.structs import replace

from moeserve.httpserver.generation.request.fields import INT64_MAX
from moeserve.httpserver.generation.resolve.resolved import Resolved
from moeserve.httpserver.generation.resolve.served import Served
from moeserve.httpserver.generation.resolve.token_ids import check_ids
from moeserve.httpserver.transport.errors import ApiError, Overflow, invalid
from moeserve.messages.beams import MAX_CANDIDATES, BeamParams
from moeserve.messages.refusal import Refusal
from moeserve.messages.sampling import RequestContext
from moeserve.messages.schema import BACKGROUND_PRIORITY, GenerateRequest

MAX_CONSTRAINT_BYTES = 64 << 20  # of one HTTP request
BYTES_PER_NUMBER = 16
MAX_PROMPT_LOGPROBS = 1_000_000  # of one HTTP request; building and writing them takes 1.5 s and 200 MB


class RequestBuilder:
    """Builds messages to the engine. Raises ApiError 400 for a request that could never run."""

    def __init__(self, next_id: Callable[[], int], seed: int | None) -> None:
        """next_id: returns a new request id. seed: makes the seeds drawn for requests without one reproducible."""
        self._next_id = next_id
        self._seeds = random.SystemRandom() if seed is None else random.Random(seed)

    def build(self, served: Served, resolved: Resolved) -> list[GenerateRequest]:
        """Returns the n choices of each prompt, prompt by prompt. Choice i of each has the seed `asked.seed + i`."""
        asked, prompts = resolved.asked, resolved.prompts
        vocab_size = served.vocab_size
        stop_token_ids = _stop_token_ids(resolved, vocab_size, served.text.eos_ids)
        early_end = resolved.early_end(served.text.eos_ids)
        check_sizes(resolved)
        if asked.beams is not None:
            check_beams(resolved, asked.beams, len(stop_token_ids), vocab_size)
        requests = []
        for prompt in prompts:
            check_ids(asked.prompt_param, prompt, vocab_size)
            max_tokens = _max_tokens(len(prompt), resolved, served.limit)
            if asked.min_tokens > max_tokens:
                raise invalid(
                    "min_tokens", f"must be at most max_tokens, {max_tokens}, got {asked.min_tokens}"
                )
            if asked.beams is not None and max_tokens == 0:
                raise invalid(asked.max_tokens_param, "must be at least 1 with use_beam_search")
            token_ids = array("i", prompt).tobytes()
            search = None if asked.beams is None else replace(asked.beams, key=self._next_id())
            seed = self._seeds.getrandbits(63) if asked.seed is None else asked.seed
            for choice in range(asked.n):
                request = GenerateRequest(
                    id=self._next_id(),
                    token_ids=token_ids,
                    sampling=resolved.sampling(
                        max_tokens=max_tokens,
                        seed=(seed + choice) & INT64_MAX,
                        stop_token_ids=stop_token_ids,
                        scores_prompt=choice == 0,
                    ),
                    text=resolved.text_options(),
                    arrival=asked.caller.arrival,
                    priority=BACKGROUND_PRIORITY if asked.caller.is_background else asked.priority,
                    key_name=asked.caller.tenant,
                    cache_salt=asked.cache_salt,
                    adapter=resolved.adapter,
                    context=RequestContext(asked.caller.request_id),
                    progress=asked.progress,
                    beams=None if search is None else replace(search, choice=choice),
                    early_end=None if search is not None else early_end,
                    spans=[*resolved.chat.spans],
                )
                requests.append(request)
        return requests


def _max_tokens(prompt_tokens: int, resolved: Resolved, limit: int) -> int:
    """Returns the most tokens of the answer. Raises ApiError 400 unless prompt and answer fit into
    the context of `limit` tokens."""
    asked, bound = resolved.asked, resolved.default_max_tokens
    if prompt_tokens == 0:
        raise invalid(asked.prompt_param, "is empty: there must be at least one token")
    room = limit - prompt_tokens
    if asked.max_tokens is None:
        wanted = room if bound is None else min(bound, room)
        fits = room >= 1
    else:
        wanted = min(asked.max_tokens, max(room, 1)) if asked.ends_with_context else asked.max_tokens
        fits = wanted <= room
    if not fits:
        too_many = asked.max_tokens and room > 0
        length = f" and {asked.max_tokens_param} is {asked.max_tokens}" if too_many else ""
        message = (
            f"{asked.prompt_param}: this model's maximum context length is {limit} tokens, but the prompt "
            f"has {prompt_tokens}{length}; shorten the prompt{' or ask for fewer tokens' if length else ''}"
        )
        raise ApiError(
            400,
            message,
            param=asked.prompt_param,
            code="context_length_exceeded",
            refusal=Refusal.TOO_LONG,
            overflow=None if room > 0 else Overflow(prompt_tokens, limit),
        )
    return wanted


def check_sizes(resolved: Resolved) -> None:
    """Raises ApiError 400 if a small body asks for too much memory: each choice of each prompt has its own stop
    strings, biases and grammar state."""
    asked, prompts = resolved.asked, resolved.prompts
    total = len(prompts) * asked.n
    if (each := constraint_bytes(resolved)) * total > MAX_CONSTRAINT_BYTES:
        message = (
            f"{total} choices with a grammar, stop strings and biases of {each} bytes each take {each * total} bytes; "
            f"{MAX_CONSTRAINT_BYTES} at most are supported: ask for fewer at once"
        )
        raise invalid("n", message)
    if asked.prompt_logprobs is None or total == 1:
        return  # one prompt is bounded by the context
    entries = sum(map(len, prompts)) * asked.n * (asked.prompt_logprobs + 1)
    if entries > MAX_PROMPT_LOGPROBS:
        message = (
            f"log-probabilities of {total} prompts, those of each choice counted, are {entries}; {MAX_PROMPT_LOGPROBS} "
            "at most are supported: ask for fewer prompts or choices at once"
        )
        raise invalid("n", message)


def check_beams(resolved: Resolved, beams: BeamParams, num_stop_ids: int, vocab_size: int) -> None:
    """Raises ApiError 400 if a beam search needs more than the engine has."""
    form = resolved.form
    if form.grammar is not None:
        message = "cannot be combined with use_beam_search, which takes no grammar: leave one of them out"
        raise invalid(form.grammar.param, message)
    if form.thinking is not None:
        message = "a reasoning budget cannot be combined with use_beam_search: leave one of them out"
        raise invalid("thinking_token_budget", message)
    if resolved.asked.prompt_logprobs is not None:
        message = (
            "cannot be combined with use_beam_search: ask for the prompt's logprobs in a separate request"
        )
        raise invalid("prompt_logprobs", message)
    most = min(MAX_CANDIDATES, vocab_size)
    if beams.width + num_stop_ids > most:
        message = (
            f"{beams.width} beams and {num_stop_ids} end tokens are more than {most}; "
            "ask for fewer beams or fewer stop_token_ids"
        )
        raise invalid("beam_width", message)


def constraint_bytes(resolved: Resolved) -> int:
    """Returns the approximate bytes of a choice without its prompt: of its grammar, stop strings and biases."""
    strings = (resolved.grammar, *resolved.asked.stop)
    numbers = len(resolved.logit_bias) + len(resolved.asked.stop_token_ids)
    return sum(map(len, strings)) + BYTES_PER_NUMBER * numbers


def _stop_token_ids(resolved: Resolved, vocab_size: int, eos_ids: tuple[int, ...]) -> tuple[int, ...]:
    """Returns the token ids that end the answer, without duplicates: the end-of-sequence tokens, the client's stop
    tokens, and the chat format's."""
    asked = resolved.asked
    check_ids("logit_bias", resolved.logit_bias, vocab_size)
    named = (*asked.stop_token_ids, *resolved.form.stop_token_ids)
    check_ids(asked.stop_token_ids_param, named, vocab_size)
    ends = () if asked.ignore_eos else (*eos_ids, *resolved.fim_ends)
    return tuple(dict.fromkeys((*ends, *named)))
