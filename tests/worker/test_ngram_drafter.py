"""Look-up in a request's own tokens, against one that reads all of them."""

from __future__ import annotations

import numpy as np
import pytest

from moeserve.worker.drafts.drafter import Wanted
from moeserve.worker.drafts.ngram_drafter import CANDIDATES, NgramDrafter
from moeserve.worker.sequences import Int32s

SHORTEST, LONGEST, MOST = 2, 5, 4


def looked_up(text: list[int], most: int) -> list[int]:
    """What `NgramDrafter` promises: the last of the longest agreeing places among the last CANDIDATES ones."""
    last = len(text) - 1
    places = [
        place
        for place in range(last - 1, SHORTEST - 2, -1)
        if text[place - SHORTEST + 1 : place + 1] == text[last - SHORTEST + 1 :]
    ][:CANDIDATES]
    best, longest = -1, SHORTEST - 1
    for place in places:
        agreeing = 0
        while agreeing < LONGEST and agreeing <= place and text[place - agreeing] == text[last - agreeing]:
            agreeing += 1
        if agreeing > longest:
            best, longest = place, agreeing
    if best < 0:
        return []
    draft: list[int] = []
    for _ in range(most):
        draft.append([*text, *draft][best + 1 + len(draft)])
    return draft


def table(texts: list[list[int]]) -> Int32s:
    tokens = np.zeros((len(texts), max(map(len, texts)) + 1), np.int32)
    for slot, text in enumerate(texts):
        tokens[slot, : len(text)] = text
    return tokens


@pytest.mark.parametrize("alphabet", [2, 4, 30])
@pytest.mark.parametrize("seed", range(4))
def test_as_one_that_reads_everything(alphabet: int, seed: int) -> None:
    """Prompts of any length are taken in at once, then tokens in runs; another request takes the slot."""
    rng = np.random.default_rng(seed)
    texts = [rng.integers(0, alphabet, size).tolist() for size in (300, 41, 5)]
    tokens = table(texts)
    drafter = NgramDrafter(tokens, SHORTEST, LONGEST)
    found = 0
    for slot, text in enumerate(texts):
        for _ in range(2):
            drafter.bind(slot)
            length = int(rng.integers(1, len(text)))
            while length <= len(text):
                most = int(rng.integers(0, MOST + 1))
                draft = drafter.draft([Wanted(slot, length, most)])[0].tolist()
                assert draft == (looked_up(text[:length], most) if most else [])
                found += len(draft)
                length += int(rng.choice([1, 1, 2, 5, 40]))
    assert found > 0 or alphabet == 30


def test_goes_on_with_what_repeats() -> None:
    tokens = table([[9, 1, 2, 3, 1, 2, 3, 1, 2]])
    assert NgramDrafter(tokens, SHORTEST, LONGEST).draft([Wanted(0, 9, 6)])[0].tolist() == [3, 1, 2, 3, 1, 2]


def test_nothing_where_nothing_has_been_there() -> None:
    drafter = NgramDrafter(table([[1, 2, 3, 4, 5]]), SHORTEST, LONGEST)
    assert [drafter.draft([Wanted(0, length, MOST)])[0].tolist() for length in range(1, 6)] == [[]] * 5
