"""Derives the hashes of n-gram embeddings from config.json's settings.

A GGUF states the hashes' multipliers and the heads' rows. A checkpoint has only a seed and a minimum number of rows per
head, from which this module derives them.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import accumulate, islice
from math import isqrt

import numpy as np

_WORD = (1 << 64) - 1
_GOLDEN = 0x9E3779B97F4A7C15  # SplitMix64's increment
_LARGEST = (1 << 63) - 1


def multipliers(seed: int, count: int, vocab_size: int) -> list[int]:
    """Returns odd multipliers, one for each age of a token; a product with a token id stays below 2^63. They are
    outputs of SplitMix64 (https://doi.org/10.1145/2714064.2660195)."""
    half = max(1, _LARGEST // vocab_size // 2)
    return [2 * (_mixed((seed + _GOLDEN * (age + 1)) & _WORD) % half) + 1 for age in range(count)]


def _mixed(state: int) -> int:
    """SplitMix64's output function; its generator adds the increment once more before it."""
    z = (state + _GOLDEN) & _WORD
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
        z = (z ^ z >> shift) * factor & _WORD
    return z ^ z >> 31


def head_rows(least: int, count: int) -> list[int]:
    """Returns the rows of each head: the first `count` primes from `least` on. least: 2 to 2^32."""
    return list(islice(_primes_from(least), count))


def head_offsets(rows: list[int]) -> list[int]:
    """Returns the first row of each head in the table."""
    return [0, *accumulate(rows[:-1])]


def _primes_from(least: int) -> Iterator[int]:
    divisors = _primes_to(isqrt(least) + (1 << 12))  # also of the numbers that follow
    number = max(least, 2)
    while True:
        small = divisors[: np.searchsorted(divisors, isqrt(number), side="right")]
        if (number % small).all():
            yield number
        number += 1


def _primes_to(last: int) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
    """Returns the primes up to `last`, ascending (the sieve of Eratosthenes)."""
    is_prime = np.ones(last + 1, np.bool_)
    is_prime[:2] = False
    for number in range(2, isqrt(last) + 1):
        if is_prime[number]:
            is_prime[number * number :: number] = False
    return np.flatnonzero(is_prime)
