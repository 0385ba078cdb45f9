"""What a sequence holds of every memory: KV slots, window slots, a state slot, its place in the prefix tree.

`Request` is one. The memories and tiers know this much of it, and nothing of its scheduling. Every field has one
writer, named where it is declared.

    position   0 ................. num_shared ................. num_planned ......... len(slots)
               | owned by the tree,     | private to the sequence; | spare: granted for  |  not granted yet
               | referenced by `node`   | the tree takes them      | drafts, which may   |
               |                        | when it leaves           | be rejected         |
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from array import array

from moeserve.messages.pages import Tier
from moeserve.messages.prompt_embeddings import EmbeddingSpan
from moeserve.router.core.beams.beam_rows import BeamRows
from moeserve.router.core.memory.radix_node import Namespace, Node
from moeserve.router.core.memory.snapshot_points import SnapshotPoint


class HeldSequence(ABC):
    """Compared by identity."""

    __slots__ = (
        "adapter",
        "beams",
        "borrowed",
        "cache_salt",
        "id",
        "node",
        "num_prompt",
        "num_shared",
        "pending_drafts",
        "slots",
        "snapshot_points",
        "spans",
        "spare",
        "state_slot",
        "target",
        "tenant",
        "tier_tokens",
        "tiers_were_asked",
        "tokens",
        "window_first",
        "window_points",
        "window_slots",
    )

    def __init__(
        self, ident: int, tokens: bytes, num_prompt: int, tenant: str, salt: str, adapter: str
    ) -> None:
        """tokens: int32, the prompt's. tenant, salt, adapter: only sequences that share them share a prefix."""
        self.id = ident
        self.num_prompt = num_prompt
        self.tenant = tenant
        self.cache_salt = salt
        self.adapter = adapter  # the adapter that its KV and state are computed with
        # A beam search's output; its `tokens` and `slots` are the prompt's alone. None for other requests.
        self.beams: BeamRows | None = None
        self.spans: list[
            EmbeddingSpan
        ] = []  # of its prompt; in `tokens` they have numbers (`embedding_numbers.py`)

        # Written by Scheduler; of a beam search, by BeamSearches, and by RunningBatch where it begins again. `tokens`
        # is the prompt, then each output token as its result arrives.
        self.tokens: array[int] = array("i", tokens)
        # Written by RunningBatch: the number of tokens known when it was bound. Prefill ends there.
        self.target: int = 0

        # Written by KvMemory; see above.
        self.slots: array[int] = array("i")
        self.num_shared: int = 0
        self.node: Node | None = None
        self.borrowed: int = 0  # slots found in the cache that other running sequences held then

        # Written by `drafted_runs`, as rows with drafts are planned and have their results; KvMemory zeroes both as it
        # takes the slots.
        self.spare: int = 0  # slots beyond num_planned
        self.pending_drafts: int = 0  # that its rows in flight may accept

        # Written by SnapshotTaker. Positions beyond len(slots) where a chunk ends, so that a snapshot can be taken;
        # ascending.
        self.snapshot_points: list[SnapshotPoint] = []

        # Written by PageTiers; `tiers_were_asked` by RunningBatch, too.
        # Whether the tiers were asked for pages that continue it, since it waits.
        self.tiers_were_asked: bool = False
        self.tier_tokens: dict[Tier, int] = {}  # loaded for it

        # Written by StateMemory. The slot's state is that after positions 0 .. num_planned-1, once the plans sent so
        # far are executed, and after the drafts that they accept. -1: none, where it does not run or the model has no
        # recurrent state.
        self.state_slot: int = -1

        # Written by WindowMemory, of a model whose windowed layers have a KV pool of their own: that pool's slots of
        # positions window_first .. len(slots)-1, and the snapshot points of its window segments, ascending.
        self.window_slots: array[int] = array("i")
        self.window_first: int = 0
        self.window_points: list[SnapshotPoint] = []

    @property
    @abstractmethod
    def reuse_limit(self) -> int:
        """How many leading positions may come from the cache."""

    @property
    @abstractmethod
    def has_stopped(self) -> bool:
        """Its last token ends it, so the worker drafts nothing behind it."""

    @property
    def num_planned(self) -> int:
        """Positions that the plans sent so far compute even if none of their drafts is accepted."""
        return len(self.slots) - self.spare

    @property
    def width(self) -> int:
        """Request slots that it takes, and the most rows that it has in a step."""
        return 1 if self.beams is None else self.beams.width

    @property
    def state_slots(self) -> list[int]:
        """The state slot of each of its request slots."""
        return [self.state_slot] if self.beams is None else [self.state_slot, *self.beams.more_state_slots]

    @property
    def num_slots(self) -> int:
        """KV slots that it holds."""
        return len(self.slots) if self.beams is None else len(self.slots) + self.beams.num_slots

    @property
    def next_position(self) -> int:
        """The position of its next row, or of its next rows if it is a beam search."""
        if self.beams is None or not self.beams.search.length:
            return self.num_planned
        return self.beams.position + (not self.beams.is_due)

    @property
    def reusable(self) -> bytes:
        """The tokens, int32, whose KV may come from the cache."""
        return self.tokens[: self.reuse_limit].tobytes()

    def namespace(self, *, isolate_tenants: bool) -> Namespace:
        """The namespace of the prefix tree that its tokens share."""
        tenant = self.tenant if isolate_tenants else ""
        if self.adapter:
            return (tenant, self.cache_salt, self.adapter)
        return (tenant, self.cache_salt)
