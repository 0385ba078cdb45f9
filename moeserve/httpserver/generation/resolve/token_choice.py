"""The fields that name the tokens that an answer may contain, and the tokens that it may not."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import groupby
from typing import Final

from moeserve.grammar import spec as grammar
from moeserve.httpserver.generation.chat.model_text import ModelText
from moeserve.httpserver.generation.request.asked import Asked, GrammarConstraint
from moeserve.httpserver.generation.resolve.token_ids import check_ids
from moeserve.httpserver.transport.errors import invalid

# The most tokens of one of `bad_words`, which are compared with the answer's end at each token.
MAX_WORD_TOKENS: Final = 32
EXCLUDED: Final = -1e4  # a logit bias that outweighs every logit


@dataclass(frozen=True, slots=True)
class TokenChoice:
    logit_bias: Mapping[int, float]  # the client's biases, and EXCLUDED for bad words of one token
    bad_sequences: tuple[tuple[int, ...], ...]  # bad words of several tokens
    grammar: GrammarConstraint | None  # the client's grammar, or a grammar of `allowed_token_ids`


def token_choice(asked: Asked, text: ModelText) -> TokenChoice:
    """Resolves a request's token choice. Raises ApiError 400."""
    sequences = _sequences_of(asked.bad_words, text)
    biases = {ids[0]: EXCLUDED for ids in sequences if len(ids) == 1}
    longer = tuple(sorted(ids for ids in sequences if len(ids) > 1))
    return TokenChoice({**asked.logit_bias, **biases}, longer, _grammar(asked, text))


def _grammar(asked: Asked, text: ModelText) -> GrammarConstraint | None:
    if not asked.allowed_token_ids:
        return asked.grammar
    if asked.grammar is not None:
        raise invalid("allowed_token_ids", f"cannot be combined with {asked.grammar.param}")
    check_ids("allowed_token_ids", asked.allowed_token_ids, text.vocab_size)
    allowed = sorted(set(asked.allowed_token_ids) - set(text.eos_ids))
    if not allowed:
        raise invalid("allowed_token_ids", "must include a token that does not end the answer")
    lark = f"start: (<[{_ranges(allowed)}]>)+"
    return GrammarConstraint(grammar.Ebnf(lark), "allowed_token_ids")


def _sequences_of(words: tuple[str, ...], text: ModelText) -> set[tuple[int, ...]]:
    """Returns the token sequences of each word, with and without a blank before it. Raises ApiError 400."""
    found = set()
    for word in words:
        for written in (word, f" {word.lstrip()}"):
            ids = tuple(text.tokenizer.encode_rest(written))
            if len(ids) > MAX_WORD_TOKENS:
                message = f"{word[:80]!r} takes {len(ids)} tokens of this model; {MAX_WORD_TOKENS} at most are taken"
                raise invalid("bad_words", message)
            if ids:
                found.add(ids)
    return found


def _ranges(ids: list[int]) -> str:
    """Writes ascending ids as llguidance does, such as 1-3,7."""
    runs = [list(run) for _, run in groupby(enumerate(ids), lambda pair: pair[1] - pair[0])]
    ends = [(run[0][1], run[-1][1]) for run in runs]
    return ",".join(f"{low}-{high}" if low < high else f"{low}" for low, high in ends)
