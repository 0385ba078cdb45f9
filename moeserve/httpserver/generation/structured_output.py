"""An answer that must match a grammar: checked here, compiled again by the worker."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

import msgspec

from moeserve.grammar import spec as grammar
from moeserve.grammar.checker import GrammarChecker
from moeserve.grammar.errors import GrammarError
from moeserve.httpserver.generation.request_builder import Wish
from moeserve.httpserver.transport.errors import ApiError, invalid


@dataclass(frozen=True)
class Constraint:
    wish: grammar.GrammarSpec
    param: str  # the client's name for it, for messages


async def constrain(grammars: GrammarChecker, wish: Wish, constraint: Constraint) -> Wish:
    """The same wish with its grammar. Raises ApiError 400 for one that does not compile, and for what disagrees
    with an answer that ends where its grammar does."""
    if wish.ignore_eos:
        raise invalid("ignore_eos", f"cannot be combined with {constraint.param}: a grammar has an end")
    if wish.sampling.min_tokens > 0:
        raise invalid(
            "min_tokens", f"cannot be combined with {constraint.param}: its grammar sets the length"
        )
    try:
        text = await grammars.check(constraint.wish)
    except GrammarError as error:
        message = f"{constraint.param}: {error}"
        raise ApiError(400, message, param=constraint.param, code="invalid_grammar") from error
    return dataclasses.replace(wish, sampling=msgspec.structs.replace(wish.sampling, grammar=text))
