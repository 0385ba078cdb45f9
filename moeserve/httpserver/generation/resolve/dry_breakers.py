"""DRY's breakers as token sequences: which tokens of the vocabulary close each of the texts."""

from __future__ import annotations

import asyncio
from array import array
from functools import lru_cache
from typing import Final

from moeserve.httpserver.generation.request.asked import Asked
from moeserve.httpserver.transport.errors import invalid
from moeserve.sampling.parameters import SamplerSettings
from moeserve.tokenizer.text_tokenizer import TextTokenizer

MAX_TAIL: Final = 20  # tokens behind the first one of a breaker
MAX_SEQUENCES: Final = 1 << 16  # of several tokens


async def breakers_of(asked: Asked, sampler: SamplerSettings, tokenizer: TextTokenizer) -> bytes:
    """Returns `SamplingParams.dry_breakers`: empty where the request has no DRY. Raises ApiError 400."""
    if not sampler.dry_multiplier:
        return b""
    return await asyncio.to_thread(closed_breakers, tokenizer, asked.dry_sequence_breakers)


@lru_cache(maxsize=16)
def closed_breakers(tokenizer: TextTokenizer, breakers: tuple[str, ...]) -> bytes:
    """int32: each sequence with -1 behind it."""
    found: set[tuple[int, ...]] = set()
    for breaker in breakers:
        found |= _sequences(tokenizer, breaker)
    singles = {sequence[0] for sequence in found if len(sequence) == 1}
    longer = [sequence for sequence in found if singles.isdisjoint(sequence[-1:])]
    if len(longer) > MAX_SEQUENCES:
        message = f"can be written in more than {MAX_SEQUENCES} ways with this model's tokens"
        raise invalid("dry_sequence_breakers", message)
    words = [word for token in sorted(singles) for word in (token, -1)]
    words += [word for sequence in sorted(longer) for word in (*sequence, -1)]
    return array("i", words).tobytes()


def _sequences(tokenizer: TextTokenizer, breaker: str) -> set[tuple[int, ...]]:
    """Returns each token that contains the breaker, and each token that ends in its beginning with the tokens of the
    rest."""
    whole = breaker.encode()
    begins = [(breaker[:i].encode(), tuple(tokenizer.encode(breaker[i:]))) for i in range(1, len(breaker))]
    begins = [(begin, rest) for begin, rest in begins if len(rest) <= MAX_TAIL]
    found: set[tuple[int, ...]] = set()
    for token, text in enumerate(tokenizer.vocabulary.token_bytes):
        if whole in text:
            found.add((token,))
        else:
            found |= {(token, *rest) for begin, rest in begins if text.endswith(begin)}
    return found
