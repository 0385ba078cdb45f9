"""Every KV slot and who has it: free + held by one request + in the prefix tree = all, after every call.

A request's slots come in this order:

    position   0 ............ num_shared ............... len(slots)
               | the tree's, which  | its own; the tree gets  |  the worker has
               | it holds by `node` | them when it leaves     |  heard of no more

What is known to be in the tree may be read by others at once, though its KV may be computed only in a step
still to come: the worker executes plans in order, and writes the KV of all rows of a step, layer by layer,
before any of them attends.
"""

from __future__ import annotations

from array import array
from collections.abc import Collection

from moeserve.router.core.radix_cache import RadixCache
from moeserve.router.core.request import Request
from moeserve.router.core.token_pool import TokenPool


class KvMemory:
    """The one writer of a request's `slots`, `node`, `num_shared` and `borrowed`."""

    def __init__(self, num_slots: int, *, reuse: bool = True, isolate_tenants: bool = False) -> None:
        self._pool = TokenPool(num_slots)
        self._tree = RadixCache()
        self._reuse = reuse
        self._isolate = isolate_tenants

    @property
    def num_slots(self) -> int:
        return self._pool.num_slots

    @property
    def available(self) -> int:
        """Slots that `take` could give: free ones, and those of idle cache entries."""
        return self._pool.num_free + self._tree.num_idle

    @property
    def num_held(self) -> int:
        """Slots that running requests hold, each counted once."""
        return self._pool.num_slots - self.available

    @property
    def num_cached(self) -> int:
        """Slots of idle cache entries."""
        return self._tree.num_idle

    def lookup(self, request: Request) -> tuple[int, int]:
        """How many of its tokens `attach` would find, and how many of those nobody holds. Changes nothing."""
        if not self._reuse:
            return 0, 0
        return self._tree.match(self._namespace(request), self._reusable(request))

    def attach(self, request: Request) -> None:
        """Gives a request that holds nothing what the cache has of its tokens."""
        if not self._reuse:
            return
        namespace, tokens = self._namespace(request), self._reusable(request)
        idle_before = self._tree.num_idle
        request.node, request.slots = self._tree.acquire(namespace, tokens)
        request.num_shared = len(request.slots)
        request.borrowed = request.num_shared - (idle_before - self._tree.num_idle)

    def take(self, count: int) -> array[int]:
        """`count` slots, at most `available`, for whoever then has them in its `slots`."""
        lacking = count - self._pool.num_free
        if lacking > 0:
            self._pool.free(self._tree.evict(lacking))
        return self._pool.alloc(count)

    def publish(self, request: Request) -> None:
        """Lets others read what is planned of its known tokens. A request that finds the same tokens in the
        tree, brought by another meanwhile, keeps its own slots to itself until it leaves."""
        end = min(len(request.slots), len(request.tokens))
        begin = request.num_shared
        if request.node is None or begin == end:
            return
        node = self._tree.extend(request.node, request.tokens[begin:end].tobytes(), request.slots[begin:end])
        if node is not None:
            request.node, request.num_shared = node, end

    def detach(self, request: Request, *, forget: bool = False) -> None:
        """Takes back all it holds. The cache keeps what is known of it, for as long as there is room; unless
        it is to `forget`: then what nobody else uses is free at once."""
        begin, end = request.num_shared, min(len(request.slots), len(request.tokens))
        if request.node is None:
            begin = end = 0
        elif forget:
            end = begin
            self._pool.free(self._tree.discard(request.node))
        else:
            tokens, slots = request.tokens[begin:end].tobytes(), request.slots[begin:end]
            self._pool.free(self._tree.release(request.node, tokens, slots))
        self._pool.free(request.slots[end:])
        request.slots, request.node = array("i"), None
        request.num_shared = request.borrowed = 0

    def _namespace(self, request: Request) -> tuple[str, str]:
        return (request.tenant if self._isolate else "", request.cache_salt)

    @staticmethod
    def _reusable(request: Request) -> bytes:
        return request.tokens[: request.reuse_limit].tobytes()

    # ---------------------------------------------------------------- invariants

    def check_counts(self, running: Collection[Request]) -> None:
        """Raises AssertionError when the sizes do not add up. O(running)."""
        private = sum(len(request.slots) - request.num_shared for request in running)
        if self._pool.num_free + private + self._tree.num_tokens != self._pool.num_slots:
            raise AssertionError(
                f"{self._pool.num_free} free + {private} private + {self._tree.num_tokens} cached KV slots "
                f"are not {self._pool.num_slots}"
            )
        if self._tree.num_idle > self._tree.num_tokens or (not running and self.num_held):
            raise AssertionError(f"{self._tree.num_idle} of {self._tree.num_tokens} cached KV slots are idle")

    def check_slots(self, running: Collection[Request]) -> None:
        """Raises AssertionError unless every slot is free, one request's or the tree's, once. O(slots)."""
        self._tree.check()
        private = [request.slots[request.num_shared :] for request in running]
        self._pool.check([*private, *self._tree.held_slots()])
