"""The prefix tree against a plain dictionary of prefixes, and its order of eviction."""

from __future__ import annotations

import random
import time
from array import array
from itertools import count

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from moeserve.router.core.memory.radix_cache import RadixCache
from moeserve.router.core.memory.radix_node import Node

SHARED = ("", "")
TOKENS = st.lists(st.sampled_from([0, 0, 1]), max_size=6)  # few values: much in common
NAMESPACES = st.sampled_from([SHARED, SHARED, SHARED, ("key", ""), ("", "salt")])


def packed(tokens: list[int]) -> bytes:
    return array("i", tokens).tobytes()


class Hold:
    """What a request remembers of its hold, and the tokens it has computed beyond."""

    def __init__(self, namespace: tuple[str, str], tokens: list[int], node: Node) -> None:
        self.namespace = namespace
        self.tokens = tokens  # the tree's, down to `node`
        self.node = node


class AgainstADictionary(RuleBasedStateMachine):
    """The dictionary holds every cached prefix and its last slot; a hold protects the prefixes of its tokens."""

    @initialize()
    def empty(self) -> None:
        self.tree = self.make_tree()
        self.cached: dict[tuple[tuple[str, str], tuple[int, ...]], int] = {}
        self.holds: list[Hold] = []
        self.fresh = count()

    def make_tree(self) -> RadixCache:
        return RadixCache()

    def _slots(self, number: int) -> array[int]:
        return array("i", [next(self.fresh) for _ in range(number)])

    def _longest(self, namespace: tuple[str, str], tokens: list[int]) -> int:
        length = 0
        while length < len(tokens) and (namespace, tuple(tokens[: length + 1])) in self.cached:
            length += 1
        return length

    def _held(self) -> set[tuple[tuple[str, str], tuple[int, ...]]]:
        return {(h.namespace, tuple(h.tokens[:n])) for h in self.holds for n in range(1, len(h.tokens) + 1)}

    def _store(self, hold: Hold, tokens: list[int], slots: array[int]) -> list[int]:
        """Into the dictionary, what follows the hold; returns the slots of what was there already."""
        surplus = []
        for n, slot in enumerate(slots, start=1):
            prefix = (hold.namespace, tuple(hold.tokens + tokens[:n]))
            if prefix in self.cached:
                surplus.append(slot)
            else:
                self.cached[prefix] = slot
        return surplus

    @rule(namespace=NAMESPACES, tokens=TOKENS)
    def look(self, namespace: tuple[str, str], tokens: list[int]) -> None:
        length = self._longest(namespace, tokens)
        idle = sum((namespace, tuple(tokens[:n])) not in self._held() for n in range(1, length + 1))
        assert self.tree.match(namespace, packed(tokens)) == (length, idle)

    @rule(namespace=NAMESPACES, tokens=TOKENS)
    def acquire(self, namespace: tuple[str, str], tokens: list[int]) -> None:
        length = self._longest(namespace, tokens)
        node, slots = self.tree.acquire(namespace, packed(tokens))
        expected = [self.cached[namespace, tuple(tokens[:n])] for n in range(1, length + 1)]
        assert slots.tolist() == expected
        self.holds.append(Hold(namespace, tokens[:length], node))

    @precondition(lambda self: self.holds)
    @rule(data=st.data(), tokens=TOKENS.filter(len))
    def extend(self, data: st.DataObject, tokens: list[int]) -> None:
        hold = data.draw(st.sampled_from(self.holds))
        slots = self._slots(len(tokens))
        node = self.tree.extend(hold.node, packed(tokens), slots)
        assert (node is None) == ((hold.namespace, (*hold.tokens, tokens[0])) in self.cached)
        if node is not None:
            self._store(hold, tokens, slots)
            hold.tokens, hold.node = hold.tokens + tokens, node

    @precondition(lambda self: self.holds)
    @rule(data=st.data(), tokens=TOKENS)
    def release(self, data: st.DataObject, tokens: list[int]) -> None:
        hold = data.draw(st.sampled_from(self.holds))
        self.holds.remove(hold)
        slots = self._slots(len(tokens))
        surplus, _ = self.tree.release(hold.node, packed(tokens), slots)
        assert surplus.tolist() == self._store(hold, tokens, slots)

    @precondition(lambda self: self.holds)
    @rule(data=st.data())
    def discard(self, data: st.DataObject) -> None:
        hold = data.draw(st.sampled_from(self.holds))
        self.holds.remove(hold)
        self._forget(self.tree.discard(hold.node))

    @rule(number=st.integers(1, 6))
    def evict(self, number: int) -> None:
        idle = self.tree.num_idle
        freed = self.tree.evict(number)
        assert len(freed) == min(number, idle)
        self._forget(freed)

    def _forget(self, freed: array[int]) -> None:
        by_slot = {slot: prefix for prefix, slot in self.cached.items()}
        held = self._held()
        for slot in freed:
            assert by_slot[slot] not in held, "a slot in use is freed"
            del self.cached[by_slot[slot]]
        for namespace, prefix in self.cached:
            assert len(prefix) == 1 or (namespace, prefix[:-1]) in self.cached, (
                "a prefix is cut in the middle"
            )

    @invariant()
    def counts(self) -> None:
        self.tree.check()
        assert self.tree.num_tokens == len(self.cached)
        assert self.tree.num_idle == len(self.cached) - len(self._held())
        assert sorted(s for node in self.tree.nodes() for s in node.slots) == sorted(self.cached.values())


TestAgainstADictionary = AgainstADictionary.TestCase
TestAgainstADictionary.settings = settings(max_examples=80, stateful_step_count=40, deadline=None)


def cache_of(*sequences: list[int]) -> RadixCache:
    """Cached one after another; slot 100 i + n holds the n-th token of the i-th."""
    tree = RadixCache()
    for i, tokens in enumerate(sequences):
        node, slots = tree.acquire(SHARED, packed(tokens))
        rest = array("i", [100 * i + n for n in range(len(slots), len(tokens))])
        tree.release(node, packed(tokens[len(slots) :]), rest)
    return tree


def test_least_recently_used_goes_first_and_from_its_end() -> None:
    tree = cache_of([1, 2, 3], [4, 5, 6], [7, 8, 9])
    node, _ = tree.acquire(SHARED, packed([1, 2, 3]))
    tree.release(node, b"", array("i"))  # used again: now the newest
    assert tree.evict(2).tolist() == [101, 102]
    assert tree.match(SHARED, packed([4, 5, 6]))[0] == 1
    assert sorted(tree.evict(3)) == [100, 201, 202]
    assert tree.match(SHARED, packed([1, 2, 3]))[0] == 3


def test_what_many_share_outlives_what_each_added() -> None:
    shared = list(range(100, 120))
    tree = cache_of(*(shared + [i] * 10 for i in range(8)))
    tree.evict(80)
    assert tree.match(SHARED, packed(shared))[0] == 20
    assert tree.num_tokens == 20


def test_what_is_held_is_not_evicted() -> None:
    tree = cache_of([1, 2, 3, 4])
    node, _ = tree.acquire(SHARED, packed([1, 2]))
    assert sorted(tree.evict(10)) == [2, 3]
    assert tree.evict(10).tolist() == []
    tree.release(node, b"", array("i"))
    assert sorted(tree.evict(10)) == [0, 1]
    tree.check()


def test_a_chunk_added_by_its_only_holder_makes_no_new_node() -> None:
    """Else a prompt of a thousand chunks would be a path of a thousand nodes."""
    tree = RadixCache()
    node, _ = tree.acquire(SHARED, b"")
    first = tree.extend(node, packed([0]), array("i", [0]))
    assert first is not None
    for token in range(1, 1000):
        assert tree.extend(first, packed([token]), array("i", [token])) is first
    assert tree.match(SHARED, packed(list(range(2000)))) == (1000, 0)


def test_the_queue_of_leaves_does_not_grow_without_eviction() -> None:
    tree = cache_of([1, 2, 3])
    for _ in range(20_000):
        node, _ = tree.acquire(SHARED, packed([1, 2, 3]))
        tree.release(node, b"", array("i"))
    assert len(tree._idle) < 2000
    tree.check()


@pytest.mark.parametrize("prefix", [16_000, 15_999, 8_000, 1])
def test_a_long_match_costs_microseconds(prefix: int) -> None:
    """Measured 20 us for 16,000 tokens; the bound leaves room for a busy machine."""
    rng = random.Random(0)
    tokens = [rng.randrange(150_000) for _ in range(16_000)]
    tree = cache_of(tokens)
    query = packed([*tokens[:prefix], -1, *tokens[prefix + 1 :]])
    times = []
    for _ in range(20):
        start = time.perf_counter()
        assert tree.match(SHARED, query)[0] == prefix
        times.append(time.perf_counter() - start)
    assert min(times) < 500e-6
