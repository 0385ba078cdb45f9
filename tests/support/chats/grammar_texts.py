"""Texts under a grammar: whether one may come, and what comes when tokens are chosen at random."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from moeserve.grammar.engine import GrammarEngine, Matcher
from moeserve.grammar.spec import GrammarSpec
from moeserve.grammar.translate import to_grammar
from moeserve.tokenizer.text_tokenizer import TextTokenizer


def allowed(engine: GrammarEngine, matcher: Matcher) -> set[int]:
    mask = np.zeros(engine.words, np.int32)
    matcher.fill(mask)
    return set(np.flatnonzero(np.unpackbits(mask.view(np.uint8), bitorder="little")).tolist())


def matches(
    engine: GrammarEngine,
    tokenizer: TextTokenizer,
    spec: GrammarSpec,
    text: str,
    *,
    parse_special: bool = False,
) -> bool:
    """Whether the whole text may come, every token of it being allowed by the mask before it."""
    matcher = engine.matcher(to_grammar(spec))
    for token_id in tokenizer.encode(text, parse_special=parse_special):
        if token_id not in allowed(engine, matcher):
            return False
        matcher.accept(token_id)
    return not allowed(engine, matcher).isdisjoint(engine.eos_ids)


def written(
    engine: GrammarEngine, spec: GrammarSpec, choose: Callable[[list[int]], int], most: int
) -> list[int] | None:
    """Returns an answer whose tokens `choose` picks among those that may come; the end comes where nothing else may.
    None if there are `most` tokens before it."""
    matcher = engine.matcher(to_grammar(spec))
    output: list[int] = []
    while len(output) < most:
        further = sorted(allowed(engine, matcher) - set(engine.eos_ids))
        if not further:
            return output
        token_id = choose(further)
        matcher.accept(token_id)
        output.append(token_id)
    return None
