"""DRY's sequence breakers as token sequences: the ways in which the vocabulary can spell each breaker's end."""

from __future__ import annotations

import asyncio
from array import array
from functools import lru_cache
from typing import Final

from moeserve.httpserver.generation.request.asked import Asked
from moeserve.httpserver.transport.errors import invalid
from moeserve.sampling.parameters import SamplerSettings
from moeserve.tokenizer.text_tokenizer import TextTokenizer

MAX_TAIL: Final = 20  # tokens of a breaker after its first one
MAX_SEQUENCES: Final = 1 << 16  # sequences of more than one token


async def breakers_of(asked: Asked, sampler: SamplerSettings, tokenizer: TextTokenizer) -> bytes:
    """Returns `SamplingParams.dry_breakers`: empty if the request does not use DRY. Raises ApiError 400."""
    if not sampler.dry_multiplier:
        return b""
    return await asyncio.to_thread(closed_breakers, tokenizer, asked.dry_sequence_breakers)


@lru_cache(maxsize=16)
def closed_breakers(tokenizer: TextTokenizer, breakers: tuple[str, ...]) -> bytes:
    """Returns the breakers' token sequences as int32 bytes, with -1 after each sequence."""
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
    """Returns the token sequences of a breaker: each token that contains the whole breaker; and each token that ends
    with the breaker's beginning, followed by the tokens of the breaker's rest."""
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
