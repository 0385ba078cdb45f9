"""The resources that a sequence holds: KV slots, window slots, a state slot, and its place in the prefix tree.

`Request` is a subclass. The memories and tiers see only this part of it, without the scheduling. Each field has one
writer, named at its declaration.

    position   0 ................. num_shared ................. num_planned ......... len(slots)
               | owned by the tree,     | private to the sequence; | spare: granted for  |  not granted yet
               | referenced by `node`   | moved into the tree      | drafts, which may   |
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
    """A sequence of tokens with the slots that it holds; the scheduler's `Request` is one. Equality is
    identity."""

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
        """tokens: int32, the prompt. tenant, salt, adapter: sequences share cached prefixes only if these are equal."""
        self.id = ident
        self.num_prompt = num_prompt
        self.tenant = tenant
        self.cache_salt = salt
        self.adapter = adapter  # the LoRA adapter with which its KV and state are computed
        # The beams of a beam search, whose `tokens` and `slots` cover only the prompt. None for other requests.
        self.beams: BeamRows | None = None
        self.spans: list[
            EmbeddingSpan
        ] = []  # embedding spans of the prompt; `tokens` contains their numbers (`embedding_numbers.py`)

        # Written by Scheduler; for a beam search by BeamSearches, and by RunningBatch when it restarts. `tokens` is the
        # prompt, followed by each output token once its result has arrived.
        self.tokens: array[int] = array("i", tokens)
        # Written by RunningBatch: the number of known tokens when it was bound. Prefill ends there.
        self.target: int = 0

        # Written by KvMemory; see the module's docstring.
        self.slots: array[int] = array("i")
        self.num_shared: int = 0
        self.node: Node | None = None
        self.borrowed: int = 0  # slots from the cache that other running sequences also held

        # Written by `drafted_runs` when rows with drafts are planned and when their results arrive; KvMemory sets both
        # to 0 when it takes the slots back.
        self.spare: int = 0  # granted slots beyond num_planned
        self.pending_drafts: int = 0  # drafts that its rows in flight may accept

        # Written by SnapshotTaker. Positions beyond len(slots), ascending; a chunk ends at each so that a snapshot can
        # be taken.
        self.snapshot_points: list[SnapshotPoint] = []

        # Written by PageTiers, and `tiers_were_asked` also by RunningBatch. Whether the tiers were asked, since it
        # began to wait, for pages that continue its cached prefix.
        self.tiers_were_asked: bool = False
        self.tier_tokens: dict[Tier, int] = {}  # tokens loaded for it, by tier

        # Written by StateMemory. Once the plans sent so far are executed, the slot holds the state after positions 0 ..
        # num_planned-1 and after the drafts that they accept. -1: no slot, because it is not running or the model has
        # no recurrent state.
        self.state_slot: int = -1

        # Written by WindowMemory, if windowed layers have their own KV pool: that pool's slots for positions
        # window_first .. len(slots)-1, and the snapshot points of the sequence's window segments, ascending.
        self.window_slots: array[int] = array("i")
        self.window_first: int = 0
        self.window_points: list[SnapshotPoint] = []

    @property
    @abstractmethod
    def reuse_limit(self) -> int:
        """Number of leading positions that may come from the cache."""

    @property
    @abstractmethod
    def has_stopped(self) -> bool:
        """True if the last token ends the sequence; the worker then drafts nothing."""

    @property
    def num_planned(self) -> int:
        """Number of positions that the plans sent so far compute even if all drafts are rejected."""
        return len(self.slots) - self.spare

    @property
    def width(self) -> int:
        """Number of request slots that the sequence takes, which is also its number of rows in a step."""
        return 1 if self.beams is None else self.beams.width

    @property
    def state_slots(self) -> list[int]:
        """The state slot of each of its request slots."""
        return [self.state_slot] if self.beams is None else [self.state_slot, *self.beams.more_state_slots]

    @property
    def num_slots(self) -> int:
        """Number of KV slots that it holds."""
        return len(self.slots) if self.beams is None else len(self.slots) + self.beams.num_slots

    @property
    def next_position(self) -> int:
        """The position of the next row; for a beam search, of the next rows, which all have the same one."""
        if self.beams is None or not self.beams.search.length:
            return self.num_planned
        return self.beams.position + (not self.beams.is_due)

    @property
    def reusable(self) -> bytes:
        """The tokens, int32, whose KV may come from the cache."""
        return self.tokens[: self.reuse_limit].tobytes()

    def namespace(self, *, isolate_tenants: bool) -> Namespace:
        """Returns the namespace of the prefix tree in which its tokens are cached."""
        tenant = self.tenant if isolate_tenants else ""
        if self.adapter:
            return (tenant, self.cache_salt, self.adapter)
        return (tenant, self.cache_salt)
