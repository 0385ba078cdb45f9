"""Other threads run while a grammar takes long: a step must not stand still for another request's mask."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import pytest

from moeserve.grammar.engine import COSTLY_TOKEN_S, GrammarEngine, Matcher, _Vocabulary
from moeserve.grammar.errors import GrammarError
from moeserve.grammar.spec import Ebnf
from moeserve.grammar.translate import to_grammar
from moeserve.models.sources.gguf import open_gguf
from moeserve.tokenizer.text_tokenizer import TextTokenizer
from tests.conftest import TINY_MODEL

AMBIGUOUS = to_grammar(Ebnf('start: s\ns: s s | A |\nA: "a"'))
CALLS = 30
NEVER_S = 100.0  # no thread is asked to let go of the GIL before


@pytest.fixture(scope="module")
def tokenizer() -> TextTokenizer:
    return TextTokenizer.from_gguf(open_gguf(TINY_MODEL))


@pytest.fixture(scope="module")
def engine(tokenizer: TextTokenizer) -> GrammarEngine:
    return GrammarEngine(tokenizer)


class Other(threading.Thread):
    """Counts whenever it has the GIL, and lets go of it again."""

    def __init__(self) -> None:
        super().__init__(daemon=True)
        self.count = 0
        self.ends = False

    def run(self) -> None:
        while not self.ends:
            self.count += 1
            time.sleep(0)


@contextmanager
def another_thread() -> Iterator[Other]:
    """It runs only where this one lets go of the GIL of its own accord."""
    interval = sys.getswitchinterval()
    other = Other()
    other.start()
    sys.setswitchinterval(NEVER_S)
    try:
        yield other
    finally:
        sys.setswitchinterval(interval)
        other.ends = True
        other.join()


def costly(engine: GrammarEngine, token_id: int) -> Matcher:
    """A matcher whose tokens take some milliseconds each."""
    matcher = engine.matcher(AMBIGUOUS)
    for _ in range(200):
        matcher.accept(token_id)
    mask = np.zeros(engine.words, np.int32)
    matcher.fill(mask)
    assert matcher._token_s > COSTLY_TOKEN_S
    return matcher


def test_others_run_while_a_costly_token_is_taken(engine: GrammarEngine, tokenizer: TextTokenizer) -> None:
    (token_id,) = tokenizer.encode("a")
    matcher = costly(engine, token_id)
    with another_thread() as other:
        before = other.count
        for _ in range(CALLS):
            matcher.accept(token_id)
        assert other.count > before


def test_others_run_while_a_grammars_text_is_split_into_tokens(tokenizer: TextTokenizer) -> None:
    vocabulary = _Vocabulary(tokenizer)
    text = "the fox runs over 12 hills and is " * 500
    with another_thread() as other:
        before = other.count
        ids = [vocabulary(text.encode()) for _ in range(CALLS)]
        assert other.count > before
    assert ids == [tokenizer.encode(text, parse_special=False)] * CALLS


def test_a_costly_matcher_takes_tokens_as_any_other_does(
    engine: GrammarEngine, tokenizer: TextTokenizer
) -> None:
    """The same masks, and a token that may not come is refused."""
    (token_id,), (wrong,) = tokenizer.encode("a"), tokenizer.encode("b")
    free, held = costly(engine, token_id), costly(engine, token_id)
    masks = np.zeros((2, engine.words), np.int32)
    elsewhere = [matcher.elsewhere_s for matcher in (free, held)]
    for _ in range(3):
        held._token_s = 0.0
        for matcher, mask in zip((free, held), masks, strict=True):
            matcher.accept(token_id)
            matcher.fill(mask)
        assert masks[0].any()
        assert (masks[0] == masks[1]).all()
    assert free.elsewhere_s > elsewhere[0]
    assert held.elsewhere_s == elsewhere[1]
    for matcher in (free, held):
        with pytest.raises(GrammarError):
            matcher.accept(wrong)
