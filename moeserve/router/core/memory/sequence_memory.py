"""What the rest of the core may ask of the memories of sequences: room for one, slots for its rows, what a step moves.

Behind it are the KV slots with the prefix tree, the windowed layers' own pool, recurrent states, and the tiers in RAM
and on disk (`kv_memory.py`). No other module names them: a scheduling decision is the same whichever of them a model
has.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from typing import NamedTuple, Protocol

from moeserve.messages.kv_events import KvEvent
from moeserve.messages.pages import PageOrders, PageReport
from moeserve.messages.router_metrics import LoadReport
from moeserve.messages.sampling import TokenLogprob
from moeserve.messages.steps import Fork
from moeserve.router.core.memory.held import HeldSequence


class RowSlots(NamedTuple):
    """The slots of a row's new positions, as `Row` has them."""

    kv: bytes
    window: bytes


class SequenceMemory(Protocol):
    """Sequences are attached, get slots row by row, and are detached. Calls come from one thread."""

    # ---------------------------------------------------------------- room

    @property
    def num_slots(self) -> int:
        """KV slots in all."""
        ...

    @property
    def available(self) -> int:
        """KV slots that may be granted now: the free ones and the unreferenced cached ones, which it may evict."""
        ...

    @property
    def num_held(self) -> int:
        """KV slots that running requests hold, each counted once however many share it."""
        ...

    def lookup(self, request: HeldSequence) -> tuple[int, int]:
        """How many leading tokens `attach` would find in the cache, and how many of those no running request
        references. Changes nothing."""
        ...

    def awaits_snapshot(self, request: HeldSequence, prompts: Iterable[HeldSequence]) -> bool:
        """Whether a waiting request does better to wait for a snapshot that one of `prompts` under way will leave. Has
        them leave it."""
        ...

    def begin_load(self, request: HeldSequence, now: float) -> bool:
        """Whether a waiting request is to wait until more of it is loaded from a tier, which begins."""
        ...

    def leave_load(self, request: HeldSequence) -> None:
        """Ends a request's wait for its load."""
        ...

    # ---------------------------------------------------------------- a sequence's slots

    def opened(self, request: HeldSequence) -> None:
        """Allows a request to be looked up and attached: its spans get the tokens by which caches know them."""
        ...

    def closed(self, request: HeldSequence) -> None:
        """Forgets a request that has ended and holds nothing."""
        ...

    def attach(self, request: HeldSequence) -> None:
        """Gives the longest cached prefix of its tokens to a request that holds no slots, and what else it runs in."""
        ...

    def grant(self, request: HeldSequence, count: int) -> RowSlots:
        """Appends slots for `count` more positions, evicting cached prefixes as needed. Raises PoolExhausted for more
        than `available`."""
        ...

    def grant_each(self, requests: Sequence[HeldSequence]) -> Iterable[tuple[bytes, bytes]]:
        """`grant` of one position to each; gives `RowSlots` as plain pairs."""
        ...

    def grant_beams(self, request: HeldSequence) -> tuple[list[Fork], Iterable[tuple[bytes, bytes]]]:
        """The same for each beam of a search, with what the worker is to do before."""
        ...

    def advance_beams(self, request: HeldSequence, tops: Sequence[TokenLogprob]) -> int:
        """Takes the results of a search's rows (`BeamRows.advance`). Returns the number of forks."""
        ...

    def publish(self, request: HeldSequence) -> None:
        """Moves the planned slots of its known tokens into the prefix tree, so that other requests share them. If
        another request has put the same tokens there meanwhile, these slots stay private until the request leaves."""
        ...

    def save(self, request: HeldSequence) -> None:
        """Has the computed part of a request written to a tier, if there is one."""
        ...

    def detach(self, request: HeldSequence, *, forget: bool = False, preempted: bool = False) -> None:
        """Takes back all slots of a request. The slots of its known tokens stay cached until they are evicted, and its
        state becomes a snapshot; with `forget`, those that no other request references are freed at once."""
        ...

    # ---------------------------------------------------------------- steps

    def price_with(self, recompute_ms: Callable[[int, int], float]) -> None:
        """recompute_ms: milliseconds that computing tokens takes, by position and number; 0: not known. Called once."""
        ...

    @property
    def is_synced(self) -> bool:
        """Whether the worker has reported what its tiers hold. Until then, no step has rows."""
        ...

    @property
    def is_loading(self) -> bool:
        """Some request waits for a tier."""
        ...

    @property
    def has_work(self) -> bool:
        """The worker has orders to execute or something to report, with or without rows."""
        ...

    def begin_step(self, now: float, *, beside_decoding: bool) -> None:
        """Decides what is written to tiers with the step that is being planned, before any slot is taken for it."""
        ...

    def begin_rows(self) -> None:
        """Frees what no later row reads, and takes the snapshots that are due. Called before a step's rows are planned,
        and again where they are planned anew."""
        ...

    def end_step(self, now: float) -> PageOrders | None:
        """What the step moves between the pool and its tiers, as `StepPlan.pages`."""
        ...

    def take_copies(self) -> bytes:
        """The copies of recurrent states for a plan that is sent now, as `StepPlan.state_copies`."""
        ...

    def take_report(self, report: PageReport | None, now: float) -> list[HeldSequence]:
        """Takes the worker's report with a step's result. Returns the requests whose loads have ended."""
        ...

    def clear(self) -> None:
        """Forgets everything: the worker that had it is lost. No request holds slots."""
        ...

    def close(self) -> None:
        """Ends all loads and writes: no worker will answer them."""
        ...

    # ---------------------------------------------------------------- statistics

    def set_gauges(self, report: LoadReport) -> None:
        """Sets the report's numbers of slots, snapshots and pages, by holder."""
        ...

    def take_events(self) -> list[KvEvent]:
        """What the prefix cache has gained and lost since the last call, in order."""
        ...

    def check_counts(self, running: Collection[HeldSequence]) -> None:
        """Raises AssertionError when the sizes do not add up. O(running)."""
        ...

    def check_slots(self, running: Collection[HeldSequence]) -> None:
        """Raises AssertionError unless every slot is free, private to one request, or in the tree, and every state slot
        free, of one request, or a snapshot. O(slots)."""
        ...
