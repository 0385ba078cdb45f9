"""Which keys a query attends to in sparse attention. No torch."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class ChoiceRule:
    """Keys are in blocks of `block`, from position 0 on. A query attends to the `top` blocks with the highest scores,
    of equal scores to the first, and to its tail: the blocks that it does not score.

    local 0: the tail is the block that is incomplete at the query, if any, and a block has one index key, in the slot
    of its last key. local above 0: the tail is the query's own block and the local - 1 blocks before it; each key has
    an index key, a block's score is the highest of its keys', and each KV head chooses for the queries that read it.
    """

    top: int = 0  # 0: queries attend to all keys
    block: int = 1
    local: int = 0

    @property
    def by_head(self) -> bool:
        """True if each KV head chooses."""
        return self.local > 0

    def scored_blocks(self, position: int) -> int:
        """Returns the number of blocks before the tail of the query at `position`."""
        if self.local:
            return max(0, position // self.block + 1 - self.local)
        return (position + 1) // self.block

    @property
    def most_dense(self) -> int:
        """The longest context, in tokens, of which every query attends to all keys."""
        return (self.top + self.local) * self.block if self.local else (self.top + 1) * self.block - 1

    @property
    def most_keys(self) -> int:
        """The most keys that a query with a choice attends to."""
        return (self.top + self.local) * self.block + (0 if self.local else self.block - 1)

    @property
    def most_blocks(self) -> int:
        """The most blocks that a query with a choice attends to, with those of its tail."""
        return self.top + (self.local or int(self.block > 1))


def scores_of_choice(length: int, rule: ChoiceRule) -> int:
    """Returns how many blocks a choice may have scores of. length: of the longest request, in tokens."""
    return -(-length // rule.block)


# How programs of a GPU share the choice for one row (kernels/indexer/choice.py).
FEW_SCORES = 4096  # one program chooses for rows of up to this number of blocks
MOST_CANDIDATES = 8192
MOST_PARTS = 128


def candidates_of_choice(length: int, rule: ChoiceRule) -> int:
    """Returns for how many candidates a shared choice has room, a power of two; 0 if one program chooses. From a sample
    of 1,024 scores some 3,300 of 32,768 are candidates for 2,048."""
    scores = scores_of_choice(length, rule)
    if scores <= FEW_SCORES:
        return 0
    return FEW_SCORES if scores <= 1 << 15 else MOST_CANDIDATES


def sample_of_choice(length: int, rule: ChoiceRule) -> int:
    """Returns of how many scores a shared choice takes its candidates' bound, a power of two. The fewer of the highest
    keys are in the sample, the more candidates are needed to have these with certainty."""
    scores = scores_of_choice(length, rule)
    return 1024 if scores <= 1 << 16 else 2048 if scores <= 1 << 18 else 4096


def numbers_of_choice(length: int, rule: ChoiceRule) -> int:
    """Returns `scores_of_choice`, rounded up to a multiple of 16."""
    return -(-scores_of_choice(length, rule) // 16) * 16


def stride_of_choice(length: int, rule: ChoiceRule) -> int:
    """Returns how many numbers of 4 bytes a choice takes in a GPU's buffer of scores, a multiple of 16: its scores,
    and behind them the candidates, the parts' counts and the least candidate, of 8 bytes each."""
    candidates = candidates_of_choice(length, rule)
    return numbers_of_choice(length, rule) + (2 * (candidates + MOST_PARTS + 8) if candidates else 0)


ALL_KEYS = ChoiceRule()
