"""Look-up in a request's own tokens, against one that reads all of them."""

from __future__ import annotations

import numpy as np
import pytest

from moeserve.messages.sampling import SamplingParams
from moeserve.messages.steps import CONTINUES, NewSeq, Row
from moeserve.worker.drafts.draft_rows import DraftRows
from moeserve.worker.drafts.drafter import Reading, Wanted
from moeserve.worker.drafts.ngram_drafter import CANDIDATES, NgramDrafter
from moeserve.worker.drafts.shared_texts import SharedTexts
from moeserve.worker.sequences import Int32s, Sequences

SHORTEST, LONGEST, MOST = 2, 5, 4


def looked_up(text: list[int], most: int) -> list[int]:
    """What `NgramDrafter` promises: the last of the longest agreeing places among the last CANDIDATES ones, and no more
    tokens than agree there, if they are fewer than LONGEST."""
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
    for _ in range(most if longest == LONGEST else min(most, longest)):
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
            drafter.bind(slot, "")
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


def text_of(seed: int, size: int = 60) -> list[int]:
    return np.random.default_rng(seed).integers(0, 1000, size).tolist()  # type: ignore[no-any-return]


def shared_drafts(namespaces: tuple[str, str], texts: list[list[int]], length: int) -> list[int]:
    """What is drafted for the second request behind `length` tokens, when the first one's text is known."""
    drafter = NgramDrafter(tokens := table(texts), SHORTEST, LONGEST, SharedTexts(LONGEST))
    drafter.bind(0, namespaces[0])
    drafter.draft([Wanted(0, len(texts[0]), 0)])
    drafter.bind(1, namespaces[1])
    tokens[0] = 0  # another request has taken its slot
    return drafter.draft([Wanted(1, length, MOST)])[0].tolist()  # type: ignore[no-any-return]


def test_looks_in_other_texts() -> None:
    text = text_of(1)
    for length in (LONGEST, 20, len(text) - 2):
        assert shared_drafts(("a", "a"), [text, text], length) == text[length : length + MOST]
    assert shared_drafts(("a", "a"), [text, text], LONGEST - 1) == []
    assert shared_drafts(("a", "a"), [text, [*text[:20], 1001, *text[21:30]]], 21) == []
    assert shared_drafts(("a", "a"), [text, [*text_of(2, 9), *text[10:30]]], 20) == text[21 : 21 + MOST]


def test_other_namespaces_are_not_looked_in() -> None:
    text = text_of(1)
    assert shared_drafts(("a", "b"), [text, text], 20) == []


def test_a_text_that_grows_is_shared_in_pieces() -> None:
    text = text_of(1)
    tokens = table([text, text])
    drafter = NgramDrafter(tokens, SHORTEST, LONGEST, SharedTexts(LONGEST))
    drafter.bind(0, "")
    for known in (10, 31, len(text)):
        drafter.draft([Wanted(0, known, 0)])
        drafter.bind(1, "")
    for length in (20, 31, 40):
        assert drafter.draft([Wanted(1, length, 1)])[0].tolist() == text[length : length + 1]


def test_texts_are_learnt_that_grew_while_nothing_was_drafted() -> None:
    """The drafter is not asked in steps without drafts, which costs them nothing; it learns these tokens when another
    request begins, and when the text's own request has drafts again."""
    text, sequences = text_of(1), Sequences(2, 60)
    drafter = NgramDrafter(sequences.tokens, SHORTEST, LONGEST, SharedTexts(LONGEST))
    rows = DraftRows(sequences, drafter, Reading())
    slots = np.arange(60, dtype=np.int32)

    def begin(slot: int, known: int) -> None:
        rows.bind(NewSeq(slot, np.array(text[:known], np.int32).tobytes(), known, b"", SamplingParams(40)))
        sequences.tokens[slot], sequences.kv_slots[slot] = text, slots

    def place(slot: int, drafts: int) -> tuple[Row, int]:
        placed, drafted = rows.place([Row(slot, CONTINUES, 1 + drafts, b"", True)])
        rows.grew(np.array([slot]))
        return placed[0], drafted[0]

    begin(0, 12)
    for start in range(11, 40):
        assert place(0, 0) == (Row(0, start, 1, slots[start : start + 1].tobytes(), True), 0)
        assert not rows.has_waited
    assert drafter._known[0] == 0
    begin(1, 20)
    assert drafter._known[0] == 41
    assert place(1, 4)[1] == 4
    assert rows.has_waited
    assert sequences.tokens[1, 20:24].tolist() == text[20:24]
    place(0, 4)
    assert drafter._known[0] == 41


def test_old_texts_give_way() -> None:
    shared = SharedTexts(LONGEST, 256)
    texts = [np.array(text_of(seed), np.int32) for seed in range(9)]
    for number, text in enumerate(texts):
        shared.add(str(number % 2), text)
        found = [0] * len(texts)
        for at, old in enumerate(texts):
            for length in range(LONGEST, 50):
                draft = shared.following(str(at % 2), old[length - LONGEST : length], 3).tolist()
                assert draft in ([], old[length : length + 3].tolist())
                found[at] += bool(draft)
        assert found[number] > 35
        assert sum(map(bool, found)) <= 4
    shared.add("0", np.arange(1000, dtype=np.int32))
    assert shared.following("0", np.arange(990, 990 + LONGEST, dtype=np.int32), 9).tolist() == [
        995,
        996,
        997,
        998,
        999,
    ]
