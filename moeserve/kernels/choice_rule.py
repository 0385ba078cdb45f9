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


ALL_KEYS = ChoiceRule()
