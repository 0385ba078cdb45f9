"""Which keys a query attends to in sparse attention. No torch."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class ChoiceRule:
    """Keys are in blocks of `block`, from position 0 on. A query attends to the `top` blocks with the highest scores
    (of equal scores, the first ones), and to its tail: the blocks that it does not score.

    local 0: the tail is the block that is incomplete at the query, if any, and a block has one index key, in the
    slot of its last key. local above 0: the tail is the query's own block and the local - 1 blocks before it; each
    key has an index key, a block's score is the highest of its keys', and each KV head chooses for the queries that
    read it.
    """

    top: int = 0  # 0: queries attend to all keys
    block: int = 1
    local: int = 0

    @property
    def by_head(self) -> bool:
        """True if each KV head chooses."""
        return self.local > 0

    def scored_blocks(self, position: int) -> int:
        """Returns how many blocks the query at `position` scores: the ones before its tail."""
        if self.local:
            return max(0, position // self.block + 1 - self.local)
        return (position + 1) // self.block

    @property
    def most_dense(self) -> int:
        """The longest context, in tokens, in which every query attends to all keys."""
        return (self.top + self.local) * self.block if self.local else (self.top + 1) * self.block - 1

    @property
    def most_keys(self) -> int:
        """The most keys that a query with a choice attends to."""
        return (self.top + self.local) * self.block + (0 if self.local else self.block - 1)

    @property
    def most_blocks(self) -> int:
        """The most blocks that a query with a choice attends to, its tail's included."""
        return self.top + (self.local or int(self.block > 1))


def scores_of_choice(length: int, rule: ChoiceRule) -> int:
    """Returns the maximum number of blocks that a choice scores. length: the longest request's, in tokens."""
    return -(-length // rule.block)


# How programs of a GPU share the choice for one row (kernels/indexer/choice.py).
FEW_SCORES = 4096  # one program chooses for rows of up to this number of blocks
MOST_CANDIDATES = 8192
MOST_PARTS = 128


def candidates_of_choice(length: int, rule: ChoiceRule) -> int:
    """Returns the number of candidates that a shared choice has room for, a power of two; 0 if one program chooses.
    Example: to choose 2,048 of 32,768 keys by a sample of 1,024 scores takes some 3,300 candidates."""
    scores = scores_of_choice(length, rule)
    if scores <= FEW_SCORES:
        return 0
    return FEW_SCORES if scores <= 1 << 15 else MOST_CANDIDATES


def sample_of_choice(length: int, rule: ChoiceRule) -> int:
    """Returns the number of scores in the sample that gives a shared choice its lower bound for candidates, a power
    of two. The fewer of the highest keys the sample has, the more candidates are needed to be sure to include these
    keys."""
    scores = scores_of_choice(length, rule)
    return 1024 if scores <= 1 << 16 else 2048 if scores <= 1 << 18 else 4096


def numbers_of_choice(length: int, rule: ChoiceRule) -> int:
    """Returns `scores_of_choice`, rounded up to a multiple of 16."""
    return -(-scores_of_choice(length, rule) // 16) * 16


def stride_of_choice(length: int, rule: ChoiceRule) -> int:
    """Returns the size of a choice in a GPU's buffer of scores, in numbers of 4 bytes, a multiple of 16: its scores,
    then the candidates, the parts' counts and the lowest candidate (8 bytes each)."""
    candidates = candidates_of_choice(length, rule)
    return numbers_of_choice(length, rule) + (2 * (candidates + MOST_PARTS + 8) if candidates else 0)


ALL_KEYS = ChoiceRule()
