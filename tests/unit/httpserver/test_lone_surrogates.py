"""Halves of surrogate pairs are replaced wherever a text is cut for the search."""

from __future__ import annotations

import asyncio
import json
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from moeserve.httpserver.transport import lone_surrogates
from moeserve.httpserver.transport.lone_surrogates import MAX_HALVES, mend, without_lone_surrogates

PIECES = ["\\\\", "\\ud83d", "\\ude00", "\\uDBff", "ud83d", "\\n", "\\u4e2d", "\\\\ud83d", "x", "f", "😀"]


def expected(text: str) -> str:
    """Reads JSON as json does, which accepts halves."""
    read: str = json.loads(f'"{text}"')
    return read.encode("utf-16", "surrogatepass").decode("utf-16", "replace")


@given(st.lists(st.sampled_from(PIECES), max_size=14).map("".join))
def test_halves_are_replaced_and_pairs_stay(text: str) -> None:
    assert json.loads(f'"{without_lone_surrogates(text)}"') == expected(text)


@given(st.lists(st.sampled_from(PIECES), max_size=14).map("".join))
def test_a_long_text_is_the_same_in_slices(text: str) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(lone_surrogates, "SLICE", 16)
        found = without_lone_surrogates(text + "x")
    assert found in (without_lone_surrogates(text + "x"), text + "x")


def test_a_half_beside_pictures() -> None:
    """A body with pictures in base64 has many MiB."""

    async def ask() -> tuple[str, int]:
        turns = 0
        mending = asyncio.create_task(mend("aZ" * (5 << 20) + '", "\\ud83d", "' + "Za" * (1 << 20)))
        while not mending.done():
            turns += 1
            await asyncio.sleep(0)
        return mending.result(), turns

    found, turns = asyncio.run(ask())
    assert found == "aZ" * (5 << 20) + '", "\\ufffd", "' + "Za" * (1 << 20)
    assert turns > 10  # of the event loop meanwhile


@pytest.mark.parametrize("text", ["\\" * (32 << 20) + "\\ud83d", "\\ud83d" * (MAX_HALVES + 1), "\0\\ud83d"])
def test_what_costs_too_much_comes_back_at_once(text: str) -> None:
    start = time.process_time()
    assert without_lone_surrogates(text) is text
    assert time.process_time() - start < 2
