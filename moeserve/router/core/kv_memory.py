"""The owner of every KV slot: free + private to one request or to a load from a tier + in the prefix tree = all slots,
after every call.

The slots of a request, by position:

    position   0 ................. num_shared ................. len(slots)
               | owned by the tree,     | private to the request; |  not planned yet
               | referenced by `node`   | the tree takes them     |
               |                        | when it leaves          |

Slots in the tree may be shared at once, although their KV may be computed only in a later step: the worker executes
plans in order and, in each layer, writes the KV of all rows of a step before any row attends.

Of a model with recurrent state, a request continues from a snapshot (`state_memory.py`), and computes again what the
tree has beyond it: into private slots, because a slot has one writer. `publish` exchanges them for the slots that the
tree has for the same tokens, unless another running request references those.

Where windowed layers have a KV pool of their own, all of this is about the full layers' slots; `window_memory.py` has
the others. A request then continues from an island as from a snapshot.
"""

from __future__ import annotations

from array import array
from collections.abc import Collection, Iterable, Sequence
from dataclasses import replace

from moeserve.messages.kv_events import KvEvent
from moeserve.messages.load import LoadReport
from moeserve.messages.sampling import TokenLogprob
from moeserve.router.core.limits import Limits
from moeserve.router.core.memory.block_log import BlockLog
from moeserve.router.core.memory.held import HeldSequence
from moeserve.router.core.memory.radix_cache import RadixCache
from moeserve.router.core.memory.radix_node import Node, SnapshotKind
from moeserve.router.core.memory.snapshot_points import DEFAULT_SPACING, BorderSpacing
from moeserve.router.core.memory.snapshot_taker import SnapshotTaker
from moeserve.router.core.memory.state_memory import StateMemory
from moeserve.router.core.memory.token_pool import TokenPool
from moeserve.router.core.memory.window_memory import WindowMemory
from moeserve.router.core.tiers.page_tiers import PageTiers
from moeserve.router.core.tiers.tier_sizes import TierSizes


class KvMemory:
    """The only writer of a request's `slots`, `node`, `num_shared` and `borrowed`, and of the slots of its beams."""

    def __init__(
        self,
        num_slots: int,
        totals: LoadReport,
        *,
        reuse: bool = True,
        isolate_tenants: bool = False,
        num_state_slots: int = 0,
        border_spacing: BorderSpacing = DEFAULT_SPACING,
        tiers: TierSizes | None = None,
        event_block_size: int | None = None,
        num_window_slots: int = 0,
        window: int = 0,
    ) -> None:
        """`num_state_slots`: 0 for a model without recurrent state. `border_spacing`: of its snapshots in prompts.
        `num_window_slots`: of the windowed layers' own pool, of so many tokens' window; 0: there is none. It goes with
        neither recurrent state nor tiers.
        `tiers`: behind the pool; None: there are none. `event_block_size`: of KV events, in tokens; None: there are
        none."""
        self._pool = TokenPool(num_slots)
        self._log = None if event_block_size is None else BlockLog(event_block_size)
        self._tree = RadixCache(recurrent=num_state_slots > 0 or num_window_slots > 0, log=self._log)
        self.states = StateMemory(num_state_slots, self._tree, totals)
        spacing = replace(border_spacing, align=1 if tiers is None else tiers.page_tokens)
        self._taker = SnapshotTaker(self._tree, self.states, spacing)
        self._is_recurrent = num_state_slots > 0
        self.windows: WindowMemory | None = None
        if num_window_slots:
            assert not self._is_recurrent
            assert tiers is None
            self.windows = WindowMemory(num_window_slots, window, self._tree, border_spacing, totals)
        self._reuse = reuse
        self._isolate = isolate_tenants
        self.tiers: PageTiers | None = None
        if tiers is not None and reuse:
            states = self.states if self._is_recurrent else None
            self.tiers = PageTiers(
                tiers, self._tree, states, self.take, self._pool.free, lambda: self.available, totals
            )

    @classmethod
    def within(cls, limits: Limits, totals: LoadReport) -> KvMemory:
        return cls(
            limits.num_kv_slots,
            totals,
            reuse=limits.reuse_prefixes,
            isolate_tenants=limits.isolate_tenants,
            num_state_slots=limits.num_state_slots,
            border_spacing=limits.border_spacing,
            tiers=limits.tier_sizes,
            event_block_size=limits.event_block_size,
            num_window_slots=limits.num_window_slots,
            window=limits.window,
        )

    @property
    def num_slots(self) -> int:
        return self._pool.num_slots

    @property
    def available(self) -> int:
        """Slots that `take` could return: the free ones and the unreferenced cached ones, which it may evict."""
        return self._pool.num_free + self._tree.num_idle

    @property
    def num_held(self) -> int:
        """Slots that running requests hold, each counted once however many share it."""
        return self._pool.num_slots - self.available

    @property
    def num_cached(self) -> int:
        """Slots of cached prefixes that no running request references."""
        return self._tree.num_idle

    def lookup(self, request: HeldSequence) -> tuple[int, int]:
        """How many leading tokens `attach` would find in the cache, and how many of those no running request
        references. Changes nothing."""
        if not self._reuse:
            return 0, 0
        return self._tree.match(request.namespace(isolate_tenants=self._isolate), request.reusable)

    def attach(self, request: HeldSequence) -> None:
        """Gives the longest cached prefix of its tokens to a request that holds no slots, and a state slot."""
        if self._is_recurrent and request.beams is not None:
            request.beams.more_state_slots = self.states.take_more(request.width - 1)
        if not self._reuse:
            if self._is_recurrent:
                self.states.bind(request, None)
            if self.windows is not None:
                self.windows.attach(request, 0)
            return
        namespace, tokens = request.namespace(isolate_tenants=self._isolate), request.reusable
        idle_before = self._tree.num_idle
        request.node, request.slots = self._tree.acquire(namespace, tokens)
        request.num_shared = len(request.slots)
        request.borrowed = request.num_shared - (idle_before - self._tree.num_idle)
        if self._is_recurrent:
            self.states.bind(request, request.node.snapshot)
            self._taker.bound(request, self._tree.num_matched(namespace, tokens))
        if self.windows is not None:
            self.windows.attach(request, self._tree.num_matched(namespace, tokens))

    def take(self, count: int) -> array[int]:
        """Takes `count` slots, evicting cached prefixes as needed; the caller appends them to a request's `slots`.
        Raises PoolExhausted for more than `available`."""
        lacking = count - self._pool.num_free
        if lacking > 0:
            self._pool.free(self._tree.evict(lacking))
            self._reclaim()
        return self._pool.alloc(count)

    def publish(self, request: HeldSequence) -> None:
        """Moves the planned slots of its known tokens into the tree, so that other requests share them. If another
        request has put the same tokens there meanwhile, these slots stay private until the request leaves."""
        end = min(request.num_planned, len(request.tokens))
        if request.node is None or request.num_shared == end:
            return
        if self.windows is None:
            self._publish_up_to(request, end)
        else:
            self._publish_windows(request, end, self.windows)
        if self._is_recurrent:
            self._taker.planned(request)

    def _publish_windows(self, request: HeldSequence, end: int, windows: WindowMemory) -> None:
        """`publish`, with an island at each border on the way."""
        stays = end - windows.window + 1 if end == request.target else None
        for border in windows.borders(request, end):
            position, kind = border
            if kind is SnapshotKind.PROMPT and end - position < windows.window:
                stays = position - windows.window + 1  # one island, from there to the chunk's end
            elif position == end:
                stays = end - windows.window + 1
            else:
                self._publish_up_to(request, position)
                windows.keep_border(request, self._node_at(request, position), border)
        self._publish_up_to(request, end)
        windows.keep_chunk(request, self._node_at(request, end), end, stays)
        self._reclaim()

    def _node_at(self, request: HeldSequence, position: int) -> Node | None:
        """The node that ends with the first `position` tokens of a request, of which the tree may have others' KV."""
        assert request.node is not None
        return self._tree.node_at(request.node, request.tokens[request.num_shared : position].tobytes())

    def _publish_up_to(self, request: HeldSequence, end: int) -> None:
        assert request.node is not None
        begin = request.num_shared
        if begin == end:
            return
        node = self._tree.extend(request.node, request.tokens[begin:end].tobytes(), request.slots[begin:end])
        if node is not None:
            request.node, request.num_shared = node, end
        elif self._is_recurrent or self.windows is not None:
            self._exchange(request, end)

    def _exchange(self, request: HeldSequence, end: int) -> None:
        """Gives the tree the private slots before `end` in place of those that it has for the same tokens."""
        assert request.node is not None
        begin = request.num_shared
        tokens, slots = request.tokens[begin:end].tobytes(), request.slots[begin:end]
        adopted = self._tree.adopt(request.node, tokens, slots)
        if adopted is not None:
            request.node, freed = adopted
            request.num_shared = end
            self._pool.free(freed)

    def detach(
        self, request: HeldSequence, *, forget: bool = False, kind: SnapshotKind = SnapshotKind.ANSWER
    ) -> None:
        """Takes back all slots of a request. The slots of its known tokens stay cached until they are evicted, and its
        state becomes a snapshot of `kind`; with `forget`, those that no other request references are freed at once."""
        if not forget:
            self.save(request)
        has_moved = request.beams is not None and request.beams.search.length > 0
        self._stop_beams(request)
        num_planned = request.num_planned
        begin, end = request.num_shared, min(num_planned, len(request.tokens))
        # Its last row may have consumed a token whose value never became known: such a state is of no use. Nor is one
        # that a row in flight moves on by drafts, which none does behind a stop token.
        is_still = request.pending_drafts == 0 or request.has_stopped
        last: Node | None = None
        if request.node is None:
            begin = end = 0
        elif forget:
            end = begin
            self._pool.free(self._tree.discard(request.node))
        else:
            tokens, slots = request.tokens[begin:end].tobytes(), request.slots[begin:end]
            surplus, last = self._tree.release(request.node, tokens, slots)
            self._pool.free(surplus)
        if self._is_recurrent:
            is_known = 0 < num_planned == end and not has_moved and is_still
            self._leave_state(request, last if is_known else None, kind)
        if self.windows is not None:
            self.windows.leave(request, last, end, kind)
        self._pool.free(request.slots[end:])
        request.slots, request.node = array("i"), None
        request.num_shared = request.borrowed = request.spare = request.pending_drafts = 0

    def _stop_beams(self, request: HeldSequence) -> None:
        if request.beams is None:
            return
        self._pool.free(request.beams.stop())
        if self.windows is not None:
            self.windows.free_beams(request)
        if self._is_recurrent:
            self.states.free_more(request.beams.more_state_slots)
            request.beams.more_state_slots = [-1] * (request.width - 1)

    def advance_beams(self, request: HeldSequence, tops: Sequence[TokenLogprob]) -> int:
        """Takes the results of a search's rows (`BeamRows.advance`). Returns the number of forks."""
        assert request.beams is not None
        freed, forks = request.beams.advance(tops)
        self._pool.free(freed)
        if self.windows is not None:
            self.windows.free_beams(request)
        if self._is_recurrent:
            state_slots = dict(zip(request.beams.req_slots, request.state_slots, strict=True))
            for source, target in forks:
                self.states.copy(state_slots[source], state_slots[target])
        return len(forks)

    def _leave_state(self, request: HeldSequence, node: Node | None, kind: SnapshotKind) -> None:
        """Makes the state of a request that leaves the snapshot at `node`; frees it for None."""
        self._taker.left(request)
        if node is None:
            self.states.free(request)
        else:
            self.states.keep(request, node, kind)
        self.states.reclaim()

    # ---------------------------------------------------------------- snapshots

    def begin_plan(self) -> None:
        """Copies the states that have reached a border, and frees what windowed layers read no more. Called when a plan
        is begun, before any other change."""
        self._taker.take()
        if self.windows is not None:
            self.windows.begin_plan()

    def _reclaim(self) -> None:
        """Takes back what the snapshots held whose KV the tree has given up."""
        if self.windows is None:
            self.states.reclaim()
        else:
            self.windows.reclaim()

    def awaits_snapshot(self, request: HeldSequence, prompts: Iterable[HeldSequence]) -> bool:
        """Whether a waiting request does better to wait for a snapshot that one of `prompts` under way will leave. Has
        them leave it."""
        if not self._is_recurrent or not self._reuse:
            return False
        found, _ = self.lookup(request)
        namespace = request.namespace(isolate_tenants=self._isolate)
        same = (prompt for prompt in prompts if prompt.namespace(isolate_tenants=self._isolate) == namespace)
        return self._taker.ask(request.reusable, found, same)

    # ---------------------------------------------------------------- tiers

    def save(self, request: HeldSequence) -> None:
        """Has what is computed of a request written to a tier, if there is one."""
        if self.tiers is not None:
            end = min(request.num_planned, len(request.tokens))
            self.tiers.save(request.namespace(isolate_tenants=self._isolate), request.tokens[:end].tobytes())

    def begin_load(self, request: HeldSequence, now: float) -> bool:
        """Whether a waiting request is to wait until more of it is loaded from a tier, which begins."""
        if self.tiers is None or request.tiers_were_asked:
            return False
        return self.tiers.begin_load(
            request, request.namespace(isolate_tenants=self._isolate), request.reusable, now
        )

    def clear(self) -> None:
        """Forgets all KV and all state: the worker that had them is lost. No request holds slots."""
        if self.tiers is not None:
            self.tiers.reset()
        self._pool.free(self._tree.evict(self._tree.num_tokens))
        self._reclaim()
        self.states.clear()
        if self._log is not None:
            self._log.cleared()

    def take_events(self) -> list[KvEvent]:
        """What the prefix cache has gained and lost since the last call, in order."""
        return [] if self._log is None else self._log.take()

    # ---------------------------------------------------------------- invariants

    def check_counts(self, running: Collection[HeldSequence]) -> None:
        """Raises AssertionError when the sizes do not add up. O(running)."""
        private = sum(request.num_slots - request.num_shared for request in running)
        loading = [] if self.tiers is None else self.tiers.held_slots()
        private += sum(len(slots) for slots in loading)
        if self._pool.num_free + private + self._tree.num_tokens != self._pool.num_slots:
            raise AssertionError(
                f"{self._pool.num_free} free + {private} private + {self._tree.num_tokens} cached KV slots "
                f"are not {self._pool.num_slots}"
            )
        rows = sum(request.width for request in running)
        if self._is_recurrent and self.states.num_running != rows:
            raise AssertionError(f"{self.states.num_running} state slots for {rows} sequences that run")
        if self._tree.num_idle > self._tree.num_tokens or (not running and not loading and self.num_held):
            raise AssertionError(f"{self._tree.num_idle} of {self._tree.num_tokens} cached KV slots are idle")

    def check_slots(self, running: Collection[HeldSequence]) -> None:
        """Raises AssertionError unless every slot is free, private to one request, or in the tree, and every state slot
        free, of one request, or a snapshot. O(slots)."""
        self._tree.check()
        private = [request.slots[request.num_shared :] for request in running]
        private += [array("i", r.beams.held_slots()) for r in running if r.beams is not None]
        loading = [] if self.tiers is None else self.tiers.held_slots()
        self._pool.check([*private, *loading, *self._tree.held_slots()])
        if self._is_recurrent:
            self.states.check(running)
        if self.windows is not None:
            self.windows.check(running)
