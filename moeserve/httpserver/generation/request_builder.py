"""From a validated request to GenerateRequests: what depends on the model, the prompt and the choice."""

from __future__ import annotations

import random
from array import array
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import msgspec

from moeserve import logs
from moeserve.httpserver.generation.engine_client import EngineClient
from moeserve.httpserver.generation.model_text import ModelText
from moeserve.httpserver.transport.errors import ApiError, invalid
from moeserve.httpserver.transport.keys import key_name
from moeserve.httpserver.transport.request_model import INT64_MAX
from moeserve.messages.schema import GenerateRequest, Origin, SamplingParams, TextOptions


@dataclass(frozen=True)
class Wish:
    """What a client asked for, apart from the prompt. Names in messages are the client's."""

    sampling: SamplingParams  # without max_tokens, seed and end-of-sequence ids
    text: TextOptions
    arrival: float
    max_tokens: int | None  # None: `default_max_tokens`
    default_max_tokens: int | None = None  # None: the rest of the context
    n: int = 1
    seed: int | None = None
    ignore_eos: bool = False
    priority: int = 0
    cache_salt: str = ""
    progress: bool = False
    prompt_param: str = "prompt"
    max_tokens_param: str = "max_tokens"
    stop_param: str = "stop_token_ids"


class Admission:
    """Refuses, with ApiError 400, what could never run; completes the rest."""

    def __init__(self, engine: EngineClient, seed: int | None, most: int) -> None:
        """`seed` makes the seeds of requests that set none reproducible; `most` generations can be running
        and waiting at once."""
        self._engine = engine
        self._most = most
        self._seeds = random.SystemRandom() if seed is None else random.Random(seed)

    def requests(
        self, text: ModelText, prompts: Sequence[Sequence[int]], wish: Wish
    ) -> list[GenerateRequest]:
        """Prompt by prompt, its n choices. Choice i of each prompt is seeded with seed + i."""
        vocab_size = min(self._engine.require_ready().vocab_size, text.vocab_size)
        sampling = self._for_model(wish, vocab_size, text.eos_ids)
        if (total := len(prompts) * wish.n) > self._most:
            raise invalid(
                "n",
                f"{len(prompts)} prompts with {wish.n} choices each are {total}; at most {self._most} fit",
            )
        requests = []
        for prompt in prompts:
            check_ids(wish.prompt_param, prompt, vocab_size)
            max_tokens = self._max_tokens(len(prompt), wish)
            if sampling.min_tokens > max_tokens:
                raise invalid(
                    "min_tokens", f"must be at most max_tokens, {max_tokens}, got {sampling.min_tokens}"
                )
            token_ids = array("i", prompt).tobytes()
            seed = self._seeds.getrandbits(63) if wish.seed is None else wish.seed
            for choice in range(wish.n):
                chosen = msgspec.structs.replace(
                    sampling, max_tokens=max_tokens, seed=(seed + choice) & INT64_MAX
                )
                request = GenerateRequest(
                    id=self._engine.next_id(),
                    token_ids=token_ids,
                    sampling=chosen,
                    text=wish.text,
                    arrival=wish.arrival,
                    priority=wish.priority,
                    key_name=key_name.get(),
                    cache_salt=wish.cache_salt,
                    origin=Origin(logs.request_id.get()),
                    progress=wish.progress,
                )
                requests.append(request)
        return requests

    @staticmethod
    def _for_model(wish: Wish, vocab_size: int, eos_ids: tuple[int, ...]) -> SamplingParams:
        sampling = wish.sampling
        check_ids("logit_bias", sampling.logit_bias, vocab_size)
        check_ids(wish.stop_param, sampling.stop_token_ids, vocab_size)
        ends = () if wish.ignore_eos else eos_ids
        stop_token_ids = tuple(dict.fromkeys((*ends, *sampling.stop_token_ids)))
        return msgspec.structs.replace(sampling, stop_token_ids=stop_token_ids)

    def _max_tokens(self, prompt_tokens: int, wish: Wish) -> int:
        """Raises ApiError 400 unless prompt and answer fit into the context."""
        limit = self._engine.max_model_len
        assert limit is not None  # require_ready has passed
        if prompt_tokens == 0:
            raise invalid(wish.prompt_param, "is empty: there must be at least one token")
        room = limit - prompt_tokens
        if wish.max_tokens is None:
            wanted = room if wish.default_max_tokens is None else min(wish.default_max_tokens, room)
            fits = room >= 1
        else:
            wanted = wish.max_tokens
            fits = wanted <= room
        if not fits:
            asked = (
                f" and {wish.max_tokens_param} is {wish.max_tokens}" if wish.max_tokens and room > 0 else ""
            )
            message = (
                f"{wish.prompt_param}: this model's maximum context length is {limit} tokens, but the prompt "
                f"has {prompt_tokens}{asked}; shorten the prompt{' or ask for fewer tokens' if asked else ''}"
            )
            raise ApiError(400, message, param=wish.prompt_param, code="context_length_exceeded")
        return wanted


def check_ids(param: str, ids: Iterable[int], vocab_size: int) -> None:
    highest = max(ids, default=0)
    if highest >= vocab_size:
        raise invalid(param, f"token ids must be in the range 0 to {vocab_size - 1}, got {highest}")
