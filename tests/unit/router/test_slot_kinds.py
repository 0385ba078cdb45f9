"""KV slots by kind: a running request never lacks one, whatever share of the pool its positions take."""

from __future__ import annotations

from array import array

import numpy as np
import pytest

from moeserve.kv.driven_slots import SlotCounter, slots_in_turn
from moeserve.kv.slot_kinds import SPARE_SLOTS, kinds_of_blocks, num_slot_numbers, rows_for
from moeserve.messages.slot_kinds import SlotKind
from moeserve.router.core.limits import Limits
from moeserve.router.core.memory.token_pool import PoolExhausted
from tests.support.router.router_world import World, request

BLOCK, MOST = 8, 8


def world(spare: int) -> World:
    kinds = kinds_of_blocks([2, BLOCK], 40, spare)
    limits = Limits(40, MOST, 40, 64, 100, slot_kinds=tuple(kinds))
    return World(limits)


def one_end_each(world: World) -> None:
    """Requests that share all of a block but its last token, which each has itself."""
    shared = list(range(1, BLOCK))
    world.add(request(0, [*shared, 100], 1))
    world.run()
    for id in range(1, 1 + MOST):
        world.add(request(id, [*shared, 100 + id], 3))
    world.run()
    world.check_all_free()


def test_ends_of_blocks_that_only_some_share() -> None:
    one_end_each(world(SPARE_SLOTS * MOST))


def test_without_spare_slots_they_would_lack_one() -> None:
    with pytest.raises(PoolExhausted):
        one_end_each(world(0))


def test_cached_prefixes_leave_when_a_kind_is_short() -> None:
    """Six cached prompts hold all slots for ends of blocks of 8, and a pool half of which is free."""
    short = World(Limits(100, 2, 100, 64, 100, slot_kinds=(SlotKind(BLOCK, 6), SlotKind(2, 40))))
    for id in range(6):
        short.add(request(id, [10 * id + i for i in range(BLOCK)], 1))
        short.run()
    assert short.scheduler.load_report().kv_slots_cached == 6 * BLOCK
    short.add(request(6, list(range(200, 216)), 1))
    short.run()
    short.check_all_free()
    # The least recently used prompt left, and of the next one its end.
    assert short.scheduler.load_report().kv_slots_cached == 6 * BLOCK - (BLOCK + 1) + 16


def test_rows_of_layers() -> None:
    """128 divides into blocks of 4: slots for its ends have room for the entries of 4 tokens, too."""
    kinds = kinds_of_blocks([4, 128], 1 << 20, 10)
    assert kinds == [SlotKind(128, 8192 + 11), SlotKind(4, (1 << 18) - 8192 + 11)]
    assert rows_for(kinds, 128) == 8203
    assert rows_for(kinds, 4) == (1 << 18) + 22
    assert num_slot_numbers(kinds, 1 << 20) == (1 << 20) + (1 << 18) + 22
    assert kinds_of_blocks([], 1 << 20, 10) == []


def test_slots_of_those_who_have_no_router() -> None:
    kinds = [SlotKind(8, 2), SlotKind(2, 10)]
    counter = SlotCounter(kinds)
    assert list(array("i", counter.take(0, 8))) == [12, 2, 13, 3, 14, 4, 15, 0]
    assert list(array("i", counter.take(0, 2))) == [16, 5]
    first, second = (np.frombuffer(slots_in_turn(kinds, 2, seq, 2, 6), np.int32).tolist() for seq in (0, 1))
    assert first == [14, 4, 16, 6, 18, 0]
    assert second == [15, 5, 17, 7, 19, 1]
    assert np.frombuffer(slots_in_turn([], 3, 1, 2, 2), np.int32).tolist() == [7, 10]
