"""The interface through which the scheduler uses the sequence memories: capacity, slots for rows, and copies per
step.

It covers the KV slots with the prefix tree, the windowed layers' pool, recurrent states, and the tiers in RAM and on
disk (`kv_memory.py`). Scheduling does not depend on which of these a model has, and no other module names them.
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
    """The slots of a row's new positions, in the format of `Row`."""

    kv: bytes
    window: bytes


class SequenceMemory(Protocol):
    """Gives sequences their slots: a sequence is attached, gets slots row by row, and is detached. Single-threaded."""

    # ---------------------------------------------------------------- room

    @property
    def num_slots(self) -> int:
        """Total number of KV slots."""
        ...

    @property
    def available(self) -> int:
        """KV slots that can be granted now: free ones, and cached ones without references, which can be evicted."""
        ...

    @property
    def num_held(self) -> int:
        """KV slots that running requests hold; a shared slot counts once."""
        ...

    def lookup(self, request: HeldSequence) -> tuple[int, int]:
        """Returns how many leading tokens `attach` would find in the cache, and how many of them no running request
        references. Changes nothing."""
        ...

    def awaits_snapshot(self, request: HeldSequence, prompts: Iterable[HeldSequence]) -> bool:
        """Returns whether a waiting request should wait for a snapshot that one of the running `prompts` will leave;
        if so, makes that prompt leave it."""
        ...

    def begin_load(self, request: HeldSequence, now: float) -> bool:
        """Starts to load more of a waiting request's prefix from a tier, if worthwhile. Returns whether the request
        must wait. now: monotonic seconds."""
        ...

    def leave_load(self, request: HeldSequence) -> None:
        """Ends a request's wait for its load."""
        ...

    # ---------------------------------------------------------------- a sequence's slots

    def opened(self, request: HeldSequence) -> None:
        """Prepares a new request for `lookup` and `attach`: its embedding spans get their numbers."""
        ...

    def closed(self, request: HeldSequence) -> None:
        """Forgets a request that has ended and holds nothing."""
        ...

    def attach(self, request: HeldSequence) -> None:
        """Gives a request without slots its longest cached prefix and the state and window slots that it needs to
        run."""
        ...

    def grant(self, request: HeldSequence, count: int) -> RowSlots:
        """Adds slots for `count` more positions and returns those, evicting cached prefixes if needed. Raises
        PoolExhausted for more than `available`."""
        ...

    def grant_each(self, requests: Sequence[HeldSequence]) -> Iterable[tuple[bytes, bytes]]:
        """`grant` of one position for each request; yields (kv, window) pairs."""
        ...

    def grant_beams(self, request: HeldSequence) -> tuple[list[Fork], Iterable[tuple[bytes, bytes]]]:
        """Adds a slot for one more position of each beam of a beam search, as `grant` does for a request. Returns the
        forks that the worker must make before the step, and for each beam the pair of its KV slot and its slot in the
        windowed layers' pool, int32 as bytes, as `grant_each` yields them."""
        ...

    def advance_beams(self, request: HeldSequence, tops: Sequence[TokenLogprob]) -> int:
        """Advances a search by its rows' results (`BeamRows.advance`). Returns the number of forks."""
        ...

    def publish(self, request: HeldSequence) -> None:
        """Moves the slots of a request's known, planned tokens into the prefix tree for sharing. If the tree got the
        same tokens from another request meanwhile, the slots stay private until the request leaves."""
        ...

    def save(self, request: HeldSequence) -> None:
        """Schedules the computed part of a request for writing to a tier, if there is one."""
        ...

    def detach(self, request: HeldSequence, *, forget: bool = False, preempted: bool = False) -> None:
        """Takes back all slots of a request. The slots of its known tokens stay cached until evicted, and its state
        becomes a snapshot; with `forget`, slots that no other request references are freed at once. preempted: the
        request will be bound again, which the snapshot's kind tells."""
        ...

    # ---------------------------------------------------------------- steps

    def price_with(self, recompute_ms: Callable[[int, int], float]) -> None:
        """Sets the cost model; called once. recompute_ms(position, count): returns the milliseconds to compute `count`
        tokens from `position` on; 0: unknown."""
        ...

    @property
    def is_synced(self) -> bool:
        """True once the worker has reported the contents of its tiers. Until then no rows may be planned."""
        ...

    @property
    def is_loading(self) -> bool:
        """True while a request waits for a load."""
        ...

    @property
    def has_work(self) -> bool:
        """True if the worker has copies to execute or results to report, even without rows."""
        ...

    def begin_step(self, now: float, *, beside_decoding: bool) -> None:
        """Chooses the pages written to tiers with the step being planned, before slots are granted for it. now:
        monotonic seconds."""
        ...

    def begin_rows(self) -> None:
        """Frees slots that no later row reads, and takes the due snapshots. Call it before the rows of a step are
        planned, and again if they are planned anew."""
        ...

    def end_step(self, now: float) -> PageOrders | None:
        """Returns the step's copies between the pool and its tiers, as `StepPlan.pages`; None if there are none. now:
        monotonic seconds."""
        ...

    def take_copies(self) -> bytes:
        """Returns the recurrent-state copies for a plan that is sent now, as `StepPlan.state_copies`."""
        ...

    def take_report(self, report: PageReport | None, now: float) -> list[HeldSequence]:
        """Takes the worker's report with a step's result. Returns the requests whose loads have ended. now: monotonic
        seconds."""
        ...

    def clear(self) -> None:
        """Forgets everything after the worker was lost. No request may hold slots."""
        ...

    def close(self) -> None:
        """Ends all loads and writes, which no worker will complete."""
        ...

    # ---------------------------------------------------------------- statistics

    def set_gauges(self, report: LoadReport) -> None:
        """Sets the report's gauges of slots, snapshots and pages, by holder."""
        ...

    def take_events(self) -> list[KvEvent]:
        """Returns the changes of the prefix cache since the last call, in order."""
        ...

    def check_counts(self, running: Collection[HeldSequence]) -> None:
        """Raises AssertionError if the sizes do not add up. O(running)."""
        ...

    def check_slots(self, running: Collection[HeldSequence]) -> None:
        """Raises AssertionError unless every KV slot is free, private to one request or in the tree, and every state
        slot is free, a request's or a snapshot. O(slots)."""
        ...
