"""A radix tree beside a dictionary of the same prefixes."""

from __future__ import annotations

from array import array
from itertools import count

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
