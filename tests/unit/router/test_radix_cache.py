"""The prefix tree against a plain dictionary of prefixes, and its order of eviction."""

from __future__ import annotations

import random
import time
from array import array

import pytest
from hypothesis import settings as lives

from moeserve.router.core.memory.radix_cache import RadixCache
from tests.support.router.radix_trees import SHARED, AgainstADictionary, packed


class TestAgainstADictionary(AgainstADictionary.TestCase):  # type: ignore[misc, valid-type]  # made by hypothesis
    settings = lives(max_examples=30, stateful_step_count=40, deadline=None)


@pytest.mark.slow
class TestMoreLivesAgainstADictionary(AgainstADictionary.TestCase):  # type: ignore[misc, valid-type]
    settings = lives(TestAgainstADictionary.settings, max_examples=400)


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
        start = time.thread_time()
        assert tree.match(SHARED, query)[0] == prefix
        times.append(time.thread_time() - start)
    assert min(times) < 500e-6
