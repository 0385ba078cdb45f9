"""KV events of the prefix tree: whoever applies all of them has exactly the blocks that the tree has."""

from __future__ import annotations

import time
from array import array

import pytest
from hypothesis import settings as lives
from hypothesis.stateful import invariant

from moeserve.messages.kv_events import BlockRemoved, BlockStored, encode_batch
from moeserve.router.core.memory.block_log import BlockLog, block_hash
from moeserve.router.core.memory.embedding_numbers import EmbeddingNumbers
from moeserve.router.core.memory.radix_cache import RadixCache
from moeserve.router.core.memory.radix_node import Namespace
from tests.support.clients.kv_subscriber import Subscriber
from tests.support.router.radix_trees import SHARED, AgainstADictionary, packed

EXTRA_KEYS = {
    SHARED: (),
    ("key", ""): ("key:key",),
    ("", "salt"): ("salt",),
    ("", "salt", "abc"): ("lora:abc", "salt"),
}


class WithASubscriber(AgainstADictionary):
    """As there, with a subscriber whose blocks are the dictionary's prefixes of whole blocks."""

    size = 2

    def make_tree(self) -> RadixCache:
        self.subscriber = Subscriber()
        self.log = BlockLog(self.size, EmbeddingNumbers(list))
        return RadixCache(log=self.log)

    @invariant()
    def same_blocks(self) -> None:
        self.subscriber.apply(encode_batch(0.0, self.log.take(), as_maps=self.size == 2))
        whole = {
            (EXTRA_KEYS[namespace], prefix)
            for namespace, prefix in self.cached
            if len(prefix) % self.size == 0
        }
        assert self.subscriber.prefixes() == whole
        assert len(self.subscriber.blocks) == len(whole)


class WithLongerBlocks(WithASubscriber):
    size = 3


class TestWithASubscriber(WithASubscriber.TestCase):  # type: ignore[misc, valid-type]  # made by hypothesis
    settings = lives(max_examples=25, stateful_step_count=40, deadline=None)


class TestWithLongerBlocks(WithLongerBlocks.TestCase):  # type: ignore[misc, valid-type]
    settings = TestWithASubscriber.settings


@pytest.mark.slow
class TestMoreLivesWithLongerBlocks(WithLongerBlocks.TestCase):  # type: ignore[misc, valid-type]
    settings = lives(TestWithASubscriber.settings, max_examples=300)


def logged(size: int) -> tuple[RadixCache, BlockLog]:
    log = BlockLog(size, EmbeddingNumbers(list))
    return RadixCache(log=log), log


def test_blocks_come_when_they_are_whole_and_go_with_their_last_token() -> None:
    tree, log = logged(4)
    root, _ = tree.acquire(SHARED, b"")
    node = tree.extend(root, packed([1, 2, 3]), array("i", [0, 1, 2]))
    assert node is not None
    assert log.take() == []
    node = tree.extend(node, packed([4, 5, 6, 7, 8, 9]), array("i", range(3, 9)))
    assert node is not None
    first = block_hash(SHARED, None, packed([1, 2, 3, 4]))
    second = block_hash(SHARED, first, packed([5, 6, 7, 8]))
    assert log.take() == [BlockStored([first, second], None, [1, 2, 3, 4, 5, 6, 7, 8], 4)]
    tree.release(node, b"", array("i"))
    tree.evict(1)
    assert log.take() == []
    tree.evict(1)
    assert log.take() == [BlockRemoved([second])]
    tree.evict(7)
    assert log.take() == [BlockRemoved([first])]


def test_a_branch_stores_what_is_its_own() -> None:
    """Its block begins in the node above."""
    tree, log = logged(4)
    for tokens in ([1, 2, 3, 4, 5, 6, 7, 8], [1, 2, 3, 4, 5, 6, 70, 80]):
        node, slots = tree.acquire(SHARED, packed(tokens))
        tree.release(node, packed(tokens[len(slots) :]), array("i", range(len(slots), len(tokens))))
    first, second = log.take()
    assert isinstance(first, BlockStored)
    assert isinstance(second, BlockStored)
    assert second.parent_block_hash == first.block_hashes[0]
    assert second.token_ids == [5, 6, 70, 80]


def test_equal_prompts_of_two_namespaces_have_different_blocks() -> None:
    tokens = packed([1, 2, 3, 4])
    namespaces: list[Namespace] = [
        SHARED,
        ("", "salt"),
        ("salt", ""),
        ("key:salt", ""),
        ("", "key:salt"),
        ("", "", "salt"),
    ]
    assert len({block_hash(namespace, None, tokens) for namespace in namespaces}) == len(namespaces)


def test_a_log_of_one_token_after_another_costs_microseconds() -> None:
    """A decode row adds a token at each step. Measured 1 us; the bound leaves room for a busy machine."""
    tree, log = logged(64)
    root, _ = tree.acquire(SHARED, b"")
    node = tree.extend(root, packed([0]), array("i", [0]))
    assert node is not None
    start = time.thread_time()
    for token in range(1, 10_000):
        tree.extend(node, packed([token]), array("i", [token]))
    assert (time.thread_time() - start) / 10_000 < 50e-6
    assert len(log.take()) == 10_000 // 64
