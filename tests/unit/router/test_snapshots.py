"""The parts of snapshots: where prompts are cut, what is evicted first, and what the tree does with them."""

from __future__ import annotations

from array import array
from dataclasses import replace

import pytest

from moeserve.router.core.memory.radix_cache import RadixCache
from moeserve.router.core.memory.radix_node import Node, Snapshot, SnapshotKind
from moeserve.router.core.memory.snapshot_points import DEFAULT_SPACING, snapshot_points
from moeserve.router.core.memory.snapshots import SnapshotCache

SHARED = ("", "")


def packed(tokens: list[int]) -> bytes:
    return array("i", tokens).tobytes()


class Tree(RadixCache):
    """Paths and snapshots by their tokens; state slots are counted up."""

    def __init__(self) -> None:
        super().__init__(recurrent=True)
        self.next_slot = 0

    def store(self, tokens: list[int], slot: int = 0) -> Node:
        node, found = self.acquire(SHARED, packed(tokens))
        slots = array("i", range(slot + len(found), slot + len(tokens)))
        return self.release(node, packed(tokens[len(found) :]), slots)[1]

    def snapshot(self, tokens: list[int], kind: SnapshotKind = SnapshotKind.ANSWER) -> Snapshot:
        node = self.node_at(self._roots[SHARED], packed(tokens))
        assert node is not None
        self.next_slot += 1
        snapshot = Snapshot(self.next_slot, len(tokens), kind)
        self.set_snapshot(node, snapshot)
        self.check()
        return snapshot

    def found(self, tokens: list[int]) -> int:
        return self.match(SHARED, packed(tokens))[0]


# -------------------------------------------------------------------- snapshot points


@pytest.mark.parametrize(
    ("start", "matched", "prompt", "points"),
    [
        (0, 0, 71, []),  # shorter than a snapshot is worth
        (0, 0, 72, [64]),
        (0, 0, 1000, [480, 992]),
        (0, 0, 9000, [800, 4896, 6944, 7968, 8480, 8992]),
        (8900, 8900, 9000, [8992]),  # the next turn of a conversation
        (8950, 8950, 9000, []),
        (0, 700, 1000, [480, 700, 992]),  # another prompt began like this one
        (0, 950, 1000, [480, 950]),  # so near the end: instead of the last snapshot point
        (0, 999, 1000, [480, 992]),  # the same prompt
        (650, 700, 1000, [992]),
        (600, 700, 800, [700, 792]),
    ],
)
def test_snapshot_points(start: int, matched: int, prompt: int, points: list[int]) -> None:
    assert [at for at, _ in snapshot_points(start, matched, prompt, DEFAULT_SPACING)] == points


def test_borders_at_ends_of_pages() -> None:
    spacing = replace(DEFAULT_SPACING, align=32)
    positions = [at for at, _ in snapshot_points(0, 700, 1000, spacing)]
    assert positions == [480, 672, 992]
    narrow = replace(spacing, least=1, first=40)
    assert all(at > 900 for at, _ in snapshot_points(900, 0, 1000, narrow)), "never before its begin"


@pytest.mark.parametrize("prompt", [100, 513, 5_000, 131_072])
@pytest.mark.parametrize("matched", [0, 77, 3000])
def test_borders_are_few_and_apart(prompt: int, matched: int) -> None:
    points = snapshot_points(0, min(matched, prompt), prompt, DEFAULT_SPACING)
    positions = [at for at, _ in points]
    assert positions == sorted(positions)
    assert all(b - a >= 64 for a, b in zip([0, *positions], positions, strict=False))
    assert all(at <= prompt - 8 for at in positions)
    assert len(positions) <= 2 + prompt.bit_length() - 8


# -------------------------------------------------------------------- the tree


def test_a_prefix_counts_up_to_its_deepest_snapshot() -> None:
    tree = Tree()
    tree.store([1, 2, 3, 4, 5, 6])
    assert tree.found([1, 2, 3, 4, 5, 6]) == 0
    tree.snapshot([1, 2, 3])
    tree.snapshot([1, 2, 3, 4, 5])
    assert [tree.found([1, 2, 3, 4, 5, 6][:n]) for n in range(7)] == [0, 0, 0, 3, 3, 5, 5]
    assert tree.found([1, 2, 3, 9]) == 3
    assert tree.num_matched(SHARED, packed([1, 2, 3, 4, 9])) == 4
    node, slots = tree.acquire(SHARED, packed([1, 2, 3, 4, 9]))
    assert slots.tolist() == [0, 1, 2]
    assert node.snapshot is not None


def test_a_split_leaves_the_snapshot_at_its_end() -> None:
    tree = Tree()
    tree.store([1, 2, 3, 4])
    deep = tree.snapshot([1, 2, 3, 4])
    tree.store([1, 2, 8, 9])
    assert tree.found([1, 2, 3, 4]) == 4
    assert tree.snapshot([1, 2]).gain == 2
    assert deep.gain == 2


def test_tokens_are_never_added_to_the_node_of_a_snapshot() -> None:
    tree = Tree()
    node, _ = tree.acquire(SHARED, b"")
    first = tree.extend(node, packed([1, 2]), array("i", [0, 1]))
    assert first is not None
    tree.set_snapshot(first, Snapshot(0, 2, SnapshotKind.PROMPT))
    second = tree.extend(first, packed([3]), array("i", [2]))
    assert second is not first
    assert second is not None
    tree.release(second, packed([4]), array("i", [3]))
    tree.check()
    assert tree.found([1, 2, 3, 4]) == 2


@pytest.mark.parametrize(("count", "left"), [(1, 1), (2, 1), (3, 1), (4, 0), (6, 0)])
def test_evicted_tokens_take_their_snapshots_along(count: int, left: int) -> None:
    tree = Tree()
    tree.store([1, 2, 3, 4, 5, 6])
    shallow, deep = tree.snapshot([1, 2, 3]), tree.snapshot([1, 2, 3, 4, 5, 6])
    tree.evict(count)
    tree.check()
    assert list(tree.snapshots()) == [shallow][:left]
    assert tree.take_dropped() == [deep, shallow][: 2 - left]
    assert tree.take_dropped() == []


def test_discarded_tokens_take_their_snapshots_along() -> None:
    tree = Tree()
    tree.store([1, 2, 3, 4])
    snapshot = tree.snapshot([1, 2, 3, 4])
    node, _ = tree.acquire(SHARED, packed([1, 2, 3, 4]))
    assert tree.discard(node).tolist() == [0, 1, 2, 3]
    assert tree.take_dropped() == [snapshot]


def test_computed_again_slots_replace_those_that_nobody_references() -> None:
    tree = Tree()
    tree.store([1, 2, 3, 4, 5])
    node, found = tree.acquire(SHARED, packed([1, 2, 3, 9]))
    assert not found
    adopted = tree.adopt(node, packed([1, 2, 3, 9]), array("i", [10, 11, 12, 13]))
    assert adopted is not None
    tree.check()
    node, freed = adopted
    assert freed.tolist() == [0, 1, 2]
    assert sorted(slot for node in tree.nodes() for slot in node.slots) == [3, 4, 10, 11, 12, 13]
    assert tree.num_idle == 2, "4 and 5, behind those in use"
    tree.release(node, b"", array("i"))
    assert tree.num_idle == tree.num_tokens == 6
    tree.check()


def test_slots_in_use_are_not_replaced() -> None:
    tree = Tree()
    tree.store([1, 2, 3])
    tree.snapshot([1, 2, 3])
    tree.acquire(SHARED, packed([1, 2, 3]))
    node, found = tree.acquire(SHARED, packed([1, 2]))
    assert not found
    assert tree.adopt(node, packed([1, 2]), array("i", [10, 11])) is None
    surplus, _ = tree.release(node, packed([1, 2]), array("i", [10, 11]))
    assert surplus.tolist() == [10, 11]
    tree.check()


# -------------------------------------------------------------------- eviction


def cache_of(*snapshots: Snapshot) -> SnapshotCache:
    cache = SnapshotCache()
    for snapshot in snapshots:
        cache.add(snapshot)
    return cache


def evict(tree: Tree, cache: SnapshotCache) -> Snapshot:
    victim = cache.victim()
    assert victim is not None
    cache.remove(victim)
    tree.unset_snapshot(victim)
    return victim


def test_what_is_cheap_to_compute_again_goes_first() -> None:
    tree = Tree()
    tree.store(list(range(100)))
    tree.store(list(range(500, 510)))
    long, end, short = (
        tree.snapshot(list(range(80))),
        tree.snapshot(list(range(100))),
        tree.snapshot(list(range(500, 510))),
    )
    cache = cache_of(long, end, short)
    assert [snapshot.gain for snapshot in (long, end, short)] == [80, 20, 10]
    assert evict(tree, cache) is short
    assert evict(tree, cache) is end
    assert evict(tree, cache) is long
    assert cache.victim() is None


def test_the_last_of_a_path_becomes_dear() -> None:
    tree = Tree()
    tree.store(list(range(100)))
    tree.store(list(range(500, 590)))
    shallow, deep = tree.snapshot(list(range(49))), tree.snapshot(list(range(100)))
    other = tree.snapshot(list(range(500, 590)))
    cache = cache_of(shallow, deep, other)
    assert evict(tree, cache) is shallow
    assert deep.gain == 100
    assert evict(tree, cache) is other


def test_what_is_not_used_goes_however_dear() -> None:
    tree = Tree()
    cache = SnapshotCache()
    tree.store(list(range(1000)))
    dear = tree.snapshot(list(range(1000)))
    cache.add(dear)
    for turn in range(1, 100):
        tokens = [1000 * turn + n for n in range(100)]
        tree.store(tokens)
        cache.add(tree.snapshot(tokens))
        if len(cache) > 3 and evict(tree, cache) is dear:
            break
    assert 10 < turn < 60


def test_a_kind_that_is_never_used_goes_first() -> None:
    tree = Tree()
    cache = SnapshotCache()
    for turn in range(40):  # of each turn, the prompt's end is used and the answer's is not
        tokens = [1000 * turn + n for n in range(200)]
        tree.store(tokens)
        prompt, answer = (
            tree.snapshot(tokens[:100], SnapshotKind.PROMPT),
            tree.snapshot(tokens, SnapshotKind.ANSWER),
        )
        cache.add(prompt)
        cache.add(answer)
        cache.use(prompt)
        while len(cache) > 4:
            evict(tree, cache)
    assert [snapshot.kind for snapshot in cache].count(SnapshotKind.PROMPT) >= 3


def test_the_source_of_a_copy_is_spared() -> None:
    tree = Tree()
    tree.store([1, 2, 3])
    only = tree.snapshot([1, 2, 3])
    cache = cache_of(only)
    assert cache.victim(spared=only) is None
    assert cache.victim() is only
