"""Which rows of the table a token's n-gram embeddings are: hashes of the token and of those before it."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Int32s = npt.NDArray[np.int32]
Int64s = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class NgramHashes:
    """Heads of the orders 2 to `size`, with len(head_rows) / (size - 1) heads per order. A head of order k hashes
    the last k tokens to one of its own rows of the table."""

    multipliers: tuple[int, ...]  # by age of a token, 0 first; products with token ids are below 2^63
    head_rows: tuple[int, ...]  # rows of each head, lower orders first
    head_offsets: tuple[int, ...]  # first row of each head
    end_token: int  # tokens before it, and those before the first, count as it

    @property
    def size(self) -> int:
        """Tokens of the largest n-gram."""
        return len(self.multipliers)

    def rows(self, tokens: Int32s, previous: Int32s) -> Int64s:
        """Returns the table's rows of n tokens, int64 [n, heads]. tokens: [n]; previous: [n, size - 1], the tokens
        before each, the nearest first; -1 before the sequence's first."""
        mixed = tokens.astype(np.int64) * self.multipliers[0]
        orders = []
        ended = np.zeros(len(tokens), np.bool_)
        for age in range(1, self.size):
            token = previous[:, age - 1].astype(np.int64)
            ended = ended | (token < 0) | (token == self.end_token)
            mixed = mixed ^ np.where(ended, self.end_token, token) * self.multipliers[age]
            orders.append(mixed)
        hashes = np.repeat(np.stack(orders, axis=1), len(self.head_rows) // (self.size - 1), axis=1)
        return hashes % np.array(self.head_rows, np.int64) + np.array(self.head_offsets, np.int64)
