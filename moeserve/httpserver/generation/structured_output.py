"""Answers that must match a grammar: checked here, compiled again by the worker."""

from __future__ import annotations

from moeserve.grammar.checker import GrammarChecker
from moeserve.grammar.errors import GrammarError
from moeserve.httpserver.generation.spec import GenerationSpec, GrammarConstraint
from moeserve.httpserver.transport.errors import ApiError, invalid


async def compile_grammar(
    grammars: GrammarChecker, spec: GenerationSpec, constraint: GrammarConstraint
) -> str:
    """Returns the constraint's grammar. Raises ApiError 400 for one that does not compile, and for fields that conflict
    with a grammar, which ends the answer itself."""
    if spec.ignore_eos:
        raise invalid("ignore_eos", f"cannot be combined with {constraint.param}: a grammar has an end")
    if spec.min_tokens > 0:
        raise invalid(
            "min_tokens", f"cannot be combined with {constraint.param}: its grammar sets the length"
        )
    try:
        return await grammars.check(constraint.spec)
    except GrammarError as error:
        message = f"{constraint.param}: {error}"
        raise ApiError(400, message, param=constraint.param, code="invalid_grammar") from error
