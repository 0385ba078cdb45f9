"""RequestBuilder: freezes a GenerationSpec into GenerateRequests, and refuses what could never run."""

from __future__ import annotations

import random
from array import array
from collections.abc import Iterable, Sequence

from msgspec.structs import replace

from moeserve.httpserver.generation.chat.model_text import ModelText
from moeserve.httpserver.generation.engine.engine_client import EngineClient
from moeserve.httpserver.generation.request.fields import INT64_MAX
from moeserve.httpserver.generation.request.spec import GenerationSpec
from moeserve.httpserver.transport.errors import ApiError, Overflow, invalid
from moeserve.httpserver.transport.keys import key_name
from moeserve.messages.beams import MAX_CANDIDATES, BeamParams
from moeserve.messages.refusal import Refusal
from moeserve.messages.sampling import RequestContext
from moeserve.messages.schema import GenerateRequest
from moeserve.processes import logs

MAX_CONSTRAINT_BYTES = 64 << 20  # of one HTTP request
BYTES_PER_NUMBER = 16
MAX_PROMPT_LOGPROBS = 1_000_000  # of one HTTP request; building and writing them takes 1.5 s and 200 MB


class RequestBuilder:
    """Raises ApiError 400 for a request that could never run."""

    def __init__(self, engine: EngineClient, seed: int | None, max_generations: int) -> None:
        """`seed` makes the seeds of requests that set none reproducible. `max_generations` can be running and waiting
        at once."""
        self._engine = engine
        self._max_generations = max_generations
        self._seeds = random.SystemRandom() if seed is None else random.Random(seed)

    def check_room(self, num_prompts: int, spec: GenerationSpec) -> None:
        """Before any other work on a request: raises ApiError 400 where it asks for more generations than there can be,
        and 503 where the queue has no room for them now."""
        if (total := num_prompts * spec.n) > self._max_generations:
            message = (
                f"{num_prompts} prompts with {spec.n} choices each are {total}; "
                f"at most {self._max_generations} fit"
            )
            raise invalid("n", message)
        wanted = num_prompts if spec.beams is not None else total
        self._engine.room.check(key_name.get(), wanted, self._engine.state.require_ready().max_num_seqs)

    def build(
        self, text: ModelText, prompts: Sequence[Sequence[int]], spec: GenerationSpec
    ) -> list[GenerateRequest]:
        """Returns the n choices of each prompt, prompt by prompt. Choice i of each has the seed `spec.seed + i`."""
        vocab_size = min(self._engine.state.require_ready().vocab_size, text.vocab_size)
        stop_token_ids = _stop_token_ids(spec, vocab_size, text.eos_ids)
        check_sizes(prompts, spec)
        if spec.beams is not None:
            check_beams(spec, spec.beams, len(stop_token_ids), vocab_size)
        requests = []
        for prompt in prompts:
            check_ids(spec.prompt_param, prompt, vocab_size)
            max_tokens = self._max_tokens(len(prompt), spec)
            if spec.min_tokens > max_tokens:
                raise invalid(
                    "min_tokens", f"must be at most max_tokens, {max_tokens}, got {spec.min_tokens}"
                )
            if spec.beams is not None and max_tokens == 0:
                raise invalid(spec.max_tokens_param, "must be at least 1 with use_beam_search")
            token_ids = array("i", prompt).tobytes()
            search = None if spec.beams is None else replace(spec.beams, key=self._engine.next_id())
            seed = self._seeds.getrandbits(63) if spec.seed is None else spec.seed
            for choice in range(spec.n):
                request = GenerateRequest(
                    id=self._engine.next_id(),
                    token_ids=token_ids,
                    sampling=spec.sampling(
                        max_tokens=max_tokens,
                        seed=(seed + choice) & INT64_MAX,
                        stop_token_ids=stop_token_ids,
                        scores_prompt=choice == 0,
                    ),
                    text=spec.text_options(),
                    arrival=spec.arrival,
                    priority=spec.priority,
                    key_name=key_name.get(),
                    cache_salt=spec.cache_salt,
                    adapter=spec.adapter,
                    context=RequestContext(logs.request_id.get()),
                    progress=spec.progress,
                    beams=None if search is None else replace(search, choice=choice),
                )
                requests.append(request)
        return requests

    def _max_tokens(self, prompt_tokens: int, spec: GenerationSpec) -> int:
        """Returns the most tokens of the answer. Raises ApiError 400 unless prompt and answer fit into the context."""
        limit = self._engine.state.max_model_len
        assert limit is not None  # require_ready has passed
        if prompt_tokens == 0:
            raise invalid(spec.prompt_param, "is empty: there must be at least one token")
        room = limit - prompt_tokens
        if spec.max_tokens is None:
            wanted = room if spec.default_max_tokens is None else min(spec.default_max_tokens, room)
            fits = room >= 1
        else:
            wanted = min(spec.max_tokens, max(room, 1)) if spec.ends_with_context else spec.max_tokens
            fits = wanted <= room
        if not fits:
            asked = (
                f" and {spec.max_tokens_param} is {spec.max_tokens}" if spec.max_tokens and room > 0 else ""
            )
            message = (
                f"{spec.prompt_param}: this model's maximum context length is {limit} tokens, but the prompt "
                f"has {prompt_tokens}{asked}; shorten the prompt{' or ask for fewer tokens' if asked else ''}"
            )
            raise ApiError(
                400,
                message,
                param=spec.prompt_param,
                code="context_length_exceeded",
                refusal=Refusal.TOO_LONG,
                overflow=None if room > 0 else Overflow(prompt_tokens, limit),
            )
        return wanted


def check_sizes(prompts: Sequence[Sequence[int]], spec: GenerationSpec) -> None:
    """Raises ApiError 400 where a small body asks for very much: each choice of each prompt is kept by itself, with
    its own stop strings, biases and place in the grammar."""
    total = len(prompts) * spec.n
    if (each := constraint_bytes(spec)) * total > MAX_CONSTRAINT_BYTES:
        message = (
            f"{total} choices with a grammar, stop strings and biases of {each} bytes each take {each * total} bytes; "
            f"{MAX_CONSTRAINT_BYTES} at most are supported: ask for fewer at once"
        )
        raise invalid("n", message)
    if spec.prompt_logprobs is None or total == 1:
        return  # one prompt is bounded by the context
    entries = sum(map(len, prompts)) * spec.n * (spec.prompt_logprobs + 1)
    if entries > MAX_PROMPT_LOGPROBS:
        message = (
            f"log-probabilities of {total} prompts, those of each choice counted, are {entries}; {MAX_PROMPT_LOGPROBS} "
            "at most are supported: ask for fewer prompts or choices at once"
        )
        raise invalid("n", message)


def check_beams(spec: GenerationSpec, beams: BeamParams, num_stop_ids: int, vocab_size: int) -> None:
    """Raises ApiError 400 where a beam search would need what the engine does not give."""
    if spec.grammar is not None:
        message = "cannot be combined with use_beam_search, which takes no grammar: leave one of them out"
        raise invalid(spec.grammar.param, message)
    if spec.thinking_tokens is not None:
        message = "a budget of thought cannot be combined with use_beam_search: leave one of them out"
        raise invalid("thinking_token_budget", message)
    if spec.prompt_logprobs is not None:
        message = "cannot be combined with use_beam_search: ask for the prompt's in a request of its own"
        raise invalid("prompt_logprobs", message)
    most = min(MAX_CANDIDATES, vocab_size)
    if beams.width + num_stop_ids > most:
        message = (
            f"{beams.width} beams and {num_stop_ids} end tokens are more than {most}; "
            "ask for fewer beams or fewer stop_token_ids"
        )
        raise invalid("beam_width", message)


def constraint_bytes(spec: GenerationSpec) -> int:
    """What a choice takes beside its prompt, about: its grammar, its stop strings, its biases."""
    strings = (spec.compiled_grammar, *spec.stop)
    numbers = len(spec.logit_bias) + len(spec.stop_token_ids)
    return sum(map(len, strings)) + BYTES_PER_NUMBER * numbers


def _stop_token_ids(spec: GenerationSpec, vocab_size: int, eos_ids: tuple[int, ...]) -> tuple[int, ...]:
    """Returns the ids that end the answer: end of sequence, the client's, the chat format's; each once."""
    check_ids("logit_bias", spec.logit_bias, vocab_size)
    asked = (*spec.stop_token_ids, *spec.format_stop_token_ids)
    check_ids(spec.stop_token_ids_param, asked, vocab_size)
    ends = () if spec.ignore_eos else eos_ids
    return tuple(dict.fromkeys((*ends, *asked)))


def check_ids(param: str, ids: Iterable[int], vocab_size: int) -> None:
    """Raises ApiError 400 for an id beyond the vocabulary."""
    highest = max(ids, default=0)
    if highest >= vocab_size:
        raise invalid(param, f"token ids must be in the range 0 to {vocab_size - 1}, got {highest}")
